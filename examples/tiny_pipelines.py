"""Tiny pipelines with random weights, for `--tiny`: they make noise, but take every step, on a CPU in seconds.

Each function returns a pipeline and the arguments of a call. Prompts are embeddings, so no text encoder is needed.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

WITHOUT_TEXT = {"text_encoder": None, "tokenizer": None}


def sd3() -> tuple[Any, dict[str, Any]]:
    """An image pipeline: 192 x 128 pixels, an autoencoder of 8 x with a tile window of 64."""
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=24, patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_attention_heads=2,
        attention_head_dim=8, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=8,
        pos_embed_max_size=64,
    )  # fmt: skip
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer, diffusers.FlowMatchEulerDiscreteScheduler(), _image_vae(), **WITHOUT_TEXT,
        text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    return pipe, {**_text(pooled=True), "height": 192, "width": 128, "num_inference_steps": 2}


def flux() -> tuple[Any, dict[str, Any]]:
    """An image pipeline whose transformer takes tokens with positions: 64 x 96 pixels."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=12,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 4, 4),
    )  # fmt: skip
    pipe = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), _image_vae(), transformer=transformer, **WITHOUT_TEXT,
        text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    return pipe, {**_text(pooled=True), "height": 64, "width": 96, "num_inference_steps": 2}


def wan() -> tuple[Any, dict[str, Any]]:
    """A video pipeline: 9 frames of 96 x 64 pixels, an autoencoder of 8 x and, over frames, 4 x."""
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12, freq_dim=16,
        ffn_dim=32, num_layers=1, rope_max_seq_len=64,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = diffusers.WanPipeline(**WITHOUT_TEXT, vae=vae, scheduler=scheduler, transformer=transformer)
    return pipe, {**_text(), "height": 96, "width": 64, "num_frames": 9, "num_inference_steps": 2}


def ltx2() -> tuple[Any, dict[str, Any]]:
    """A video pipeline with sound: 17 frames of 192 x 128 pixels, an autoencoder of 32 x and, over frames, 8 x."""
    torch.manual_seed(0)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
        audio_in_channels=16, audio_out_channels=16, audio_num_attention_heads=2, audio_attention_head_dim=6,
        audio_cross_attention_dim=12, num_layers=1, caption_channels=12, rope_double_precision=False,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(16, 32, 32, 64), decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, decoder_causal=False,
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    sides = {"num_attention_heads": 2, "attention_head_dim": 6, "num_layers": 1, "num_learnable_registers": None}
    connectors = LTX2TextConnectors(
        caption_channels=12, text_proj_in_factor=1, rope_double_precision=False,
        **{f"{side}_connector_{name}": value for side in ("video", "audio") for name, value in sides.items()},
    )  # fmt: skip
    pipe = diffusers.LTX2Pipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(),
        vae,
        diffusers.AutoencoderKLLTX2Audio(base_channels=16, ch_mult=(1, 2, 2), num_res_blocks=1, mel_bins=8),
        **WITHOUT_TEXT,
        connectors=connectors,
        transformer=transformer,
        # two channels of 8 mel bins, at 100 a second, become samples at 8000
        vocoder=LTX2Vocoder(16, 8, upsample_kernel_sizes=[16, 20], upsample_factors=[8, 10], output_sampling_rate=8000),
    )
    masks = {"prompt_attention_mask": torch.ones(1, 5), "negative_prompt_attention_mask": torch.ones(1, 5)}
    size = {"height": 192, "width": 128, "num_frames": 17, "frame_rate": 24.0, "num_inference_steps": 2}
    return pipe, {**_text(), **masks, **size}


def _image_vae() -> Any:
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return diffusers.AutoencoderKL(
        **kinds, block_out_channels=(16, 16, 32, 32), norm_num_groups=8, latent_channels=16, sample_size=64,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06,
    )  # fmt: skip


def _text(pooled: bool = False) -> dict[str, torch.Tensor]:
    """A prompt and a negative one, as a text encoder would give them."""
    shapes = {"prompt_embeds": (1, 5, 12)} | ({"pooled_prompt_embeds": (1, 8)} if pooled else {})
    return {prefix + name: torch.randn(shape) for prefix in ("", "negative_") for name, shape in shapes.items()}

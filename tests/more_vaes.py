"""Tiny random-weight configurations of the diffusers autoencoders that tiny_vaes.py leaves out, in the same format.

CONFIGS: NAME -> (class name, kwargs, latent shape for decode, spatial ratio, temporal ratio, what it is)
DECODE_KW: NAME -> extra kwargs of decode(). CHANNELS: NAME -> channels of what is encoded, where not 3.
WITHOUT_KIND: class name -> why no kind stands for it.
Latents are 11 high and 5 wide, as in tiny_vaes.py.
"""

from __future__ import annotations

from typing import Any

H, W = 11, 5
Config = tuple[str, dict[str, Any], tuple[int, ...], int, int, str]


def _kind(name: str, latent: tuple[int, ...], ratio: int, frames: int = 1, what: str = "image", **own: Any) -> Config:
    return name, own, latent, ratio, frames, what


_DOWN, _UP = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
_VQ = {
    # the blocks' own groups are 32 in spatial norms, whatever norm_num_groups says
    "block_out_channels": (32, 32, 32, 32),
    "latent_channels": 4,
    "num_vq_embeddings": 64,
    "norm_num_groups": 8,
    "vq_embed_dim": 4,
}

CONFIGS: dict[str, Config] = {
    # Stable Diffusion's inpainting autoencoder: a decoder wider than its encoder
    "AsymmetricAutoencoderKL": _kind(
        "AsymmetricAutoencoderKL",
        (1, 4, H, W),
        8,
        down_block_types=_DOWN,
        up_block_types=_UP,
        down_block_out_channels=(16, 16, 32, 32),
        up_block_out_channels=(16, 32, 32, 32),
        norm_num_groups=8,
    ),
    # Stable Video Diffusion: the frames lie in the batch; below two layers its mid block has no attention
    "AutoencoderKLTemporalDecoder": _kind(
        "AutoencoderKLTemporalDecoder",
        (3, 4, H, W),
        8,
        down_block_types=_DOWN,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=2,
    ),
    # a diffusion decoder: noise at the start and in the step between
    "ConsistencyDecoderVAE": _kind(
        "ConsistencyDecoderVAE",
        (1, 4, H, W),
        8,
        encoder_block_out_channels=(16, 16, 32, 32),
        encoder_layers_per_block=1,
        encoder_norm_num_groups=8,
        decoder_block_out_channels=(16, 16, 32, 32),
        decoder_layers_per_block=1,
        decoder_norm_num_groups=8,
    ),
    # LDM's VQ-GAN, which quantizes what it decodes
    "VQModel": _kind("VQModel", (1, 4, H, W), 8, down_block_types=_DOWN, up_block_types=_UP, **_VQ),
    # Kandinsky 2's MOVQ: norms modulated by the latent, attention in the deepest blocks
    "VQModel_movq": _kind(
        "VQModel",
        (1, 4, H, W),
        8,
        down_block_types=(*_DOWN[1:], "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", *_UP[1:]),
        norm_type="spatial",
        **_VQ,
    ),
    "AutoencoderKLCosmos": _kind(
        "AutoencoderKLCosmos",
        (1, 4, 2, H, W),
        8,
        8,
        "video",
        encoder_block_out_channels=(16, 16, 32, 32),
        decode_block_out_channels=(16, 32, 32, 32),
        latent_channels=4,
        num_layers=1,
        latents_mean=None,
        latents_std=None,
    ),
    "AutoencoderKLKVAE": _kind(
        "AutoencoderKLKVAE",
        (1, 4, H, W),
        8,
        channels=32,
        num_enc_blocks=1,
        num_dec_blocks=1,
        z_channels=4,
        ch_mult=(1, 1, 1, 2),
    ),
    "AutoencoderKLKVAEVideo": _kind(
        "AutoencoderKLKVAEVideo",
        (1, 4, 3, H, W),
        8,
        4,
        "video",
        ch=32,
        ch_mult=(1, 1, 1, 1),
        num_res_blocks=1,
        z_channels=4,
    ),
    # one frame of its latent is one frame of its sample
    "AutoencoderKLHunyuanImageRefiner": _kind(
        "AutoencoderKLHunyuanImageRefiner",
        (1, 8, 1, H, W),
        16,
        1,
        "image",
        latent_channels=8,
        block_out_channels=(16, 32, 32, 64, 64),
        layers_per_block=1,
    ),
    # RGBA
    "AutoencoderKLQwenImage21": _kind(
        "AutoencoderKLQwenImage21",
        (1, 4, 1, H, W),
        16,
        8,
        "image",
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 4, 4],
        num_res_blocks=1,
    ),
    "AutoencoderVidTok": _kind(
        "AutoencoderVidTok", (1, 4, 3, H, W), 8, 4, "video", ch=16, ch_mult=[1, 1, 2, 2], z_channels=4, num_res_blocks=1
    ),
    # the discrete tokenizer: its encode returns quantized latents, and their indices beside them
    "AutoencoderVidTok_fsq": _kind(
        "AutoencoderVidTok",
        (1, 6, 3, H, W),
        8,
        4,
        "video",
        ch=16,
        ch_mult=[1, 1, 2, 2],
        z_channels=6,
        double_z=False,
        num_res_blocks=1,
        regularizer="fsq",
    ),
    "Kandinsky6SRVAE": _kind(
        "Kandinsky6SRVAE",
        (1, 8, 3, H, W),
        16,
        4,
        "video",
        latent_channels=8,
        encoder_block_out_channels=(4, 8, 16, 32, 32),
        decoder_block_out_channels=(4, 8, 16, 32, 32),
        layers_per_block=1,
    ),
    # spectrograms, B C frames mel: what is sharded is time, and it is causal
    "AutoencoderKLLTX2Audio": _kind(
        "AutoencoderKLLTX2Audio",
        (1, 4, H, W),
        4,
        1,
        "spectrogram",
        base_channels=16,
        ch_mult=(1, 2, 2),
        num_res_blocks=1,
        latent_channels=4,
        mel_bins=4 * W,
    ),
}

DECODE_KW: dict[str, dict[str, Any]] = {
    "AutoencoderKLTemporalDecoder": {"num_frames": 3},
    # as Kandinsky's pipelines call it
    "VQModel_movq": {"force_not_quantize": True},
}
CHANNELS = {"AutoencoderKLQwenImage21": 4, "AutoencoderKLLTX2Audio": 2}

WITHOUT_KIND = {
    "AutoencoderKLAllegro": "it has no decode or encode but in tiles (NotImplementedError without enable_tiling)",
    "AutoencoderKLKVAEAudio": "waveforms, B C T: no height to shard or tile",
    "AutoencoderKLMiniMaxH3Audio": "waveforms, B C T: no height to shard or tile",
    "AutoencoderOobleck": "waveforms, B C T: no height to shard or tile",
    "AutoencoderRAE": "a vision transformer of the transformers package, which halotile does not depend on",
    "AutoencoderSAME": "waveforms, B C T: no height to shard or tile",
    "Cosmos3AVAEAudioTokenizer": "waveforms, B C T: no height to shard or tile",
    "LTX2VideoDiffusionDecoderModel": "a diffusion model over pixels: its neighbourhood attention is a FlexAttention, "
    "a higher-order operator, and sharded rows cannot enter one",
    "LongCatAudioDiTVae": "waveforms, B C T: no height to shard or tile",
    "MMAudioVAE": "its convolutions are one-dimensional, over B mel T: no height to shard or tile",
    "RFD4ProteinaAutoencoder": "residues of a protein, B N C: no height to shard or tile",
}

"""Diffusers pipelines whose transformer is tiled: tiny random models, called as the pipelines call them.

Prompts come as embeddings and results are latents, so that no text encoder and hardly an autoencoder is needed.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from denoised import tiling
from ranks import run_ranks
from tiny_transformers import flux, hunyuan, ltx, ltx2, noise, qwen, wan, without_attention
from tiny_vaes import CONFIGS

from halotile import TiledDenoiser
from halotile.comm import Ranks

# diffusers makes its pipelines only where it is installed
pytest.importorskip("transformers")

TEXT = {"prompt_embeds": noise(1, 5, 12), "negative_prompt_embeds": noise(1, 5, 12, seed=1)}
POOLED = {"pooled_prompt_embeds": noise(1, 8), "negative_pooled_prompt_embeds": noise(1, 8, seed=3)}
MASKS = {"prompt_attention_mask": torch.ones(1, 5), "negative_prompt_attention_mask": torch.ones(1, 5)}
PIXELS = {"height": 96, "width": 128}
WITHOUT_TEXT = {"text_encoder": None, "tokenizer": None}


def _pipeline(name, **parts):
    import diffusers

    pipe = getattr(diffusers, name)(**{"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "vae": None, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _vae(name, **config):
    import diffusers

    torch.manual_seed(0)
    kind, known, *_ = CONFIGS[name]
    return getattr(diffusers, kind)(**{**known, **config}).eval()


def _picture():
    from PIL import Image

    return Image.linear_gradient("L").convert("RGB").resize((256, 192))


def wan_pipeline():
    """A stateful scheduler of second order, and guidance by two forwards."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = _pipeline("WanPipeline", **WITHOUT_TEXT, scheduler=scheduler, transformer=wan())
    return pipe, {**TEXT, **PIXELS, "num_frames": 9, "latents": noise(1, 4, 3, 12, 16), "guidance_scale": 3.0}


def wan22_pipeline():
    """Timesteps a token."""
    pipe, given = wan_pipeline()
    return _pipeline("WanPipeline", **WITHOUT_TEXT, transformer=pipe.transformer, expand_timesteps=True), given


def ltx_pipeline():
    """Guidance by one forward of two samples."""
    pipe = _pipeline("LTXPipeline", **WITHOUT_TEXT, transformer=ltx())
    size = {"height": 192, "width": 256, "num_frames": 17}
    return pipe, {**TEXT, **MASKS, **size, "latents": noise(1, 144, 4), "guidance_scale": 3.0}


def ltx_condition_pipeline():
    """Pictures at the first frame and at the second: the latter as 48 tokens before the generated ones."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    vae = _vae("AutoencoderKLLTXVideo_0.9.0", latent_channels=4)
    pipe = _pipeline("LTXConditionPipeline", **WITHOUT_TEXT, vae=vae, transformer=ltx())
    size = {"height": 192, "width": 256, "num_frames": 17}
    conditions = [LTXVideoCondition(_picture()), LTXVideoCondition(_picture(), frame_index=8, strength=0.9)]
    generator = torch.Generator().manual_seed(0)
    return pipe, {**TEXT, **MASKS, **size, "conditions": conditions, "generator": generator, "guidance_scale": 3.0}


def ltx2_pipeline():
    """Audio, and guidance of three kinds: two samples in one forward, and two more forwards."""
    import diffusers
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    torch.manual_seed(0)
    small = {"num_attention_heads": 2, "attention_head_dim": 6, "num_layers": 1, "num_learnable_registers": None}
    sides = {f"{side}_connector_{name}": value for side in ("video", "audio") for name, value in small.items()}
    connectors = LTX2TextConnectors(caption_channels=12, text_proj_in_factor=1, rope_double_precision=False, **sides)
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, latent_channels=4, mel_bins=8
    )
    pipe = _pipeline(
        "LTX2Pipeline",
        **WITHOUT_TEXT,
        vae=_vae("AutoencoderKLLTX2Video", latent_channels=4),
        audio_vae=audio_vae,
        connectors=connectors,
        vocoder=None,
        transformer=ltx2(audio_in_channels=8, audio_out_channels=8),
    )
    guidance = {"guidance_scale": 3.0, "stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1], "modality_scale": 2.0}
    size = {"height": 192, "width": 256, "num_frames": 17, "frame_rate": 24.0, "latents": noise(1, 144, 4)}
    generator = torch.Generator().manual_seed(0)
    return pipe, {**TEXT, **MASKS, **size, **guidance, "generator": generator}


def flux_pipeline():
    pipe = _pipeline(
        "FluxPipeline", **WITHOUT_TEXT, text_encoder_2=None, tokenizer_2=None, transformer=flux(guidance=True)
    )
    return pipe, {**TEXT, **POOLED, **PIXELS, "latents": noise(1, 48, 16), "true_cfg_scale": 2.0}


def kontext_pipeline():
    """The reference picture's tokens behind the generated ones."""
    vae = _vae("AutoencoderKL_flux1", latent_channels=4, block_out_channels=(8, 8, 8, 8))
    pipe = _pipeline(
        "FluxKontextPipeline", **WITHOUT_TEXT, text_encoder_2=None, tokenizer_2=None, vae=vae, transformer=flux()
    )
    one = {name: value for name, value in {**TEXT, **POOLED}.items() if "negative" not in name}
    generator = torch.Generator().manual_seed(0)
    # the picture is not taken to one of the sizes that Kontext was trained with
    return pipe, {
        **one,
        **PIXELS,
        "image": _picture().resize((128, 96)),
        "generator": generator,
        "max_area": 96 * 128,
        "_auto_resize": False,
    }


def qwen_pipeline():
    masks = {"prompt_embeds_mask": torch.ones(1, 5).long(), "negative_prompt_embeds_mask": torch.ones(1, 5).long()}
    pipe = _pipeline("QwenImagePipeline", **WITHOUT_TEXT, transformer=qwen())
    return pipe, {**TEXT, **masks, **PIXELS, "latents": noise(1, 48, 16), "true_cfg_scale": 2.0}


def hunyuan_pipeline():
    pipe = _pipeline(
        "HunyuanVideoPipeline", **WITHOUT_TEXT, text_encoder_2=None, tokenizer_2=None, transformer=hunyuan()
    )
    size = {**PIXELS, "num_frames": 9, "latents": noise(1, 4, 3, 12, 16)}
    return pipe, {**TEXT, **POOLED, **MASKS, **size, "true_cfg_scale": 2.0}


# of forwards a step
PIPELINES = {
    wan_pipeline: 2,
    wan22_pipeline: 2,
    ltx_pipeline: 1,
    ltx_condition_pipeline: 1,
    ltx2_pipeline: 3,
    flux_pipeline: 2,
    kontext_pipeline: 1,
    qwen_pipeline: 2,
    hunyuan_pipeline: 2,
}
STEPS = 2
TILINGS = (
    ((1, 0), (1, 0), (1, 0)),
    ((1, 0), (1, 0), (2, 1)),
    ((1, 0), (2, 1), (2, 1)),
    ((1, 0), (4, 1), (4, 1)),
)
"""1, 2, 4 and 16 tiles: more than ranks, and fewer."""


@functools.cache
def made(make):
    return make()


def latents(pipe, given):
    """What the pipeline makes, video and, of LTX-2, audio."""
    given = {**given, **({"generator": given["generator"].manual_seed(0)} if "generator" in given else {})}
    with warnings.catch_warnings():
        # the condition pipeline hands numpy a tensor
        warnings.filterwarnings("ignore", "__array__", DeprecationWarning)
        made = pipe(**given, num_inference_steps=STEPS, output_type="latent", return_dict=False)
    return tuple(made)


def tiled_latents(make, tiles, group, **options):
    """The same with a tiled transformer, and the pipeline as it was behind."""
    pipe, given = made(make)
    model = pipe.transformer
    # from pure noise, which is for tests only
    pipe.transformer = TiledDenoiser(model, tiling(*tiles), group, first_sigma_limit=2.0, **options)
    try:
        got = latents(pipe, given)
        assert len(pipe.transformer.drift) == STEPS * PIPELINES[make]
    finally:
        pipe.transformer = model
    return got


@pytest.mark.parametrize("make", PIPELINES)
def test_one_tile_is_the_pipeline_itself_and_taking_it_off_leaves_no_trace(make):
    pipe, given = made(make)
    before = latents(pipe, given)
    assert all(map(torch.equal, tiled_latents(make, TILINGS[0], Ranks.alone()), before))
    several = tiled_latents(make, TILINGS[2], Ranks.alone(), audio="frozen")
    assert not torch.allclose(several[0], before[0], atol=1e-3)
    assert all(map(torch.equal, latents(pipe, given), before))


@pytest.mark.parametrize("make", PIPELINES)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_pipeline_of_single_tokens_is_not_changed_by_tiles(make, normalize):
    pipe, given = make()
    without_attention(pipe.transformer)
    expected = latents(pipe, given)
    tiles = tiling((1, 0), (2, 1), (2, 1))
    pipe.transformer = TiledDenoiser(
        pipe.transformer, tiles, Ranks.alone(), first_sigma_limit=2.0, normalize_positions=normalize, audio="frozen"
    )
    # a few roundings a step, made larger by guidance; audio is frozen, which the video's attention to it notices
    if make is not ltx2_pipeline:
        torch.testing.assert_close(latents(pipe, given)[0], expected[0], rtol=0, atol=1e-4)
    else:
        video, audio = latents(pipe, given)
        assert video.shape == expected[0].shape
        assert not torch.equal(audio, expected[1])


def _on_ranks(group, ranks):
    """Each pipeline with one tiling: over 1 to 4 ranks it meets all of them."""
    out = {}
    for place, make in enumerate(PIPELINES):
        number = (place + ranks) % len(TILINGS)
        out[place, number] = tiled_latents(make, TILINGS[number], group, deterministic=True, audio="frozen")[0]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_make_the_same(ranks):
    serial = _on_ranks(Ranks.alone(), ranks)
    for output in run_ranks(_on_ranks, ranks, ranks):
        for key, expected in serial.items():
            assert torch.equal(output[key], expected), key


def test_frozen_audio_stays_what_it_was():
    pipe, _ = made(ltx2_pipeline)
    first = []

    def keep(module, args, kwargs):
        first.append(kwargs["audio_hidden_states"][:1].clone())

    model = pipe.transformer
    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        tiled_latents(ltx2_pipeline, TILINGS[2], Ranks.alone(), audio="frozen")
    finally:
        handle.remove()
    assert len(first) == 4 * STEPS * PIPELINES[ltx2_pipeline]
    # the pipeline goes from a velocity of zero to a clean latent and back, in float32
    for later in first[1:]:
        torch.testing.assert_close(later, first[0], rtol=0, atol=1e-5)

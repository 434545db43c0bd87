"""Tiny random-weight configurations of the diffusers transformers that can be tiled, and calls of them.

`CASES[name]` is (make, inputs): `make()` gives the model, always with the same weights; `inputs(model)` the keyword
arguments of one call, always the same. A case is a class, or a way in which a pipeline calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TEXT = 5


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _made(name: str, **config: Any) -> Any:
    import diffusers

    torch.manual_seed(0)
    return getattr(diffusers, name)(**config).eval().requires_grad_(False)


def ltx() -> Any:
    return _made(
        "LTXVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=12,
    )


def ltx2(**config: Any) -> Any:
    return _made(
        "LTX2VideoTransformer3DModel",
        **{
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "audio_in_channels": 3,
            "audio_out_channels": 3,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 6,
            "audio_cross_attention_dim": 12,
            "num_layers": 2,
            "caption_channels": 12,
            "rope_double_precision": False,
            **config,
        },
    )


def wan(channels: int = 4) -> Any:
    return _made(
        "WanTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
    )


def vace() -> Any:
    return _made(
        "WanVACETransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
        vace_layers=[0],
        vace_in_channels=6,
    )


def flux(channels: int = 16, guidance: bool = False) -> Any:
    return _made(
        "FluxTransformer2DModel",
        in_channels=channels,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 4),
        guidance_embeds=guidance,
    )


def qwen(**config: Any) -> Any:
    return _made(
        "QwenImageTransformer2DModel",
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(4, 4, 4),
        **config,
    )


def hunyuan(channels: int = 4, condition: str | None = None) -> Any:
    return _made(
        "HunyuanVideoTransformer3DModel",
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=12,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 4),
        image_condition_type=condition,
    )


GRID = (3, 6, 8)
"""Of all video cases, in tokens."""
PICTURE = (1, 6, 8)


def _text(batch: int = 2) -> torch.Tensor:
    return noise(batch, TEXT, 12, seed=1)


def ltx_inputs(model: Any) -> dict[str, Any]:
    frames, height, width = GRID
    return {
        "hidden_states": noise(2, frames * height * width, 4),
        "encoder_hidden_states": _text(),
        "timestep": torch.full((2,), 700.0),
        "encoder_attention_mask": torch.ones(2, TEXT),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def ltx_coords_inputs(model: Any) -> dict[str, Any]:
    """As the condition pipeline calls it: conditioning tokens first, points without a width, a timestep a token."""
    _, height, width = GRID
    scale = torch.tensor([8.0, 32.0, 32.0])
    own = _points(GRID) * scale[:, None]
    own[0] = (own[0] - 7).clamp(min=0) / 25
    extra = _points((1, height, width)) * scale[:, None]
    extra[0] = 9 / 25
    coords = torch.cat([extra, own], 1)[None].repeat(2, 1, 1)
    count = coords.shape[2]
    return {
        "hidden_states": noise(2, count, 4),
        "encoder_hidden_states": _text(),
        "timestep": 700 * torch.rand(2, count, generator=torch.Generator().manual_seed(3)),
        "encoder_attention_mask": torch.ones(2, TEXT),
        "video_coords": coords,
    }


def _points(grid: tuple[int, int, int]) -> torch.Tensor:
    axes = (torch.arange(side, dtype=torch.float32) for side in grid)
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def ltx2_inputs(model: Any) -> dict[str, Any]:
    frames, height, width = GRID
    return {
        "hidden_states": noise(2, frames * height * width, 4),
        "audio_hidden_states": noise(2, 7, 3, seed=2),
        "encoder_hidden_states": _text(),
        "audio_encoder_hidden_states": noise(2, TEXT, 12, seed=4),
        "timestep": torch.full((2,), 700.0),
        "sigma": torch.full((2,), 700.0),
        "encoder_attention_mask": torch.ones(2, TEXT),
        "audio_encoder_attention_mask": torch.ones(2, TEXT),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 25.0,
        "audio_num_frames": 7,
    }


def ltx2_reference_inputs(model: Any) -> dict[str, Any]:
    """As the IC-LoRA pipelines call it: tokens with coordinates behind the generated ones, masks, keyframes."""
    given = ltx2_inputs(model)
    frames, height, width = GRID
    device = torch.device("cpu")
    own = model.rope.prepare_video_coords(2, frames, height, width, device, fps=25.0)
    near = model.rope.prepare_video_coords(2, 1, height, width, device, fps=25.0)
    before = near.clone()
    before[:, 0] -= 5 / 25
    far = near.clone()
    far[:, 0] += 1000.0
    coords = torch.cat([own, near, before, far], 2)
    count = coords.shape[2]
    rolled = torch.Generator().manual_seed(5)
    return given | {
        "hidden_states": noise(2, count, 4),
        "timestep": 700 * torch.rand(2, count, generator=rolled),
        "audio_timestep": torch.full((2,), 650.0),
        "video_coords": coords,
        "audio_coords": model.audio_rope.prepare_audio_coords(2, 7, device),
        "video_self_attention_mask": torch.rand(2, count, count, generator=rolled),
        "video_keyframes_mask": (torch.rand(2, count, 1, generator=rolled) > 0.5).float(),
    }


def wan_inputs(model: Any) -> dict[str, Any]:
    frames, height, width = GRID
    return {
        "hidden_states": noise(2, model.config.in_channels, frames, 2 * height, 2 * width),
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": _text(),
    }


def wan_tokens_inputs(model: Any) -> dict[str, Any]:
    """As Wan 2.2 TI2V is called: a timestep a token."""
    frames, height, width = GRID
    steps = 700 * torch.rand(2, frames * height * width, generator=torch.Generator().manual_seed(3))
    return wan_inputs(model) | {"timestep": steps}


def vace_inputs(model: Any) -> dict[str, Any]:
    given = wan_inputs(model)
    return given | {
        "control_hidden_states": noise(2, 6, *given["hidden_states"].shape[2:], seed=6),
        "control_hidden_states_scale": torch.tensor([0.7]),
    }


def flux_inputs(model: Any) -> dict[str, Any]:
    _, height, width = PICTURE
    return {
        "hidden_states": noise(2, height * width, model.config.in_channels),
        "encoder_hidden_states": _text(),
        "pooled_projections": noise(2, 8, seed=7),
        "timestep": torch.full((2,), 0.7),
        "img_ids": _points(PICTURE).T.contiguous(),
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.full((2,), 3.5) if model.config.guidance_embeds else None,
    }


def flux_control_inputs(model: Any) -> dict[str, Any]:
    """As the ControlNet pipeline calls it: residuals a token in tuples and lists."""
    given = flux_inputs(model)
    count = given["hidden_states"].shape[1]
    return given | {
        "controlnet_block_samples": (noise(2, count, 24, seed=8),),
        "controlnet_single_block_samples": [noise(2, count, 24, seed=9)],
    }


def kontext_inputs(model: Any) -> dict[str, Any]:
    """As Kontext calls it: a reference picture behind the generated one."""
    given = flux_inputs(model)
    reference = _points((1, 4, 5)).T.contiguous()
    reference[:, 0] = 1
    ids = torch.cat([given["img_ids"], reference])
    return given | {"hidden_states": noise(2, len(ids), 16), "img_ids": ids}


def qwen_inputs(model: Any) -> dict[str, Any]:
    _, height, width = PICTURE
    return {
        "hidden_states": noise(2, height * width, 16),
        "encoder_hidden_states": _text(),
        "encoder_hidden_states_mask": torch.ones(2, TEXT, dtype=torch.bool),
        "timestep": torch.full((2,), 0.7),
        "img_shapes": [[PICTURE]] * 2,
    }


def qwen_control_inputs(model: Any) -> dict[str, Any]:
    """As the ControlNet pipeline calls it: residuals a token, and shapes without a list for each sample."""
    given = qwen_inputs(model)
    samples = [noise(2, given["hidden_states"].shape[1], 24, seed=seed) for seed in (8, 9)]
    return given | {"controlnet_block_samples": samples, "img_shapes": [PICTURE] * 2}


def qwen_edit_inputs(model: Any) -> dict[str, Any]:
    """As the edit pipelines call it: reference pictures behind the generated one."""
    shapes = [PICTURE, (1, 4, 5), (1, 3, 4)]
    count = sum(h * w for _, h, w in shapes)
    return qwen_inputs(model) | {"hidden_states": noise(2, count, 16), "img_shapes": [shapes] * 2}


def hunyuan_inputs(model: Any) -> dict[str, Any]:
    frames, height, width = GRID
    return {
        "hidden_states": noise(2, model.config.in_channels, frames, 2 * height, 2 * width),
        "timestep": torch.full((2,), 700.0),
        "encoder_hidden_states": _text(),
        "encoder_attention_mask": torch.tensor([[1] * TEXT, [1] * 3 + [0] * (TEXT - 3)]),
        "pooled_projections": noise(2, 8, seed=7),
        "guidance": torch.full((2,), 6000.0),
    }


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "ltx": (ltx, ltx_inputs),
    "ltx condition": (ltx, ltx_coords_inputs),
    "ltx2": (ltx2, ltx2_inputs),
    "ltx2 split": (lambda: ltx2(rope_type="split"), ltx2_inputs),
    "ltx2 reference": (lambda: ltx2(use_keyframes_abs_pos_embedding=True), ltx2_reference_inputs),
    "wan": (wan, wan_inputs),
    "wan image": (lambda: wan(9), wan_inputs),
    "wan tokens": (wan, wan_tokens_inputs),
    "wan vace": (vace, vace_inputs),
    "flux": (lambda: flux(guidance=True), flux_inputs),
    "flux control": (lambda: flux(32), flux_inputs),
    "flux controlnet": (flux, flux_control_inputs),
    "flux kontext": (flux, kontext_inputs),
    "qwen": (qwen, qwen_inputs),
    "qwen controlnet": (qwen, qwen_control_inputs),
    "qwen edit": (qwen, qwen_edit_inputs),
    "qwen edit zero": (lambda: qwen(zero_cond_t=True), qwen_edit_inputs),
    "hunyuan": (hunyuan, hunyuan_inputs),
    "hunyuan image": (lambda: hunyuan(9, "latent_concat"), hunyuan_inputs),
    "hunyuan replace": (lambda: hunyuan(4, "token_replace"), hunyuan_inputs),
}
VIDEO = {name for name in CASES if name.split()[0] in ("ltx", "ltx2", "wan", "hunyuan")} - {"hunyuan replace"}
"""Cases whose frames may be tiled."""


def without_attention(model: Any) -> Any:
    """The model with nothing that one token of the picture takes from another, nor audio from video: per token."""
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in ("attn1", "attn", "video_to_audio_attn"):
            for out in (getattr(module, "to_out", None), getattr(module, "to_add_out", None)):
                for part in (out[0] if isinstance(out, torch.nn.ModuleList) else out,):
                    if part is not None:
                        part.weight.zero_()
                        part.bias.zero_()
        if type(module).__name__ in _SINGLE:
            # its projection takes [attention, mlp]
            module.proj_out.weight[:, : module.proj_out.out_features].zero_()
    return model


_SINGLE = (
    "FluxSingleTransformerBlock",
    "HunyuanVideoSingleTransformerBlock",
    "HunyuanVideoTokenReplaceSingleTransformerBlock",
)


def results(output: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of what a model returned."""
    values = output if isinstance(output, tuple) else tuple(output.values())
    return tuple(value for value in values if value is not None)

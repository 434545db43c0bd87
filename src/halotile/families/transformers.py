"""What halotile knows of each diffusion transformer class, as data: one frozen row a class.

Written from the sources of diffusers 0.42.1 and checked by running each class (tests/test_denoise_models.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Places = Literal["coords", "ids", "shapes", "grid"]
Reason = str


@dataclass(frozen=True)
class Transformer:
    """One transformer class, as its `forward` is called.

    places: how its tokens get their positions. "coords": `video_coords`, or num_frames, height and width. "ids": a row
    of numbers a token. "shapes": the shapes of the pictures in the sequence. "grid": from the shape of its input, which
    is `B C F H W` and not tokens.
    patch: latents a token along frames, height and width, where its arguments count latents.
    channels: numbers a token (or channels a latent) of what it predicts; its input begins with as many of the noisy
    latent, and conditioning given per pixel lies behind them.
    noise: what `timestep` is divided by to be the share of noise, from 0 to 1.
    per_token: arguments with one row a token in dim 1, tensors or lists of them; with one row or one dim they hold for
    all tokens, and stay. square: with one row and one column a token. per_cell: of the shape of the grid's latents.
    shared: arguments that hold for all tokens. placing: arguments that say where tokens lie. options: dicts for the
    attention processors.
    rope: the attribute of the module that makes the rotary embedding, and the dim of its result that counts tokens.
    audio: numbers an audio token of what it predicts for audio; None where no audio goes through beside the video.
    output: the class of its result, in the model's own module.
    coords: video coordinates as the model itself makes them, as a function of (model, its arguments).
    whole_frames: why tiles must have all frames of the grid, as a function of the model; None where they need not.
    refuse: why a model of this class cannot be tiled, as a function of the model; None where it can.
    """

    name: str
    places: Places
    patch: Callable[[Any], tuple[int, int, int]]
    channels: Callable[[Any], int]
    noise: Callable[[Any], float]
    shared: tuple[str, ...]
    per_token: tuple[str, ...] = ("timestep",)
    square: tuple[str, ...] = ()
    per_cell: tuple[str, ...] = ()
    placing: tuple[str, ...] = ()
    options: tuple[str, ...] = ("attention_kwargs",)
    rope: tuple[str, int] = ("rope", 1)
    audio: Callable[[Any], int] | None = None
    output: str = "Transformer2DModelOutput"
    prediction: Literal["velocity", "sample"] = "velocity"
    coords: Callable[[Any, Mapping[str, Any]], Any] | None = None
    whole_frames: Callable[[Any], Reason | None] = lambda model: None
    refuse: Callable[[Any], Reason | None] = lambda model: None


def transformer_of(model: object) -> tuple[Transformer, type] | None:
    """The row of `model`'s class, or of the nearest class that it inherits from, with that class; None without one.

    Rows are of diffusers' classes. A model that `torch.compile` has wrapped is looked at inside.
    """
    classes = (cls for cls in type(uncompiled(model)).__mro__ if cls.__module__.split(".")[0] == "diffusers")
    return next(((TRANSFORMERS[cls.__name__], cls) for cls in classes if cls.__name__ in TRANSFORMERS), None)


def uncompiled(model: Any) -> Any:
    """The model inside what `torch.compile` returned; any other model as it is."""
    return getattr(model, "_orig_mod", model)


def _out_channels(model: Any) -> int:
    return int(model.config.out_channels or model.config.in_channels)


def _packed_channels(model: Any) -> int:
    """Of classes whose tokens are patches that the pipeline has packed."""
    return int(model.config.patch_size**2 * _out_channels(model))


def _three_patches(model: Any) -> tuple[int, int, int]:
    frames, height, width = model.config.patch_size
    return int(frames), int(height), int(width)


def _two_patches(model: Any) -> tuple[int, int, int]:
    return int(model.config.patch_size_t), int(model.config.patch_size), int(model.config.patch_size)


def _ones(model: Any) -> tuple[int, int, int]:
    return 1, 1, 1


def _thousand(model: Any) -> float:
    return 1000.0


def _one(model: Any) -> float:
    return 1.0


def _ltx_coords(model: Any, given: Mapping[str, Any]) -> Any:
    """Where LTX puts tokens, `B 3 N`: as its rope does, short of the division by its base sizes.

    The products are taken in the order of the rope, so that the division gives the same bits.
    """
    rope, scale = model.rope, given.get("rope_interpolation_scale")
    tokens = given["hidden_states"]
    sizes = (given["num_frames"], given["height"], given["width"])
    grid = rope._prepare_video_coords(tokens.shape[0], *sizes, rope_interpolation_scale=None, device=tokens.device)
    patches = (rope.patch_size_t, rope.patch_size, rope.patch_size)
    bases = (rope.base_num_frames, rope.base_height, rope.base_width)
    for axis in range(3):
        # without a scale the rope takes the numbers of the cells as they are, and divides by nothing
        grid[..., axis] = (
            grid[..., axis] * bases[axis] if scale is None else grid[..., axis] * scale[axis] * patches[axis]
        )
    return grid.transpose(1, 2)


def _ltx2_coords(model: Any, given: Mapping[str, Any]) -> Any:
    """Where LTX-2 puts tokens, `B 3 N 2`: seconds, and pixels."""
    tokens = given["hidden_states"]
    sizes = (given["num_frames"], given["height"], given["width"])
    return model.rope.prepare_video_coords(tokens.shape[0], *sizes, tokens.device, fps=given.get("fps", 24.0))


def _token_replace(model: Any) -> Reason | None:
    if model.config.image_condition_type == "token_replace":
        return "it takes the first frame of what it is given for the clean picture to begin with (token_replace)"
    return None


def _layered(model: Any) -> Reason | None:
    if getattr(model.config, "use_layer3d_rope", False):
        return "its sequence has several pictures to make, one a layer (use_layer3d_rope)"
    return None


_TEXT = ("encoder_hidden_states", "encoder_attention_mask")

_ROWS = (
    Transformer(
        "LTXVideoTransformer3DModel",
        "coords",
        # its rope makes one row a latent, whatever the patch size
        _ones,
        _out_channels,
        _thousand,
        _TEXT,
        placing=("num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
        coords=_ltx_coords,
    ),
    Transformer(
        "LTX2VideoTransformer3DModel",
        "coords",
        _two_patches,
        _out_channels,
        lambda model: float(model.config.timestep_scale_multiplier),
        (
            *_TEXT,
            "audio_hidden_states",
            "audio_encoder_hidden_states",
            "audio_encoder_attention_mask",
            "audio_timestep",
            "sigma",
            "audio_sigma",
            "audio_num_frames",
            "isolate_modalities",
            "spatio_temporal_guidance_blocks",
            # one number a sample
            "perturbation_mask",
            "use_cross_timestep",
        ),
        per_token=("timestep", "video_keyframes_mask"),
        square=("video_self_attention_mask",),
        placing=("num_frames", "height", "width", "fps", "video_coords", "audio_coords"),
        audio=lambda model: int(model.config.audio_out_channels or model.config.audio_in_channels),
        output="AudioVisualModelOutput",
        coords=_ltx2_coords,
    ),
    Transformer(
        "FluxTransformer2DModel",
        "ids",
        _ones,
        _packed_channels,
        # its pipelines divide by 1000 before the call
        _one,
        ("encoder_hidden_states", "pooled_projections", "txt_ids", "guidance", "controlnet_blocks_repeat"),
        per_token=("timestep", "controlnet_block_samples", "controlnet_single_block_samples"),
        placing=("img_ids",),
        options=("joint_attention_kwargs",),
        rope=("pos_embed", 0),
    ),
    Transformer(
        "QwenImageTransformer2DModel",
        "shapes",
        _ones,
        _packed_channels,
        # its pipelines divide by 1000 before the call
        _one,
        (
            "encoder_hidden_states",
            "encoder_hidden_states_mask",
            "guidance",
            "additional_t_cond",
            # what diffusers before 0.36 asked for besides
            "txt_seq_lens",
        ),
        per_token=("timestep", "controlnet_block_samples"),
        placing=("img_shapes",),
        rope=("pos_embed", 0),
        refuse=_layered,
    ),
    Transformer(
        "WanTransformer3DModel",
        "grid",
        _three_patches,
        _out_channels,
        _thousand,
        ("encoder_hidden_states", "encoder_hidden_states_image"),
    ),
    Transformer(
        "WanVACETransformer3DModel",
        "grid",
        _three_patches,
        _out_channels,
        _thousand,
        ("encoder_hidden_states", "encoder_hidden_states_image", "control_hidden_states_scale"),
        per_cell=("control_hidden_states",),
    ),
    Transformer(
        "HunyuanVideoTransformer3DModel",
        "grid",
        _two_patches,
        _out_channels,
        _thousand,
        (*_TEXT, "pooled_projections", "guidance"),
        rope=("rope", 0),
        whole_frames=_token_replace,
    ),
)

TRANSFORMERS = {row.name: row for row in _ROWS}
"""Every row by the name of its class."""

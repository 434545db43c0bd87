"""What halotile knows of each autoencoder class, as data: one frozen row a class, with a reason beside every odd value.

Written from the sources of diffusers 0.42.1 and checked by running each class (tests/test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from halotile.families.loops import (
    AxisFactor,
    AxisMinOverlap,
    AxisStride,
    Half,
    Layout,
    SquareFactor,
    SquareMask,
)

Reason = str


@dataclass(frozen=True)
class Family:
    """One autoencoder class.

    ratio: pixels a latent along height and width.
    min_tile_lat: the thinnest tile that the network of a half takes, in latents.
    temporal: the names of the attributes of a loop over frames, when the class has one.
    carries: the method that clears state which the class keeps on its modules from call to call.
    record_on: where stand-ins for results live while a loop is recorded.
    blends: the methods that mix neighbouring results; a recording leaves them out, as there is nothing to mix yet.
    forgotten: attributes that the network writes on its modules and never reads.
    own_slicing: whether the class's `use_slicing` works with every argument of `decode`.
    refuse: what the class's own loop gets wrong, as a function of (vae, half, input shape) to a reason or None.
    """

    name: str
    layout: Layout
    ratio: Callable[[Any], int]
    min_tile_lat: Callable[[Any, Half], int] = lambda vae, half: 1
    temporal: Temporal | None = None
    carries: str | None = None
    record_on: Literal["meta", "zeros"] = "meta"
    blends: tuple[str, ...] = ("blend_v", "blend_h")
    forgotten: tuple[str, ...] = ()
    own_slicing: bool = True
    refuse: tuple[Callable[[Any, Half, tuple[int, ...]], Reason | None], ...] = field(default=())


@dataclass(frozen=True)
class Temporal:
    """A loop over frames with a window and a stride in sample frames, switched on by a flag a half.

    `defect` is what the class's decode gets wrong with it, to be said where it runs.
    """

    decode_flag: str
    encode_flag: str
    defect: str = ""
    window: str = "tile_sample_min_num_frames"
    stride: str = "tile_sample_stride_num_frames"


def _attribute(name: str) -> Callable[[Any], int]:
    return lambda vae: int(getattr(vae, name))


def _halvings(config_name: str) -> Callable[[Any], int]:
    return lambda vae: int(2 ** (len(vae.config[config_name]) - 1))


_SPATIAL = _attribute("spatial_compression_ratio")


def _five_dims_encode(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    return (
        "its own tiled_encode unpacks five dims of a picture that has four, and crashes" if half == "encode" else None
    )


def _refiner_decode(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    if half == "encode":
        return None
    return "its own tiled_decode cuts every tile of pixels to as many rows as it had latents, and loses the rest"


def _dc_padding(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    ratio = vae.spatial_compression_ratio
    window = (vae.tile_sample_min_height, vae.tile_sample_min_width)
    if half == "encode" and any(side % ratio for side in window):
        return (
            f"its own tiled_encode pads tiles of {window[0]} x {window[1]} px to multiples of {ratio}, and shifts rows"
        )
    return None


def _magvit_encode(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    if half == "decode":
        return None
    return (
        "its own tiled_encode cuts every tile to the whole latent instead of to the stride, so rows are repeated and "
        f"the rest is lost (input {shape[-2]} x {shape[-1]} px)"
    )


def _tiny_channels(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    channels = int(vae.config.latent_channels)
    if half == "encode" and channels != 4:
        return f"its own tiled_encode has room for 4 latent channels, this VAE has {channels}, and it crashes"
    colours = int(vae.config.out_channels)
    if half == "decode" and colours != 3:
        return f"its own tiled_decode has room for 3 channels of picture, this VAE has {colours}, and it crashes"
    return None


def _tiny_mask(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    ratio = _halvings("decoder_block_out_channels")(vae)
    if vae.spatial_scale_factor != ratio:
        return f"its own loop scales by 2 ** out_channels = {vae.spatial_scale_factor}, this VAE's network by {ratio}"
    window = vae.tile_latent_min_size if half == "decode" else vae.tile_sample_min_size
    blend = int(window * vae.tile_overlap_factor)
    ramp = blend * ratio if half == "decode" else blend / ratio
    stride = window - blend
    if ramp <= 1 and max(shape[-2:]) > stride >= 1:
        return f"a ramp over {ramp:g} rows of the result divides by zero or drops the tile (overlap of {blend} cells)"
    return None


def _minimax_frames(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    least = vae.tokens_chunk_size - vae.config.token_drop + 1
    if half == "decode" and shape[2] < least:
        return f"it needs at least {least} latent frames to form one clip, got {shape[2]}, and crashes on fewer"
    return None


def _minimax_overlap(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    scale = vae.spatial_compression_ratio if half == "decode" else 1
    for axis, cells in (("height", shape[-2]), ("width", shape[-1])):
        window, overlap = getattr(vae, f"tile_sample_min_{axis}"), getattr(vae, f"tile_sample_min_overlap_{axis}")
        if cells * scale > window and overlap >= window:
            return f"the overlap of {overlap} px along {axis} is not less than the window of {window} px: it never ends"
    return None


def _mochi_framewise(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    flag = f"use_framewise_{half[:-1]}ing"
    return f"{flag} is set, and its own frame-wise {half} crashes" if getattr(vae, flag, False) else None


def _two_to_reflect(vae: Any, half: Half) -> int:
    """Reflect padding by one cell needs two; released decoders reflect, encoders pad with zeros."""
    return 2 if vae.config[f"{half[:-1]}er_spatial_padding_mode"] == "reflect" else 1


_FOLDED = AxisStride(patch=lambda vae: int(vae.config.patch_size or 1))
# its encode reads the flag for decoding; later chunks drop their last frame where the first is the one too many
_LTX = Temporal(
    "use_framewise_decoding",
    "use_framewise_decoding",
    defect="in diffusers 0.42.1 it shows every frame after its first chunk one frame late",
)
_LTX_BLENDS = ("blend_v", "blend_h", "blend_t")

_ROWS = (
    Family("AutoencoderKL", SquareFactor(), _halvings("block_out_channels")),
    Family("AutoencoderKLFlux2", SquareFactor(), _halvings("block_out_channels")),
    Family(
        "AutoencoderKLKVAE",
        SquareFactor(),
        _halvings("ch_mult"),
        forgotten=("last_z_shape",),
    ),
    Family("AutoencoderKLWan", _FOLDED, _SPATIAL),
    Family("AutoencoderKLQwenImage21", _FOLDED, _SPATIAL),
    Family("AutoencoderKLQwenImage", AxisStride(), _SPATIAL),
    Family(
        "AutoencoderKLHunyuanVideo",
        AxisStride(),
        _SPATIAL,
        temporal=Temporal("use_framewise_decoding", "use_framewise_encoding"),
        blends=_LTX_BLENDS,
    ),
    # enable_tiling leaves the latent window as it was when only the one in pixels is given
    Family("AutoencoderKLHunyuanVideo15", AxisFactor(("tile_overlap_factor",) * 2), _SPATIAL),
    Family(
        "AutoencoderKLHunyuanImage",
        SquareFactor(),
        lambda vae: int(vae.config.spatial_compression_ratio),
        refuse=(_five_dims_encode,),
    ),
    Family(
        "AutoencoderKLHunyuanImageRefiner",
        AxisFactor(("tile_overlap_factor",) * 2, latent_pair=False),
        _SPATIAL,
        refuse=(_refiner_decode,),
    ),
    # zip is missing in its slicing with temb
    Family("AutoencoderKLLTXVideo", AxisStride(), _SPATIAL, temporal=_LTX, blends=_LTX_BLENDS, own_slicing=False),
    Family(
        "AutoencoderKLLTX2Video",
        AxisStride(),
        _SPATIAL,
        min_tile_lat=_two_to_reflect,
        temporal=_LTX,
        blends=_LTX_BLENDS,
        own_slicing=False,
    ),
    Family(
        "AutoencoderKLMiniMaxH3",
        AxisMinOverlap(),
        _SPATIAL,
        blends=("_blend",),
        refuse=(_minimax_frames, _minimax_overlap),
    ),
    Family(
        "AutoencoderKLCogVideoX",
        AxisFactor(("tile_overlap_factor_height", "tile_overlap_factor_width")),
        _halvings("block_out_channels"),
    ),
    Family("AutoencoderKLMochi", AxisStride(), _SPATIAL, refuse=(_mochi_framewise,)),
    Family(
        "AutoencoderKLMagvit", AxisStride(crossed=True), _SPATIAL, carries="_clear_conv_cache", refuse=(_magvit_encode,)
    ),
    Family("AutoencoderDC", AxisStride(latent_pair=True), _SPATIAL, refuse=(_dc_padding,)),
    # its loop mixes each result at once with masks on the input's device
    Family(
        "AutoencoderTiny",
        SquareMask(),
        _halvings("decoder_block_out_channels"),
        record_on="zeros",
        blends=(),
        refuse=(_tiny_channels, _tiny_mask),
    ),
)

UNREAD = MappingProxyType(
    {
        "AutoencoderKLCosmos": "its enable_tiling sets attributes that its decode and encode never read",
        "AutoencoderKLKVAEVideo": "its use_tiling is never read",
    }
)
"""Classes with a tiling flag and no tile loop, by name, with the reason."""

FAMILIES = MappingProxyType({row.name: row for row in _ROWS})
"""The rows by class name."""

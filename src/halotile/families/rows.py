"""What halotile knows of each autoencoder class, as data: one frozen row a class, with a reason beside every odd value.

Written from the sources of diffusers 0.42.1 and checked by running each class (tests/test_tile_families.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from halotile.families.axis_loop import Half
from halotile.families.chunks import COGVIDEOX, FEATURES, FEATURES_FIRST, MAGVIT, minimax_windows, windows_dropping
from halotile.families.family import Family, Frames, Reason, Rectangles, Temporal
from halotile.families.loops import AxisFactor, AxisMinOverlap, AxisStride, HardCoded
from halotile.families.squares import SquareFactor, SquareMask

UNREAD = MappingProxyType(
    {
        "AutoencoderKLCosmos": "its enable_tiling sets attributes that its decode and encode never read",
        "AutoencoderKLKVAEVideo": "its use_tiling is never read",
    }
)
"""Classes with a tiling flag and no tile loop, by name, with the reason."""


def family_of(vae: object) -> Family | None:
    """The row of `vae`'s class, or of the nearest class that it inherits from; None when there is none.

    Rows are of diffusers' classes: other libraries have an AutoencoderKL, too.
    """
    classes = (cls for cls in type(vae).__mro__ if cls.__module__.split(".")[0] == "diffusers")
    return next((FAMILIES[cls.__name__] for cls in classes if cls.__name__ in FAMILIES), None)


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
    for loop in SquareMask().axes(vae, half, shape[-2], shape[-1], ratio):
        overlap = loop.window - loop.stride
        ramp = overlap * ratio if half == "decode" else overlap / ratio
        if ramp <= 1 and loop.length > loop.stride >= 1:
            return (
                f"a ramp over {ramp:g} rows of the result divides by zero or drops the tile (overlap of {overlap} "
                f"cells along {loop.axis})"
            )
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


def _allegro_clips(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    unit = vae.config.temporal_compression_ratio if half == "decode" else 1
    window, stride = vae.kernel[0] // unit, vae.stride[0] // unit
    if shape[2] < window or (shape[2] - window) % stride:
        return f"its loop makes clips of {window} frames every {stride}, and would lose frames of these {shape[2]}"
    return None


def _mochi_framewise(vae: Any, half: Half, shape: tuple[int, ...]) -> Reason | None:
    flag = f"use_framewise_{half[:-1]}ing"
    return f"{flag} is set, and its own frame-wise {half} crashes" if getattr(vae, flag, False) else None


def _two_to_reflect(vae: Any, half: Half) -> int:
    """Reflect padding by one cell needs two; released decoders reflect, encoders pad with zeros."""
    return 2 if vae.config[f"{half[:-1]}er_spatial_padding_mode"] == "reflect" else 1


# all checked by running each class: tests/test_tilings.py
_FRAMES = Frames(_attribute("temporal_compression_ratio"))
# with random weights, what such a tile makes differs from the whole by as much as there is (bench/grid_quality.py has a
# trained model of another kind)
_CACHED = (
    "its network hands a cache from frame to frame, and a tile of frames that is run on its own would start without; "
    "leave the frames of tiling= in one tile"
)
_DOUBLED = Frames(lambda vae: int(2 ** sum(map(bool, vae.config.temperal_downsample))), apart=_CACHED)
_FOLDED = AxisStride(patch=lambda vae: int(vae.config.patch_size or 1))
# its encode reads the flag for decoding; later chunks drop their last frame where the first is the one too many
_LTX = Temporal(
    "use_framewise_decoding",
    "use_framewise_decoding",
    defect="in diffusers 0.42.1 it shows every frame after its first chunk one frame late",
)
_LTX_BLENDS = ("blend_v", "blend_h", "blend_t")


def _post_quant(vae: Any, tile: Any) -> Any:
    return vae.post_quant_conv(tile) if vae.config.use_post_quant_conv else tile


def _quant(vae: Any, tile: Any) -> Any:
    return vae.quant_conv(tile) if vae.config.use_quant_conv else tile


_KL = Rectangles("tiled_decode", "_tiled_encode", before_decoder=_post_quant, after_encoder=_quant)

_ROWS = (
    Family("AutoencoderKL", SquareFactor(), _halvings("block_out_channels"), rectangles=_KL),
    Family("AutoencoderKLFlux2", SquareFactor(), _halvings("block_out_channels"), rectangles=_KL),
    Family(
        "AutoencoderKLKVAE",
        SquareFactor(),
        _halvings("ch_mult"),
        forgotten=("last_z_shape",),
        rectangles=Rectangles("tiled_decode", "_tiled_encode"),
    ),
    Family("AutoencoderKLWan", _FOLDED, _SPATIAL, frames=_DOUBLED, causal=FEATURES_FIRST),
    Family("AutoencoderKLQwenImage21", _FOLDED, _SPATIAL, frames=_DOUBLED, causal=FEATURES_FIRST),
    Family("AutoencoderKLQwenImage", AxisStride(), _SPATIAL, frames=_DOUBLED, causal=FEATURES),
    Family(
        "AutoencoderKLHunyuanVideo",
        AxisStride(),
        _SPATIAL,
        temporal=Temporal("use_framewise_decoding", "use_framewise_encoding"),
        frames=_FRAMES,
        windows=windows_dropping("first"),
        blends=_LTX_BLENDS,
    ),
    # enable_tiling leaves the latent window as it was when only the one in pixels is given
    Family(
        "AutoencoderKLHunyuanVideo15",
        AxisFactor(("tile_overlap_factor",) * 2, extras=True),
        _SPATIAL,
        frames=_FRAMES,
        rectangles=Rectangles("tiled_decode", "tiled_encode", wraps=False),
    ),
    Family(
        "AutoencoderKLHunyuanImage",
        SquareFactor(),
        lambda vae: int(vae.config.spatial_compression_ratio),
        rectangles=Rectangles("tiled_decode", "tiled_encode"),
        refuse=(_five_dims_encode,),
    ),
    Family(
        "AutoencoderKLHunyuanImageRefiner",
        AxisFactor(("tile_overlap_factor",) * 2, latent_pair=False),
        _SPATIAL,
        refuse=(_refiner_decode,),
    ),
    # zip is missing in its slicing with temb
    Family(
        "AutoencoderKLLTXVideo",
        AxisStride(),
        _SPATIAL,
        temporal=_LTX,
        frames=_FRAMES,
        windows=windows_dropping("last"),
        blends=_LTX_BLENDS,
        own_slicing=False,
    ),
    Family(
        "AutoencoderKLLTX2Video",
        AxisStride(),
        _SPATIAL,
        min_tile_lat=_two_to_reflect,
        temporal=_LTX,
        frames=_FRAMES,
        windows=windows_dropping("last"),
        blends=_LTX_BLENDS,
        own_slicing=False,
    ),
    Family(
        "AutoencoderKLMiniMaxH3",
        AxisMinOverlap(),
        _SPATIAL,
        frames=Frames(
            _attribute("temporal_compression_ratio"),
            apart="it decodes clips of a fixed number of latent frames, each with frames of its own left out, so that "
            "frames of a tile would not fall in place",
        ),
        windows=minimax_windows,
        blends=("_blend",),
        refuse=(_minimax_overlap,),
        refuse_frames=(_minimax_frames,),
    ),
    Family(
        "AutoencoderKLCogVideoX",
        AxisFactor(("tile_overlap_factor_height", "tile_overlap_factor_width")),
        _halvings("block_out_channels"),
        frames=Frames(
            lambda vae: int(vae.config.temporal_compression_ratio),
            apart="an odd number of latent frames makes one frame and the ratio for each further one, an even number "
            "the ratio for each, so that frames of a tile would not fall in place",
        ),
        causal=COGVIDEOX,
    ),
    Family("AutoencoderKLMochi", AxisStride(), _SPATIAL, frames=_FRAMES, refuse=(_mochi_framewise,)),
    Family(
        "AutoencoderKLMagvit",
        AxisStride(crossed=True),
        _SPATIAL,
        frames=Frames(_attribute("temporal_compression_ratio"), apart=_CACHED),
        carries="_clear_conv_cache",
        causal=MAGVIT,
        refuse=(_magvit_encode,),
    ),
    Family("AutoencoderDC", AxisStride(latent_pair=True), _SPATIAL, refuse=(_dc_padding,)),
    # its loop mixes each result at once with masks on the input's device
    Family(
        "AutoencoderTiny",
        SquareMask(),
        _halvings("decoder_block_out_channels"),
        record_on="zeros",
        blends=(),
        rectangles=Rectangles("_tiled_decode", "_tiled_encode", wraps=False, mix="mask"),
        refuse=(_tiny_channels, _tiny_mask),
    ),
    # its loop copies each result at once into a buffer
    Family(
        "AutoencoderKLAllegro",
        HardCoded(),
        _SPATIAL,
        no_grid="it has no decode or encode but in tiles of its own, of one size",
        record_on="zeros",
        blends=(),
        refuse_frames=(_allegro_clips,),
    ),
)

FAMILIES = MappingProxyType({row.name: row for row in _ROWS})
"""The rows by class name."""

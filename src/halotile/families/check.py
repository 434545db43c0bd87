"""What a VAE's own loop would do with an input: refuse it, mend it, or let it pass. Shapes alone decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.errors import PlanError, UnsupportedError
from halotile.families.loops import AXES, AxisLoop, AxisStride, Half
from halotile.families.rows import FAMILIES, Family


def family_of(vae: object) -> Family | None:
    """The row of `vae`'s class, or of the nearest class that it inherits from; None when there is none.

    Rows are of diffusers' classes: other libraries have an AutoencoderKL, too.
    """
    classes = (cls for cls in type(vae).__mro__ if cls.__module__.split(".")[0] == "diffusers")
    return next((FAMILIES[cls.__name__] for cls in classes if cls.__name__ in FAMILIES), None)


def check_loop(vae: Any, half: Half, shape: tuple[int, ...]) -> dict[str, int]:
    """Make sure that the VAE's own tile loop treats an input of `shape` right, with tiling on.

    `shape` is that of latents (`B C H W`, `B C F H W`) to decode, of pixels to encode. Returns attributes to set for
    the call where the class's loop would crash on a tile that is too thin and a smaller stride (or none) avoids it;
    mostly nothing. Classes without a row pass: nothing is known of their loops.

    Raises PlanError when the window would lose, shift or repeat rows, with the numbers, and UnsupportedError for what
    the class itself cannot do.
    """
    family = family_of(vae)
    if family is None:
        return {}
    name, height, width = type(vae).__name__, shape[-2], shape[-1]
    check_frames(vae, half, shape)
    if not family.layout.enters(vae, half, height, width, family.ratio(vae)):
        return {}
    for refuse in family.refuse:
        reason = refuse(vae, half, shape)
        if reason is not None:
            raise UnsupportedError(f"{name} cannot {half} {_size(shape)} in tiles: {reason}")
    mended: dict[str, int] = {}
    for loop in family.layout.axes(vae, half, height, width, family.ratio(vae)):
        fault = loop.fault()
        if fault is not None:
            raise PlanError(f"{name} cannot {half} {_size(shape)}: {fault}")
        if loop.thinnest < family.min_tile_lat(vae, half):
            mended |= _thicker(vae, family, loop, f"{name} cannot {half} {_size(shape)}")
    return mended


def temporal_loop_runs(vae: Any, half: Half, shape: tuple[int, ...]) -> bool:
    """Whether the class's own loop over frames runs on such an input (it may, with spatial tiling off)."""
    family = family_of(vae)
    if family is None or family.temporal is None or len(shape) != 5:
        return False
    loop = family.temporal
    window = getattr(vae, loop.window) // (vae.temporal_compression_ratio if half == "decode" else 1)
    flag = loop.decode_flag if half == "decode" else loop.encode_flag
    return bool(getattr(vae, flag)) and shape[2] > window


def check_frames(vae: Any, half: Half, shape: tuple[int, ...]) -> None:
    """Make sure that the class's own loop over frames treats an input of `shape` right, if it runs on it.

    Raises PlanError when its window or stride would lose or shift frames, with the numbers.
    """
    family = family_of(vae)
    loop = None if family is None else family.temporal
    if loop is None or not temporal_loop_runs(vae, half, shape):
        return
    window, stride, ratio = getattr(vae, loop.window), int(getattr(vae, loop.stride)), vae.temporal_compression_ratio
    asked = f"{type(vae).__name__} cannot {half} {shape[2]} frames: {loop.window}={window}, {loop.stride}={stride}"
    if stride > window:
        raise PlanError(f"{asked}: the stride exceeds the window, so the frames between two chunks would be lost")
    if stride < ratio or stride % ratio or window % ratio:
        raise PlanError(f"{asked}: both must be multiples of {ratio} frames, or frames are shifted")


def temporal_note(vae: Any, half: Half, shape: tuple[int, ...]) -> str:
    """What to say of the class's own loop over frames, if it runs on such an input; else nothing."""
    family = family_of(vae)
    if family is None or family.temporal is None or not temporal_loop_runs(vae, half, shape):
        return ""
    defect = f": {family.temporal.defect}" if family.temporal.defect and half == "decode" else ""
    return f"; the class's loop over frames ran, too{defect}"


def set_window(vae: Any, window_px: int, stride_px: int) -> None:
    """Turn the VAE's own tiling on with exactly this square window and stride in pixels.

    Sets the attributes that the class itself reads (in pixels, in latents, factors), all of them. Raises
    UnsupportedError for a class without a row, and PlanError, with the VAE as it was, when the class cannot have
    exactly these numbers.
    """
    family = family_of(vae)
    name = type(vae).__name__
    if family is None:
        raise UnsupportedError(f"{name} has no row in halotile.families, so its window is not known; set it yourself")
    ratio = family.ratio(vae)
    if type(window_px) is not int or type(stride_px) is not int:
        raise PlanError(f"window and stride are whole pixels, got {window_px!r} and {stride_px!r}")
    if window_px < ratio:
        raise PlanError(f"{name} decodes {ratio} px a latent: a window needs at least those, got {window_px} px")
    if not 0 < stride_px <= window_px:
        raise PlanError(f"a stride of {stride_px} px needs a window of at least that, and more than 0: got {window_px}")
    if window_px % ratio or stride_px % ratio:
        raise PlanError(
            f"{name} decodes {ratio} px a latent: a window of {window_px} px with a stride of {stride_px} px is not "
            f"whole latents; try {max(window_px // ratio, 1) * ratio} and {max(stride_px // ratio, 1) * ratio}"
        )
    wanted = family.layout.window(window_px, window_px, stride_px, ratio)
    before = {key: getattr(vae, key) for key in ("use_tiling", *wanted)}
    try:
        _assign(vae, {"use_tiling": True, **wanted})
        for half, unit in (("decode", ratio), ("encode", 1)):
            cells = 4 * window_px // unit
            for loop in family.layout.axes(vae, half, cells, cells, ratio):  # type: ignore[arg-type]
                _check_exact(name, loop, window_px, stride_px)
    except PlanError:
        _assign(vae, before)
        raise


def sync_window(vae: Any) -> None:
    """Bring the window in latents in step with the one in pixels, on classes that keep both and may let them part."""
    family = family_of(vae)
    if family is None:
        return
    for suffix in ("size", *AXES):
        if hasattr(vae, f"tile_latent_min_{suffix}"):
            sample = getattr(vae, f"tile_sample_min_{suffix}")
            setattr(vae, f"tile_latent_min_{suffix}", sample // family.ratio(vae))


def _check_exact(name: str, loop: AxisLoop, window_px: int, stride_px: int) -> None:
    fault = loop.fault()
    if fault is not None:
        raise PlanError(f"{name} cannot have this window: {fault}")
    read = (loop.window, loop.stride) if loop.half == "encode" else (loop.out(loop.window), loop.out(loop.stride))
    # Wan 2.2 counts folded pixels, so compare the shape of the window and not its unit
    if read[0] * stride_px != read[1] * window_px:
        raise PlanError(
            f"{name} reads a window of {window_px} px with a stride of {stride_px} px as {read[0]}, {read[1]}"
        )


def _thicker(vae: Any, family: Family, loop: AxisLoop, asked: str) -> dict[str, int]:
    """A stride with which no tile is thinner than the family's least: none at all when one window holds the axis."""
    if not isinstance(family.layout, AxisStride):
        raise PlanError(
            f"{asked}: the last tile along {loop.axis} would have {loop.thinnest} latents; window {loop.window_set}, "
            f"stride {loop.stride_set}"
        )
    key = f"tile_sample_stride_{loop.axis}"
    unit = family.ratio(vae) // family.layout.patch(vae)
    step = 1 if loop.half == "decode" else unit
    least = family.min_tile_lat(vae, loop.half) * step
    if loop.length < least:
        raise PlanError(f"{asked}: {loop.axis} has {loop.length} cells, the class takes no fewer than {least}")
    if loop.window >= loop.length:
        return {key: int(getattr(vae, f"tile_sample_min_{loop.axis}"))}
    for stride in range(loop.stride, 0, -step):
        if min(loop.window, loop.length - range(0, loop.length, stride)[-1]) >= least:
            return {key: stride * unit if loop.half == "decode" else stride}
    raise PlanError(
        f"{asked}: it needs tiles of at least {least // step} latents, and no stride up to {loop.stride} leaves the "
        f"last tile of {loop.length} along {loop.axis} that large"
    )


def _assign(vae: Any, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        setattr(vae, key, value)


def _size(shape: tuple[int, ...]) -> str:
    return "an input of shape " + " x ".join(map(str, shape))

"""What a VAE's own loop would do with an input: refuse it, mend it, or let it pass. Shapes alone decide."""

from __future__ import annotations

from typing import Any

from halotile.errors import PlanError, UnsupportedError
from halotile.families.axis_loop import AXES, AxisLoop, Half
from halotile.families.exact import own_window, set_attributes
from halotile.families.family import Family
from halotile.families.loops import AxisStride
from halotile.families.request import apply_tile_plan
from halotile.families.rows import family_of


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
    for refuse in (*family.refuse, *family.refuse_frames):
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
    if type(window_px) is not int or type(stride_px) is not int:
        raise PlanError(f"window and stride are whole pixels, got {window_px!r} and {stride_px!r}")
    if not 0 < stride_px <= window_px:
        raise PlanError(
            f"a stride of {stride_px} px needs to be more than 0 and at most the window, which is {window_px} px; and "
            f"the window at least one latent, {family.ratio(vae)} px"
        )
    found = own_window(vae, family, window_px, window_px - stride_px)
    if isinstance(found, str):
        raise PlanError(f"{name} cannot have a window of {window_px} px with a stride of {stride_px} px: {found}")
    apply_tile_plan(vae, found)


def takes_timestep(vae: Any) -> bool:
    """Whether the VAE's decode takes the time step of the last denoising, `temb` (LTX-Video from 0.9.1 on)."""
    return bool(vae.config.get("timestep_conditioning"))


def drop_added(vae: Any) -> None:
    """Remove what halotile added for an earlier plan: the class's own attributes say the window now."""
    family = family_of(vae)
    if family is not None:
        set_attributes(vae, dict.fromkeys(family.layout.extra_names))


def sync_window(vae: Any) -> None:
    """Bring the window in latents in step with the one in pixels, on classes that keep both and may let them part."""
    family = family_of(vae)
    if family is None:
        return
    for suffix in ("size", *AXES):
        if hasattr(vae, f"tile_latent_min_{suffix}"):
            sample = getattr(vae, f"tile_sample_min_{suffix}")
            setattr(vae, f"tile_latent_min_{suffix}", sample // family.ratio(vae))


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


def _size(shape: tuple[int, ...]) -> str:
    return "an input of shape " + " x ".join(map(str, shape))

"""Exact requests: a window and an overlap in pixels, as attributes of the VAE that mean just that, or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, Literal, overload

from halotile.errors import PlanError, UnsupportedError
from halotile.families.axis_loop import AxisAsk, AxisLoop, require_pair
from halotile.families.exact import (
    Overlaid,
    Pixels,
    asks_of,
    changes_of,
    full_request,
    loop_fault,
    set_attributes,
)
from halotile.families.family import Family
from halotile.families.layout import Attributes
from halotile.families.rows import family_of
from halotile.geometry import DimTiling, Interval
from halotile.planning import TilePlan


@overload
def tile_shape_plan(vae: Any, height_px: int, width_px: int, explain: Literal[False] = ...) -> Attributes | None: ...
@overload
def tile_shape_plan(
    vae: Any, height_px: int, width_px: int, explain: Literal[True]
) -> tuple[Attributes | None, str | None]: ...
def tile_shape_plan(
    vae: Any, height_px: int, width_px: int, explain: bool = False
) -> Attributes | tuple[Attributes | None, str | None] | None:
    """The VAE's tiling attributes for a window of exactly `height_px` x `width_px`, or None if it cannot have that.

    Both in pixels of the picture. Nothing is rounded, and nothing is set: see `apply_tile_plan`. With `explain` the
    result is (attributes, reason), one of them None.

    The attributes are all that the window and the overlap take, so that they are right together whatever was set
    before. As no overlap is asked for here, its share of the window stays what it is (a quarter where that is 0 or
    makes no sense), to the nearest whole latent that the class can have; `tile_overlap_plan` then asks for one exactly.

    Classes whose own loop knows one square window (AutoencoderKL and its kin) take others by attributes that halotile
    adds: `tile_sample_min_height`, `tile_sample_min_width`, and strides. `parallelize` and `tiled_decode_for` obey
    them; the class by itself decodes squares of the shorter side.

    >>> tile_shape_plan(wan, 432, 296)
    {'tile_sample_min_height': 432, 'tile_sample_min_width': 296, 'tile_sample_stride_height': 320,
     'tile_sample_stride_width': 224}
    >>> tile_shape_plan(wan, 430, 296, explain=True)[1]
    'AutoencoderKLWan cannot have a window of 430 x 296 px: 8 px are one latent: a window of 430 px along height is
     not whole latents; try 424 or 432'

    Raises PlanError for what is not a whole number, and UnsupportedError for a class without a row in `families`.
    """
    family = _row(vae)
    window = require_pair("the window", (height_px, width_px))
    found = _shape(vae, family, window)
    answer = _explained(vae, found, f"a window of {height_px} x {width_px} px")
    return answer if explain else answer[0]


@overload
def tile_overlap_plan(
    vae: Any, height_px: int, width_px: int, sample_shape: Pixels | None = ..., explain: Literal[False] = ...
) -> Attributes | None: ...
@overload
def tile_overlap_plan(
    vae: Any, height_px: int, width_px: int, sample_shape: Pixels | None = ..., *, explain: Literal[True]
) -> tuple[Attributes | None, str | None]: ...
def tile_overlap_plan(
    vae: Any, height_px: int, width_px: int, sample_shape: Pixels | None = None, explain: bool = False
) -> Attributes | tuple[Attributes | None, str | None] | None:
    """The VAE's stride or factor attributes for exactly this overlap of neighbouring tiles, or None if there are none.

    In pixels of the picture, read against the window that is set on the VAE now. `sample_shape` is the picture's
    (height, width): an axis that the window clears (the picture is not larger) is one tile, and its overlap 0. Without
    `sample_shape` both axes are taken to be larger than the window. Where the class widens overlaps to fit
    (MiniMax-H3), it is the least one. With `explain` the result is (attributes, reason), one of them None.

    A window of 432 x 296 px is set on a Wan VAE, and the picture is 1024 x 296 px:

    >>> tile_overlap_plan(wan, 112, 0, sample_shape=(1024, 296))
    {'tile_sample_stride_height': 320, 'tile_sample_stride_width': 296}

    Raises PlanError for what is not a whole number, and UnsupportedError for a class without a row in `families`.
    """
    family = _row(vae)
    overlap = require_pair("the overlap", (height_px, width_px))
    found = _overlap(vae, family, overlap, sample_shape)
    answer = _explained(vae, found, f"an overlap of {height_px} x {width_px} px")
    return answer if explain else answer[0]


def apply_tile_plan(vae: Any, plan: Mapping[str, Any] | TilePlan) -> None:
    """Set a plan on the VAE, and its tiling on: all of it, or on an error nothing.

    `plan` is what `tile_shape_plan` or `tile_overlap_plan` returned, or a `TilePlan`: then the next decode of a picture
    of its size has its window and its overlap exactly. Attributes that halotile had added for an earlier plan, and that
    this one does without, are removed.

    Raises PlanError for None (the VAE cannot have what was asked), for names that are not tiling attributes of the
    class, for values that are no numbers or cannot be, and for a TilePlan that the VAE cannot have.
    """
    family = _row(vae)
    name, layout = type(vae).__name__, family.layout
    if isinstance(plan, TilePlan):
        found = full_request(vae, family, plan.window_px, plan.overlap_px, plan.picture_px)
        if isinstance(found, str):
            raise PlanError(f"{name} cannot have the tiles of {plan.name!r}: {found}")
        plan = found
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"the plan is {plan!r}, not a dict of attributes; if {name} cannot have what was asked, explain=True of "
            "tile_shape_plan and tile_overlap_plan says why"
        )
    if not plan:
        raise PlanError(f"the plan is empty: it would set nothing on {name}")
    known = (*layout.window_names, *layout.overlap_names)
    for key, value in plan.items():
        if key not in known:
            raise PlanError(f"{key!r} is not a tiling attribute of {name}; those are {', '.join(known)}")
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, bool) or not isinstance(part, (int, float)) for part in parts):
            raise PlanError(f"{key} of the plan is {value!r}, which is not a number")
        limit = 1 if "factor" in key else math.inf
        least = 0 if "factor" in key or "overlap" in key else 1
        if not all(least <= part < limit for part in parts):
            raise PlanError(f"{key} of the plan is {value!r}; it must be at least {least} and less than {limit}")
    set_attributes(vae, {**changes_of(layout, plan), "use_tiling": True})


def check_request(vae: Any, window_px: Pixels, overlap_px: Pixels, sample_shape: Pixels | None = None) -> str | None:
    """Why the VAE cannot decode in tiles of exactly this window and overlap; None when it can.

    All in pixels, (height, width); None for `sample_shape` is any picture that is larger on both axes. Pure arithmetic,
    some tens of microseconds; the VAE is not changed. Whatever is fine here, `tile_shape_plan` and `tile_overlap_plan`
    give attributes for. Raises as those do.
    """
    found = full_request(vae, _row(vae), window_px, overlap_px, sample_shape)
    return found if isinstance(found, str) else None


def possible(vae: Any, window_px: Pixels, overlap_px: Pixels, sample_shape: Pixels | None = None) -> bool:
    """Whether the VAE can decode in tiles of exactly this window and overlap: `check_request` without the reason."""
    return check_request(vae, window_px, overlap_px, sample_shape) is None


def loop_tilings(vae: Any, window_px: Pixels, overlap_px: Pixels, sample_shape: Pixels) -> tuple[DimTiling, DimTiling]:
    """The tiles along height and width, in latents, that the VAE's loop cuts with this window and overlap (pixels).

    The last ones may lie inside of their predecessors, as those loops go; MiniMax-H3 spreads its tiles. 1024 x 1024 px
    with a window of 432 x 296 and an overlap of 72 x 72 px on a VAE with 8 pixels a latent:

    >>> tall, wide = loop_tilings(vae, (432, 296), (72, 72), (1024, 1024))
    >>> tall.tiles
    (Interval(start=0, stop=54), Interval(start=45, stop=99), Interval(start=90, stop=128))

    Raises PlanError, with the reason, when the VAE cannot have them.
    """
    family = _row(vae)
    sample = require_pair("sample_shape", sample_shape)
    found = full_request(vae, family, window_px, overlap_px, sample)
    if isinstance(found, str):
        raise PlanError(f"{type(vae).__name__} cannot have these tiles: {found}")
    ratio = family.ratio(vae)
    height, width = (side // ratio for side in sample)
    view: Any = Overlaid(vae, changes_of(family.layout, found))
    if not family.layout.enters(view, "decode", height, width, ratio):
        return tuple(DimTiling(side, (Interval(0, side),)) for side in (height, width))  # type: ignore[return-value]
    tall, wide = family.layout.axes(view, "decode", height, width, ratio)
    return tall.tiling, wide.tiling


def _row(vae: Any) -> Family:
    family = family_of(vae)
    if family is None:
        raise UnsupportedError(
            f"{type(vae).__name__} has no row in halotile.families, so its window is not known; set it yourself"
        )
    return family


def _explained(vae: Any, found: Attributes | str, asked: str) -> tuple[Attributes | None, str | None]:
    if isinstance(found, str):
        return None, f"{type(vae).__name__} cannot have {asked}: {found}"
    return found, None


def _shape(vae: Any, family: Family, window: Pixels) -> Attributes | str:
    ratio, layout = family.ratio(vae), family.layout
    asks = asks_of(vae, family, window, (0, 0), None)
    if isinstance(asks, str):
        return asks
    targets = [
        _carried(loop, ask.window, layout.least_overlap)
        for loop, ask in zip(layout.axes(vae, "decode", 1, 1, ratio), asks, strict=True)
    ]
    reason = ""
    # of overlaps nobody asked for, one that the class's own loop can do is the better
    near = sorted(product(range(-3, 4), repeat=2), key=lambda off: (abs(off[0]) + abs(off[1]), off))
    for own, offsets in ((True, near), (False, [(0, 0)])):
        for offset in offsets:
            wanted = [target + off for target, off in zip(targets, offset, strict=True)]
            if any(o != t and not 1 <= o < a.window for o, t, a in zip(wanted, targets, asks, strict=True)):
                continue
            tall, wide = (AxisAsk(a.axis, a.window, o, None) for a, o in zip(asks, wanted, strict=True))
            found = layout.attributes(vae, (tall, wide), ratio, own)
            fault = found if isinstance(found, str) else loop_fault(vae, family, found, (tall, wide))
            if fault is None:
                assert not isinstance(found, str)
                return found
            reason = reason or fault
    return reason


def _carried(loop: AxisLoop, window: int, least: int) -> int:
    """The overlap of a new window, in latents, whose share of it is that which is set now, or a quarter."""
    shared, of = loop.window - loop.stride, loop.window
    if not 0 < shared < of:
        # an overlap of 0 is mostly that of an axis which was one tile
        shared, of = 1, 4
    return min(max((2 * shared * window + of) // (2 * of), least, 1), window - 1)


def _overlap(vae: Any, family: Family, overlap: Pixels, sample: Pixels | None) -> Attributes | str:
    found = full_request(vae, family, family.layout.window_px(vae), overlap, sample)
    if isinstance(found, str):
        return found
    part = {name: value for name, value in found.items() if name in family.layout.overlap_names}
    asks = asks_of(vae, family, family.layout.window_px(vae), overlap, sample)
    assert not isinstance(asks, str)
    # what is set of the window stays, and may not be in step with itself
    return loop_fault(vae, family, part, asks) or part

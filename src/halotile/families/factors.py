"""Overlap factors: floats that a class multiplies its window with, and cuts to a whole number."""

from __future__ import annotations

from collections.abc import Sequence
from math import nextafter

from halotile.families.axis_loop import AxisAsk


def find_factor(wanted: Sequence[tuple[int, int]], cut_stride: bool = True) -> float | None:
    """A float f with int(window * f) == overlap and int(window * (1 - f)) == window - overlap, for each pair.

    None when there is no such float: 15 cells with 12 shared, for one, where 0.8 is right for the overlap, and 1 - 0.8
    a hair too small for the stride. With `cut_stride=False` the class subtracts, and only the overlap must come out.

    Only the floats next to overlap / window can do it: one that is farther off misses a whole number on one side.

    >>> find_factor([(16, 4), (128, 32)])
    0.25
    """
    window, overlap = wanted[0]
    if any(other * window != overlap * cells for cells, other in wanted):
        return None
    share = overlap / window
    for factor in (share, nextafter(share, 0.0), nextafter(share, 1.0)):
        if all(
            int(cells * factor) == other and (not cut_stride or int(cells * (1 - factor)) == cells - other)
            for cells, other in wanted
        ):
            return factor
    return None


def in_both_units(asks: Sequence[AxisAsk], ratio: int) -> list[tuple[int, int]]:
    """Window and overlap of each axis in latents and in pixels: a loop cuts both."""
    return [(ask.window * unit, ask.overlap * unit) for ask in asks for unit in (1, ratio)]


def axis_factor(ask: AxisAsk, ratio: int) -> float | str:
    """The factor of an axis that has one of its own, or why there is none."""
    if not ask.tiled:
        return 0.0
    factor = find_factor(in_both_units([ask], ratio))
    return _no_float(ask, ratio) if factor is None else factor


def shared_factor(asks: tuple[AxisAsk, AxisAsk], ratio: int, cut_stride: bool = True) -> float | str:
    """The one factor that does what is asked on both axes, or why there is none."""
    tiled = [ask for ask in asks if ask.tiled]
    if not tiled:
        return 0.0
    tall, wide = asks
    if len(tiled) == 2 and tall.overlap * wide.window != wide.overlap * tall.window:
        return (
            f"the class has one overlap factor for both axes, and overlaps of {tall.overlap * ratio} of "
            f"{tall.window * ratio} px and {wide.overlap * ratio} of {wide.window * ratio} px are not the same share"
        )
    factor = find_factor(in_both_units(tiled, ratio), cut_stride)
    if factor is None:
        return _no_float(tiled[0], ratio)
    for ask in asks:
        stride = int(ask.window * (1 - factor)) if cut_stride else ask.window - int(ask.window * factor)
        if not ask.tiled and stride < ask.cells:
            return (
                f"the class has one overlap factor for both axes, and would cut the {ask.cells * ratio} px along "
                f"{ask.axis}, too, although the window of {ask.window * ratio} px clears them"
            )
    return factor


def fallback_factor(
    asks: tuple[AxisAsk, AxisAsk], windows: Sequence[int], ratio: int, cut_stride: bool = True
) -> float:
    """A factor that is right for all `windows` (latents), with an overlap near what is asked for if there is one."""
    for ask in asks:
        if ask.overlap and all(window * ask.overlap % ask.window == 0 for window in windows):
            pairs = [(w * unit, w * ask.overlap // ask.window * unit) for w in windows for unit in (1, ratio)]
            factor = find_factor(pairs, cut_stride)
            if factor is not None:
                return factor
    return 0.0


def _no_float(ask: AxisAsk, ratio: int) -> str:
    return (
        f"the class keeps its overlap as a factor and cuts products with it to whole numbers; no factor makes an "
        f"overlap of {ask.overlap} of {ask.window} latents ({ask.overlap * ratio} of {ask.window * ratio} px along "
        f"{ask.axis}) of it"
    )

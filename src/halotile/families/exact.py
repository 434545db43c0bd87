"""Whether a VAE's loop would do exactly what is asked, with attributes as they would be; and setting those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.families.axis_loop import AXES, AxisAsk, require_pair
from halotile.families.family import Family
from halotile.families.layout import Asks, Attributes, Layout

Pixels = tuple[int, int]


def full_request(vae: Any, family: Family, window: Pixels, overlap: Pixels, sample: Pixels | None) -> Attributes | str:
    """All attributes for a window and an overlap, found and checked; or why there are none."""
    asks = asks_of(vae, family, window, overlap, sample)
    if isinstance(asks, str):
        return asks
    found = family.layout.attributes(vae, asks, family.ratio(vae), own=False)
    return found if isinstance(found, str) else loop_fault(vae, family, found, asks) or found


def own_window(vae: Any, family: Family, window_px: int, overlap_px: int) -> Attributes | str:
    """The attributes for a square window that the class's own loop obeys, in both halves; or why there are none.

    What the class gets wrong for another reason than these numbers is left to `check_loop`.
    """
    asks = asks_of(vae, family, (window_px, window_px), (overlap_px, overlap_px), None)
    if isinstance(asks, str):
        return asks
    found = family.layout.attributes(vae, asks, family.ratio(vae), own=True)
    return found if isinstance(found, str) else loop_fault(vae, family, found, asks, refusals=False) or found


def asks_of(vae: Any, family: Family, window: Pixels, overlap: Pixels, sample: Pixels | None) -> Asks | str:
    """A request in latents, an axis each, or why it cannot be for any loop. Raises PlanError for what is no number."""
    window, overlap = require_pair("the window", window), require_pair("the overlap", overlap)
    lengths = (None, None) if sample is None else require_pair("sample_shape", sample)
    ratio, least = family.ratio(vae), max(family.min_tile_lat(vae, "decode"), family.layout.least_overlap + 1)
    tall, wide = (
        AxisAsk.of(axis, size, shared, length, ratio, least)
        for axis, size, shared, length in zip(AXES, window, overlap, lengths, strict=True)
    )
    if isinstance(tall, str):
        return tall
    return wide if isinstance(wide, str) else (tall, wide)


def loop_fault(vae: Any, family: Family, attributes: Attributes, asks: Asks, refusals: bool = True) -> str | None:
    """Why the loop would not do exactly what is asked with these attributes; None when it would."""
    layout, ratio = family.layout, family.ratio(vae)
    view: Any = Overlaid(vae, changes_of(layout, attributes))
    tall, wide = asks
    for refuse in family.refuse if refusals else ():
        reason = refuse(view, "decode", (1, 1, 1, tall.cells, wide.cells))
        if reason is not None:
            return reason
    if not layout.enters(view, "decode", tall.cells, wide.cells, ratio):
        if not (tall.tiled or wide.tiled):
            return None
        return (
            "the class compares a side of the picture with the window's other side, and would not tile "
            f"{tall.cells * ratio} x {wide.cells * ratio} px"
        )
    least = family.min_tile_lat(vae, "decode")
    for loop, ask in zip(layout.axes(view, "decode", tall.cells, wide.cells, ratio), asks, strict=True):
        if loop.window != ask.window:
            return f"the class reads {loop.window_set} along {ask.axis} as {loop.window} latents, not {ask.window}"
        reason = loop.fault()
        if reason is not None:
            return reason
        if ask.tiled and loop.window - loop.stride != ask.overlap:
            return f"the class reads {loop.stride_set} along {ask.axis} as {loop.stride} latents"
        if not ask.tiled and loop.count > 1:
            return f"the class would cut the {ask.cells} latents along {ask.axis} every {loop.stride}"
        if ask.length is not None and loop.thinnest < least:
            return (
                f"the last tile along {ask.axis} would have {loop.thinnest} latents, and the class takes no fewer than "
                f"{least}; another overlap moves it"
            )
    return None


class Overlaid:
    """A VAE with some attributes as they would be."""

    def __init__(self, vae: Any, changes: Attributes) -> None:
        self._vae = vae
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)


def changes_of(layout: Layout, plan: Mapping[str, Any]) -> Attributes:
    """What applying a plan changes: its attributes, and None for added ones that go, as it says it by others."""
    changes = dict(plan)
    for names in (layout.window_names, layout.overlap_names):
        if any(name in plan for name in names):
            changes |= dict.fromkeys(name for name in names if name in layout.extra_names and name not in plan)
    return changes


def set_attributes(vae: Any, changes: Attributes) -> None:
    before = {name: vars(vae)[name] for name in changes if name in vars(vae)}
    try:
        for name, value in changes.items():
            if value is not None:
                setattr(vae, name, value)
            elif name in before:
                delattr(vae, name)
    except BaseException:
        for name in changes:
            if name in before:
                setattr(vae, name, before[name])
            elif name in vars(vae):
                delattr(vae, name)
        raise

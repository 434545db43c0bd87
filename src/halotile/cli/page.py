"""`--html`: one page without network in which window, overlap and ranks are dragged and the costs change live.

The page is `plan_page.html` with the data below in it. Its script prices with the integers of `halotile.planning`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal

from halotile.cli.figure import ink_on, one_picture, rank_colour
from halotile.errors import PlanError
from halotile.planning import Scheduler, TilePlan, price

Last = Literal["clip", "spread", "drop"]
PLACE = "/*DATA*/null"
MOST_RANKS = 64
# JSON is valid inside a script element but for what the HTML parser sees first, and JavaScript's own line ends
ESCAPES = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"}


def page_of(
    plans: Sequence[TilePlan],
    title: str,
    *,
    least_window_px: tuple[int, int] | None = None,
    multiple_px: tuple[int, int] | None = None,
    last: Last = "clip",
    scheduler: Scheduler = "balanced",
) -> str:
    """The page's HTML: it starts with the first plan, and has a button for each.

    `title` says what was planned for, such as the VAE's class. `least_window_px` is the smallest window (height, width)
    that the VAE can have, and windows and overlaps move in steps of `multiple_px`; both are one latent where nothing
    is given, and must be whole latents. `last` is `AxisLoop.last` of the class's loop: what becomes of a tile that does
    not fit in. `scheduler` is the one that dealt the plans, and deals in the page.

    Raises `PlanError` when there is no plan, when the plans differ in picture, frames or ranks, or when another
    scheduler dealt them: the page would show other numbers for the same windows.
    """
    height, width, ratio = one_picture(plans)
    first = plans[0]
    least, multiple = least_window_px or (ratio, ratio), multiple_px or (ratio, ratio)
    for name, pair in (("least_window_px", least), ("multiple_px", multiple)):
        if any(px < 1 or px % ratio for px in pair):
            raise PlanError(f"{name} {pair} must be whole latents, multiples of {ratio} px")
    for plan in plans:
        if (plan.ranks, plan.frames, plan.time) != (first.ranks, first.frames, first.time):
            raise PlanError("a page shows plans for the same ranks and frames; these differ")
        again = price(
            plan.grid, ratio, plan.ranks, window_px=plan.window_px, overlap_px=plan.overlap_px, scheduler=scheduler,
            frames=plan.frames, time=plan.time,
        )  # fmt: skip
        if again.owners != plan.owners:
            raise PlanError(f"plan {plan.name!r} was not dealt by scheduler={scheduler!r}; name the one that did")
    most = max(MOST_RANKS, first.ranks)
    colours = [rank_colour(rank) for rank in range(most)]
    data = {
        "title": title,
        "latent": [height, width],
        "ratio": ratio,
        "ranks": first.ranks,
        "frames": first.frames,
        "chunks": [first.frames] if first.time is None else [len(chunk) for chunk in first.time.tiles],
        "least_window_px": least,
        "multiple_px": multiple,
        "last": last,
        "scheduler": scheduler,
        "plans": [{"name": plan.name, "window_px": plan.window_px, "overlap_px": plan.overlap_px} for plan in plans],
        "colours": colours,
        "inks": [ink_on(colour) for colour in colours],
    }
    template = files("halotile.cli").joinpath("plan_page.html").read_text(encoding="utf-8")
    assert template.count(PLACE) == 1, "the template has one place for the data"
    return template.replace(PLACE, json.dumps(data, ensure_ascii=False).translate(ESCAPES))

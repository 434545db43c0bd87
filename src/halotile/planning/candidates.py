"""The search for a few good tile windows: a coarse, a balanced and a fine one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from halotile.errors import PlanError
from halotile.geometry import DimTiling, TileGrid, tile_by_loop
from halotile.geometry.whole import require_whole
from halotile.planning.cost import TilePlan, price
from halotile.planning.cuts import AxisCut, Cut, Limits, Pair, why_no_grid
from halotile.planning.deal import Scheduler


def candidates(
    shape_lat: Pair,
    ratio: int,
    ranks: int,
    possible: Callable[[Pair, Pair], bool],
    bytes_of: Callable[[Pair], int] | None = None,
    memory_budget_bytes: int | None = None,
    *,
    least_lat: int = 16,
    least_overlap: Fraction = Fraction(1, 4),
    scheduler: Scheduler = "balanced",
    cut: Cut = tile_by_loop,
    frames: int = 1,
    time: DimTiling | None = None,
) -> list[TilePlan]:
    """Up to three tile plans of a picture, *coarse*, *balanced* and *fine* in this order; at least one.

    Every way to cut height and width into max(2, ranks) to 4 · ranks tiles is tried with the smallest window that cuts
    so and that `possible` takes, and the least overlap; larger overlaps, up to half the window, only where there is no
    grid otherwise. Of these, a window that is no better than another in area, decoded area, imbalance and tile columns
    is removed. *coarse* has the largest window of those that remain, *fine* the smallest, and *balanced* is the least
    bad of the others: the largest of its window area, decoded area and imbalance, each scaled from 0 (least of those
    that remain) to 1 (most), is as small as can be. Two that remain are *coarse* and *fine*; one is *coarse*.

    The names describe geometry and promise no speed: which one is fastest depends on the network, the kernels and the
    machine. Measure them (`halotile bench`).

    shape_lat: height and width of the latent. ratio: pixels a latent. possible: whether a VAE can have a window and an
    overlap, each (height, width) in pixels; where the window clears the picture the overlap is 0, and the window may
    exceed the picture by less than 8 latents. bytes_of: predicted bytes of a tile of (height, width) latents, which
    is clipped to the picture; `memory_budget_bytes` needs it. least_lat, least_overlap: along an axis that is tiled a
    window has at least `least_lat` latents and one latent a rank, and neighbours share at least this part of it. Both
    are conservative limits and not measures of quality: a smaller overlap may show no seam, and a larger one may show
    it. cut: the tiles of the class's own loop. frames, time: as of `TilePlan`; what is counted are tiles of a picture.

    Example: a picture of 1024 × 1024 pixels at 8 pixels a latent, on 4 ranks:

    >>> plans = candidates((128, 128), 8, 4, lambda window_px, overlap_px: True)
    >>> [(plan.name, plan.window_lat, plan.rows, plan.columns) for plan in plans]
    [('coarse', (43, 128), 4, 1), ('balanced', (22, 128), 8, 1), ('fine', (43, 43), 4, 4)]

    Raises `PlanError` when no grid has so many tiles, when `possible` takes none, and when none fits the budget; the
    message says what would.
    """
    require_whole("ratio", ratio, least=1)
    if memory_budget_bytes is not None and bytes_of is None:
        raise PlanError(f"memory_budget_bytes={memory_budget_bytes} needs bytes_of, a prediction to compare it with")
    limits = Limits(shape_lat, ranks, least_lat, least_overlap, cut)
    windows = _possible_windows(limits, ratio, possible)
    if memory_budget_bytes is not None and bytes_of is not None:
        windows = _within(memory_budget_bytes, windows, bytes_of, limits)
    plans = [
        price(
            TileGrid((window.height.tiling, window.width.tiling)), ratio, ranks,
            window_px=window.px, overlap_px=window.overlap_px, scheduler=scheduler, frames=frames, time=time,
            predicted_bytes=None if bytes_of is None else bytes_of(window.clipped),
        )
        for window in windows
    ]  # fmt: skip
    return _named(undominated(plans))


def undominated(plans: Sequence[TilePlan]) -> list[TilePlan]:
    """Those plans that no other one equals or betters in window area, decoded area, imbalance and tile columns at once.

    From the smallest window to the largest. Of equals the first stays.
    """
    kept: list[TilePlan] = []
    # whatever betters a plan comes before it in this order
    for plan in sorted(plans, key=_costs):
        if not any(all(a <= b for a, b in zip(_costs(other), _costs(plan), strict=True)) for other in kept):
            kept.append(plan)
    return kept


def _costs(plan: TilePlan) -> tuple[Fraction, ...]:
    return plan.window_share, plan.decoded_ratio, plan.imbalance, Fraction(plan.columns)


def _named(plans: list[TilePlan]) -> list[TilePlan]:
    """Coarse, balanced and fine of plans of which none betters another."""
    coarse = min(plans, key=lambda plan: (-plan.window_share, *_costs(plan)))
    others = [plan for plan in plans if plan is not coarse]
    if not others:
        return [replace(coarse, name="coarse")]
    fine = min(others, key=_costs)
    rest = [plan for plan in others if plan is not fine]
    scales = [(min(column), max(column)) for column in zip(*map(_costs, plans), strict=True)]

    def badness(plan: TilePlan) -> tuple[Fraction, ...]:
        scaled = [
            (cost - low) / (high - low) if high > low else Fraction(0)
            for cost, (low, high) in zip(_costs(plan)[:3], scales[:3], strict=True)
        ]
        return max(scaled), sum(scaled, Fraction(0)), *_costs(plan)

    middle = [replace(min(rest, key=badness), name="balanced")] if rest else []
    return [replace(coarse, name="coarse"), *middle, replace(fine, name="fine")]


@dataclass(frozen=True)
class _Window:
    """One cut an axis, and the pixels of a latent."""

    height: AxisCut
    width: AxisCut
    ratio: int

    @property
    def clipped(self) -> Pair:
        """Height and width in latents, those beyond the picture left out."""
        height, width = (min(axis.window, axis.tiling.length) for axis in (self.height, self.width))
        return height, width

    @property
    def px(self) -> Pair:
        return self.height.window * self.ratio, self.width.window * self.ratio

    @property
    def overlap_px(self) -> Pair:
        return self.height.overlap * self.ratio, self.width.overlap * self.ratio

    def __str__(self) -> str:
        return f"{self.px[0]} x {self.px[1]} px with an overlap of {self.overlap_px[0]} x {self.overlap_px[1]} px"


def _possible_windows(limits: Limits, ratio: int, possible: Callable[[Pair, Pair], bool]) -> list[_Window]:
    """For each number of rows and columns the smallest window that is possible."""
    shapes = limits.shapes()
    if not shapes:
        raise PlanError(why_no_grid(limits))
    found: list[_Window] = []
    refused: list[_Window] = []
    for heights, widths in shapes:
        windows = [_Window(height, width, ratio) for height, width in product(heights, widths)]
        windows.sort(key=lambda window: (window.clipped[0] * window.clipped[1], window.px, window.overlap_px))
        for window in windows:
            if possible(window.px, window.overlap_px):
                found.append(window)
                break
            refused.append(window)
    if not found:
        raise PlanError(
            f"none of the {len(refused)} windows that were tried is possible here, such as {refused[0]} "
            f"and {refused[-1]}; price a window that is possible, or decode without tiles"
        )
    return found


def _within(budget: int, windows: list[_Window], bytes_of: Callable[[Pair], int], limits: Limits) -> list[_Window]:
    """Those whose tiles take at most `budget` bytes."""
    require_whole("memory_budget_bytes", budget, least=1)
    kept = [window for window in windows if bytes_of(window.clipped) <= budget]
    if not kept:
        least = min(windows, key=lambda window: bytes_of(window.clipped))
        raise PlanError(
            f"memory_budget_bytes={budget} is too little for any window of {limits.least_tiles} to {limits.most_tiles} "
            f"tiles: the least is {bytes_of(least.clipped)}, for {least}; give that, or price a smaller window exactly"
        )
    return kept

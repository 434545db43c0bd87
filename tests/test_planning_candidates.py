"""`candidates`: limits kept, no plan worse than another, budgets, refusals that say what works."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, TileGrid, tile_by_loop, tile_by_size
from halotile.planning import TilePlan, candidates, price

light = settings(deadline=None, max_examples=60)
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 150))


def anything(window_px, overlap_px) -> bool:
    return True


def costs(plan: TilePlan) -> tuple:
    return plan.window_share, plan.decoded_ratio, plan.imbalance, plan.columns


def no_better(a: TilePlan, b: TilePlan) -> bool:
    return all(x >= y for x, y in zip(costs(a), costs(b), strict=True))


@st.composite
def found(draw: st.DrawFn):
    """Plans of a request, with the request; requests without a plan are left out."""
    shape = draw(SHAPES)
    ranks = draw(st.integers(1, 12))
    limits = {
        "least_lat": draw(st.sampled_from([4, 16])),
        "least_overlap": draw(st.sampled_from([Fraction(0), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2)])),
    }
    unit = draw(st.sampled_from([1, 2, 8]))

    def possible(window_px, overlap_px) -> bool:
        return all(px % (8 * unit) == 0 for px in (*window_px, *overlap_px))

    try:
        return shape, ranks, unit, limits, candidates(shape, 8, ranks, possible, **limits)
    except PlanError:
        return shape, ranks, unit, limits, []


@light
@given(found())
def test_every_plan_keeps_the_limits_and_covers(request) -> None:
    shape, ranks, unit, limits, plans = request
    for plan in plans:
        assert plan.grid.lengths == shape
        assert max(2, ranks) <= plan.tiles <= 4 * ranks
        assert plan.idle_ranks == 0
        for axis, dim in enumerate(plan.grid.dims):
            window, overlap = plan.window_px[axis] // 8, plan.overlap_px[axis] // 8
            assert window % unit == overlap % unit == 0
            assert dim == tile_by_loop(shape[axis], window, window - overlap)
            if window < shape[axis]:
                assert window >= max(limits["least_lat"], ranks)
                assert overlap >= limits["least_overlap"] * window
            else:
                assert (dim.count, overlap) == (1, 0)
                assert window - shape[axis] < 8


@light
@given(found())
def test_no_plan_is_no_better_than_another_and_names_are_in_order(request) -> None:
    plans = request[-1]
    assert not any(no_better(a, b) for a, b in permutations(plans, 2))
    names = [plan.name for plan in plans]
    assert names in ([], ["coarse"], ["coarse", "fine"], ["coarse", "balanced", "fine"])
    shares = [plan.window_share for plan in plans]
    assert all(shares[0] >= share >= shares[-1] for share in shares)


def every_grid(shape, ranks) -> list[TilePlan]:
    """All grids of the default limits: the smallest window for each number of rows and columns, written anew."""
    axes = []
    for length in shape:
        smallest = {1: (length, length)}
        for window in range(max(16, ranks), length):
            smallest.setdefault(-(-length // (3 * window // 4)), (window, 3 * window // 4))
        axes.append(smallest.values())
    plans = []
    for height, width in ((h, w) for h in axes[0] for w in axes[1]):
        grid = TileGrid((tile_by_loop(shape[0], *height), tile_by_loop(shape[1], *width)))
        if max(2, ranks) <= grid.count <= 4 * ranks:
            window, overlap = (height[0], width[0]), (height[0] - height[1], width[0] - width[1])
            plans.append(price(grid, 1, ranks, window_px=window, overlap_px=overlap))
    return plans


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(1, 6))
def test_coarse_balanced_and_fine_are_of_all_grids(shape, ranks) -> None:
    every = every_grid(shape, ranks)
    if not every:
        return
    # equal costs twice (rows and columns of a square swapped have other columns) are one plan
    front = {costs(a) for a in every if not any(no_better(a, b) and costs(a) != costs(b) for b in every)}
    plans = candidates(shape, 1, ranks, anything)
    assert len(plans) == min(3, len(front))
    assert {costs(plan) for plan in plans} <= front
    assert plans[0].window_share == max(cost[0] for cost in front)
    if len(plans) > 1:
        # one of the smallest that is not the coarse one itself
        assert plans[-1].window_share == min(cost[0] for cost in front - {costs(plans[0])})
    if len(plans) == 3:
        ends = [(min(cost[i] for cost in front), max(cost[i] for cost in front)) for i in range(3)]

        def worst(cost) -> Fraction:
            return max(
                Fraction(c - low) / (high - low) if high > low else 0
                for c, (low, high) in zip(cost[:3], ends, strict=True)
            )

        rest = front - {costs(plans[0]), costs(plans[2])}
        assert worst(costs(plans[1])) == min(map(worst, rest))


def test_a_square_megapixel_on_four_ranks() -> None:
    coarse, balanced, fine = candidates((128, 128), 8, 4, anything)
    assert (coarse.name, coarse.window_px, coarse.overlap_px) == ("coarse", (344, 1024), (88, 0))
    assert (coarse.rows, coarse.columns, coarse.window_share) == (4, 1, Fraction(43, 128))
    assert (balanced.name, balanced.window_px, balanced.rows, balanced.columns) == ("balanced", (176, 1024), 8, 1)
    assert (fine.name, fine.window_px, fine.rows, fine.columns) == ("fine", (344, 344), 4, 4)


def test_all_is_the_same_every_time_and_possible_is_asked_with_pixels() -> None:
    asked = []

    def possible(window_px, overlap_px) -> bool:
        asked.append((window_px, overlap_px))
        return True

    first = candidates((96, 128), 8, 4, possible)
    assert first == candidates((96, 128), 8, 4, anything)
    assert all((plan.window_px, plan.overlap_px) in asked for plan in first)
    for window, overlap in asked:
        for px, shared, length in zip(window, overlap, (768, 1024), strict=True):
            assert px % 8 == shared % 8 == 0
            assert (shared == 0) == (px >= length)


@pytest.mark.parametrize("unit", [2, 4, 8])
def test_a_class_that_takes_multiples_only_is_served(unit) -> None:
    def possible(window_px, overlap_px) -> bool:
        return all(px % (8 * unit) == 0 for px in (*window_px, *overlap_px))

    # 135 latent rows are no multiple: the window that clears them is 136
    plans = candidates((135, 240), 8, 4, possible)
    assert len(plans) == 3
    assert plans[0].window_share > plans[-1].window_share


def test_a_budget_leaves_the_windows_that_fit() -> None:
    def bytes_of(window_lat) -> int:
        return 1000 + 10 * window_lat[0] * window_lat[1]

    free = candidates((128, 128), 8, 4, anything, bytes_of)
    assert [plan.predicted_bytes for plan in free] == [1000 + 10 * plan.window_share * 128**2 for plan in free]
    budget = free[0].predicted_bytes - 1
    tight = candidates((128, 128), 8, 4, anything, bytes_of, budget)
    assert all(plan.predicted_bytes <= budget for plan in tight)
    assert candidates((128, 128), 8, 4, anything, bytes_of, budget + 1) == free
    with pytest.raises(PlanError, match=r"memory_budget_bytes=999 is too little .* 4 to 16 tiles: the least is") as why:
        candidates((128, 128), 8, 4, anything, bytes_of, 999)
    least = int(re.search(r"the least is (\d+)", str(why.value))[1])
    (only,) = candidates((128, 128), 8, 4, anything, bytes_of, least)
    assert (only.name, only.predicted_bytes) == ("coarse", least)
    with pytest.raises(PlanError, match=f"the least is {least}"):
        candidates((128, 128), 8, 4, anything, bytes_of, least - 1)


def test_the_bytes_are_those_of_the_window_within_the_picture() -> None:
    seen = []

    def bytes_of(window_lat) -> int:
        seen.append(window_lat)
        return 1

    candidates((135, 240), 8, 4, lambda w, o: all(px % 64 == 0 for px in (*w, *o)), bytes_of)
    assert all(height <= 135 and width <= 240 for height, width in seen)
    assert any(height == 135 for height, _ in seen)


@pytest.mark.parametrize(
    ("shape", "ranks"), [((16, 16), 2), ((20, 20), 10), ((128, 128), 64), ((4, 4), 100), ((1, 1), 1), ((512, 512), 500)]
)
def test_a_picture_without_a_grid_says_why_and_its_advice_works(shape, ranks) -> None:
    with pytest.raises(
        PlanError, match=rf"^{ranks} ranks? takes? {max(2, ranks)} to {4 * ranks} tiles, but"
    ) as refused:
        candidates(shape, 8, ranks, anything)
    message = str(refused.value)
    assert f"at least {max(16, ranks)} latents" in message
    fewer = re.search(r"plan for (\d+) rank", message)
    if fewer is None:
        assert "decode it whole" in message
        with pytest.raises(PlanError):
            candidates(shape, 8, 1, anything)
    else:
        assert candidates(shape, 8, int(fewer[1]), anything)


def test_a_wider_overlap_serves_a_picture_that_has_no_grid_otherwise() -> None:
    """UHD on 64 ranks: windows of 64 latents every 48 are 6 x 10, four tiles too few."""
    plans = candidates((270, 480), 8, 64, anything)
    assert all(plan.tiles >= 64 and min(plan.window_lat) >= 64 for plan in plans)
    assert any(4 * plan.overlap_px[0] > plan.window_px[0] for plan in plans)
    # and is not offered where there is one
    for plan in candidates((512, 512), 8, 64, anything):
        for window, overlap in zip(plan.window_px, plan.overlap_px, strict=True):
            assert overlap in (0, window // 8 - 3 * (window // 8) // 4 << 3)


def test_a_class_that_takes_nothing_is_told_what_was_tried() -> None:
    with pytest.raises(PlanError, match=r"none of the \d+ windows .* such as \d+ x \d+ px with an overlap of"):
        candidates((128, 128), 8, 4, lambda window_px, overlap_px: False)


def test_a_loop_of_its_own_is_searched() -> None:
    """A loop whose tiles all have the size of the window, as MiniMax-H3's."""

    def cut(length, window, stride) -> DimTiling:
        tiles = [Interval(t.start, t.stop) for t in tile_by_size(length, window, stride).tiles]
        tiles[-1] = Interval(max(0, length - window), length)
        return DimTiling(length, tuple(tiles))

    plans = candidates((128, 100), 8, 4, anything, cut=cut)
    assert all(len({tile.cells for tile in plan.grid.tiles}) == 1 for plan in plans)
    # as many equal tiles as four ranks can share evenly
    assert any(plan.imbalance == 0 for plan in plans)


def test_frames_and_the_scheduler_reach_the_plans() -> None:
    time = tile_by_loop(9, 5, 3)
    plans = candidates((128, 128), 8, 4, anything, frames=9, time=time, scheduler="round_robin")
    assert all(plan.owners == tuple(i % 4 for i in range(3 * plan.tiles)) for plan in plans)
    assert all(plan.time == time for plan in plans)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ratio": 0}, "ratio is 0"),
        ({"shape_lat": (0, 8)}, "the latent's height is 0"),
        ({"shape_lat": (8, 8.5)}, "the latent's width is 8.5"),
        ({"shape_lat": (8,)}, "shape_lat is .height, width. in latents, got"),
        ({"least_lat": 0}, "least_lat is 0"),
        ({"least_overlap": Fraction(1)}, "least_overlap is 1; .* from 0 to less than 1"),
        ({"least_overlap": Fraction(-1, 4)}, "least_overlap is -1/4"),
        ({"memory_budget_bytes": 5}, "memory_budget_bytes=5 needs bytes_of"),
        ({"memory_budget_bytes": 0, "bytes_of": lambda window: 1}, "memory_budget_bytes is 0"),
        ({"scheduler": "fair"}, "scheduler='fair' is not known"),
    ],
)
def test_refusals_name_the_numbers(change, message) -> None:
    request = {"shape_lat": (128, 128), "ratio": 8, "ranks": 4, "possible": anything}
    with pytest.raises(PlanError, match=message):
        candidates(**(request | change))


@pytest.mark.parametrize(("shape", "ranks"), [((512, 512), 64), ((270, 480), 64), ((512, 512), 16)])
def test_a_vae_is_asked_once_for_each_grid_and_16_times_at_most(shape, ranks) -> None:
    """What keeps a 4K picture on 64 ranks below a second, however slow `possible` is; timings are not for tests."""
    asked = []
    candidates(shape, 8, ranks, lambda *window: not asked.append(window))
    assert len(asked) < 200
    refused = []
    with pytest.raises(PlanError, match="none of the"):
        candidates(shape, 8, ranks, lambda *window: bool(refused.append(window)))
    assert len(refused) <= 16 * len(asked)

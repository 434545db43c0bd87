"""`price` and `TilePlan`: the worked example, and every cost against a count by hand."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, TileGrid, tile_by_loop
from halotile.planning import SCHEDULERS, TilePlan, price

light = settings(deadline=None, max_examples=100)


def loop_plan(shape, window, stride, ranks, ratio=8, **kwargs) -> TilePlan:
    """A window in latents, as a class's own loop cuts it; an axis that it clears is not tiled."""
    strides = [w if w >= n else s for n, w, s in zip(shape, window, stride, strict=True)]
    grid = TileGrid(tuple(tile_by_loop(n, w, s) for n, w, s in zip(shape, window, strides, strict=True)))
    overlap = tuple((w - s) * ratio for w, s in zip(window, strides, strict=True))
    window_px = tuple(w * ratio for w in window)
    return price(grid, ratio, ranks, window_px=window_px, overlap_px=overlap, **kwargs)


@st.composite
def plans(draw: st.DrawFn) -> TilePlan:
    shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    window = draw(st.tuples(st.integers(4, 50), st.integers(4, 50)))
    stride = tuple(draw(st.integers(3, w)) for w in window)
    frames = draw(st.integers(1, 9))
    span = draw(st.integers(1, 9))
    time = draw(st.sampled_from([None, tile_by_loop(frames, span, draw(st.integers(1, span)))]))
    return loop_plan(
        shape, window, stride, draw(st.integers(1, 6)), draw(st.sampled_from([1, 8])),
        frames=frames, time=time, scheduler=draw(st.sampled_from(SCHEDULERS)),
    )  # fmt: skip


def test_worked_example_strips() -> None:
    plan = loop_plan((128, 128), (43, 128), (32, 128), 4)
    assert [len(tile) for tile in plan.grid.dims[0].tiles] == [43, 43, 43, 32]
    assert (plan.rows, plan.columns, plan.tiles, plan.seams) == (4, 1, 4, 3)
    assert plan.decoded_ratio == Fraction(161, 128)  # 1.26
    assert plan.window_share == Fraction(43, 128)  # 34 %
    assert plan.imbalance == Fraction(172, 161) - 1  # 6.8 %
    assert plan.loads == (43 * 128, 43 * 128, 43 * 128, 32 * 128)
    assert (plan.window_px, plan.overlap_px, plan.picture_px) == ((344, 1024), (88, 0), (1024, 1024))
    shown = f"{float(plan.decoded_ratio):.2f} {float(plan.window_share):.0%} {float(plan.imbalance):.1%}"
    assert shown == "1.26 34% 6.8%"


def test_worked_example_grid() -> None:
    plan = loop_plan((128, 128), (54, 37), (45, 28), 4)
    assert (plan.rows, plan.columns, plan.tiles, plan.seams) == (3, 5, 15, 22)
    assert plan.decoded_ratio == Fraction(146 * 164, 128 * 128)  # 1.46
    assert plan.window_share == Fraction(54 * 37, 128 * 128)  # 12 %
    assert plan.heaviest == 6010  # the optimum, 0.4 % above even
    assert plan.imbalance == Fraction(6010 * 4, 146 * 164) - 1
    shown = f"{float(plan.decoded_ratio):.2f} {float(plan.window_share):.0%} {float(plan.imbalance):.1%}"
    assert shown == "1.46 12% 0.4%"


@light
@given(plans())
def test_costs_agree_with_a_count_of_cells(plan: TilePlan) -> None:
    height, width = plan.grid.lengths
    chunks = [Interval(0, plan.frames)] if plan.time is None else plan.time.tiles
    decoded: Counter[tuple[int, int]] = Counter()
    loads = [0] * plan.ranks
    owners = iter(plan.owners)
    for chunk in chunks:
        for tile in plan.grid.tiles:
            rows, columns = tile.regions
            decoded.update(
                {(y, x): len(chunk) for y in range(rows.start, rows.stop) for x in range(columns.start, columns.stop)}
            )
            loads[next(owners)] += len(rows) * len(columns) * len(chunk)
    assert next(owners, None) is None
    assert plan.loads == tuple(loads)
    assert sum(plan.loads) == sum(decoded.values())
    assert plan.decoded_ratio == Fraction(sum(decoded.values()), height * width * plan.frames) >= 1
    assert min(decoded.values()) >= plan.frames
    assert len(decoded) == height * width
    assert plan.heaviest == max(loads)
    assert plan.imbalance == Fraction(max(loads)) / Fraction(sum(loads), plan.ranks) - 1 >= 0
    assert plan.idle_ranks == loads.count(0)
    assert plan.idle_ranks >= plan.ranks - len(plan.owners)
    assert all(owner in range(plan.ranks) for owner in plan.owners)


@light
@given(plans())
def test_seams_are_the_pairs_of_neighbours(plan: TilePlan) -> None:
    at = {tile.index for tile in plan.grid.tiles}
    seams = sum((i + 1, j) in at for i, j in at) + sum((i, j + 1) in at for i, j in at)
    assert plan.seams == seams
    assert (plan.rows, plan.columns) == plan.grid.shape


@light
@given(plans())
def test_the_window_is_the_largest_tile_and_its_share_of_the_picture(plan: TilePlan) -> None:
    height, width = plan.grid.lengths
    largest = max(tile.cells for tile in plan.grid.tiles)
    assert plan.window_share == Fraction(largest, height * width) <= 1
    assert plan.window_lat == tuple(
        min(w // plan.ratio, n) for w, n in zip(plan.window_px, plan.grid.lengths, strict=True)
    )


@light
@given(plans())
def test_as_json_and_back(plan: TilePlan) -> None:
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    names = "name window_px overlap_px rows columns tiles window_share decoded_ratio seams imbalance loads idle_ranks"
    assert {*names.split(), "predicted_bytes"} <= data.keys()
    for name in ("rows", "columns", "tiles", "seams", "idle_ranks", "predicted_bytes", "name", "chunks", "frames"):
        assert data[name] == getattr(plan, name)
    for name in ("window_px", "overlap_px", "loads", "owners"):
        assert data[name] == list(getattr(plan, name))
    for name in ("window_share", "decoded_ratio", "imbalance"):
        assert Fraction(data["exact"][name]) == getattr(plan, name)
        assert data[name] == float(getattr(plan, name))


def test_more_ranks_than_tiles_idle() -> None:
    plan = loop_plan((128, 128), (43, 128), (32, 128), 6)
    assert plan.idle_ranks == 2
    assert plan.loads == (5504, 5504, 5504, 4096, 0, 0)
    assert plan.imbalance == Fraction(5504 * 6, 20608) - 1
    assert loop_plan((128, 128), (200, 128), (200, 128), 3).idle_ranks == 2


def test_a_temporal_loop_repeats_frames_and_deals_its_chunks() -> None:
    """HunyuanVideo: 16 frames every 12 at 4 frames a latent are chunks of 4 + 1 latents, 3 apart."""
    time = tile_by_loop(9, 5, 3)
    assert [len(chunk) for chunk in time.tiles] == [5, 5, 3]
    still = loop_plan((128, 128), (43, 128), (32, 128), 4)
    video = loop_plan((128, 128), (43, 128), (32, 128), 4, frames=9, time=time)
    assert (video.frames, video.chunks, video.tiles, len(video.owners)) == (9, 3, 4, 12)
    assert video.decoded_ratio == still.decoded_ratio * Fraction(13, 9)
    assert (video.window_share, video.seams) == (still.window_share, still.seams)
    assert video.imbalance <= still.imbalance
    # pieces of different chunks go to different ranks, so that more ranks than tiles have work
    assert loop_plan((128, 128), (86, 128), (64, 128), 4).idle_ranks == 2
    assert loop_plan((128, 128), (86, 128), (64, 128), 4, frames=9, time=time).idle_ranks == 0
    batched = loop_plan((128, 128), (43, 128), (32, 128), 4, frames=9)
    assert (batched.decoded_ratio, batched.imbalance) == (still.decoded_ratio, still.imbalance)
    assert batched.loads == tuple(9 * load for load in still.loads)


def test_the_scheduler_decides_the_owners_alone() -> None:
    balanced, runs, turns = (
        loop_plan((128, 128), (54, 37), (45, 28), 4, scheduler=scheduler)
        for scheduler in ("balanced", "contiguous", "round_robin")
    )
    assert turns.owners == tuple(i % 4 for i in range(15))
    assert all(a <= b for a, b in pairwise(runs.owners))
    assert balanced.heaviest < runs.heaviest
    assert balanced.grid == runs.grid == turns.grid
    assert sum(balanced.loads) == sum(runs.loads) == sum(turns.loads)


STRIPS = {
    "name": "asked",
    "window_px": (344, 1024),
    "overlap_px": (88, 0),
    "grid": TileGrid((tile_by_loop(128, 43, 32), tile_by_loop(128, 128, 128))),
    "ratio": 8,
    "ranks": 4,
    "owners": (0, 1, 2, 3),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "quick"}, "name='quick' is not known; choose one of coarse, balanced, fine, asked"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ratio": 0}, "ratio is 0"),
        ({"ratio": 8.0}, r"ratio is 8\.0 \(float\)"),
        ({"frames": 0}, "frames is 0"),
        ({"owners": (0, 1, 2)}, "3 owners for 4 tiles of 1 chunks"),
        ({"owners": (0, 1, 2, 4)}, "owner 4 is not one of 4 ranks; ranks are 0 to 3"),
        ({"owners": (0, 1, 2, -1)}, "owner -1 is not one of 4 ranks"),
        ({"window_px": (340, 1024)}, "height: a window of 340 px with an overlap of 88 px is not whole latents.* of 8"),
        ({"overlap_px": (84, 0)}, "an overlap of 84 px is not whole latents"),
        ({"overlap_px": (344, 0)}, "window of 344 px with an overlap of 344 px does not advance"),
        ({"overlap_px": (-8, 0)}, "overlap along height is -8"),
        ({"overlap_px": (88, 8)}, "width: .* overlap of 8 px clears the 1024 px of the picture.* must be 0"),
        ({"window_px": (352, 1024)}, "is 44 latents, but the largest tile of the grid has 43 of 128"),
        ({"window_px": (344,)}, "are .height, width. each"),
        ({"predicted_bytes": -1}, "predicted_bytes is -1"),
        ({"frames": 3, "time": tile_by_loop(4, 2, 2)}, "cover 4 latent frames, but frames is 3"),
        ({"frames": 4, "time": tile_by_loop(4, 2, 2)}, "4 owners for 4 tiles of 2 chunks of frames: each of the 8"),
        ({"grid": TileGrid((tile_by_loop(2, 2, 2),) * 3)}, "two dims .H, W., got 3"),
    ],
)
def test_a_plan_checks_itself(change: dict, message: str) -> None:
    TilePlan(**STRIPS)
    with pytest.raises(PlanError, match=message):
        TilePlan(**(STRIPS | change))


@pytest.mark.parametrize(("ranks", "message"), [(0, "ranks is 0"), (2.0, "float"), (True, "bool")])
def test_price_refuses_ranks_that_cannot_be(ranks, message) -> None:
    with pytest.raises(PlanError, match=message):
        price(STRIPS["grid"], 8, ranks, window_px=(344, 1024), overlap_px=(88, 0))


def test_a_window_beyond_the_picture_is_kept_as_asked_and_priced_as_clipped() -> None:
    plan = price(TileGrid((DimTiling(10, (Interval(0, 10),)),) * 2), 8, 2, window_px=(512, 80), overlap_px=(0, 0))
    assert (plan.window_px, plan.window_lat, plan.window_share, plan.seams) == ((512, 80), (10, 10), 1, 0)

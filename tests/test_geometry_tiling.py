from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, tile_by_count, tile_by_loop, tile_by_size

light = settings(deadline=None, max_examples=150)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """length, tile, stride, minimum that can be."""
    tile = draw(st.integers(1, 20))
    return draw(st.integers(1, 70)), tile, draw(st.integers(1, tile)), draw(st.integers(1, tile))


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """length, count, overlap that can be; overlaps that reach past the next tile are common."""
    length = draw(st.integers(1, 60))
    count = draw(st.integers(1, length))
    return length, count, draw(st.integers(0, length - count))


tilings = st.one_of(
    windows().map(lambda w: tile_by_size(*w)),
    windows().map(lambda w: tile_by_loop(*w[:3])),
    counts().map(lambda c: tile_by_count(*c)),
)


def pairs(tiling: DimTiling) -> list[tuple[int, int]]:
    return [(tile.start, tile.stop) for tile in tiling.tiles]


def rows(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@light
@given(tilings)
def test_every_tiling_covers_in_order_and_cores_are_a_partition(tiling: DimTiling) -> None:
    assert set().union(*map(rows, tiling.tiles)) == set(range(tiling.length))
    starts = [tile.start for tile in tiling.tiles]
    assert starts == sorted(set(starts))
    assert tiling.count == len(tiling.tiles) == len(tiling.cores) == len(tiling.overlaps) + 1
    assert [row for core in tiling.cores for row in range(core.start, core.stop)] == list(range(tiling.length))
    for tile, core in zip(tiling.tiles, tiling.cores, strict=True):
        assert tile.start <= core.start <= core.stop <= tile.stop


@light
@given(tilings)
def test_neighbours_and_overlaps_agree_with_sets_of_rows(tiling: DimTiling) -> None:
    sets = [rows(tile) for tile in tiling.tiles]
    for i, tile in enumerate(sets):
        assert tiling.neighbours(i) == tuple(j for j, other in enumerate(sets) if j != i and tile & other)
    assert tiling.overlaps == tuple(len(a & b) for a, b in pairwise(sets))


@light
@given(windows())
def test_by_size_keeps_tile_stride_and_minimum(window: tuple[int, int, int, int]) -> None:
    length, tile, stride, minimum = window
    tiling = tile_by_size(length, tile, stride, minimum)
    *front, last = tiling.tiles
    assert front == [Interval(i * stride, i * stride + tile) for i in range(len(front))]
    assert all(each.stop < length for each in front)
    assert min(minimum, length) <= len(last) <= tile
    # Where the minimum asks for nothing, the last tile is where the stride puts it.
    if len(last) > minimum or minimum == 1:
        assert last.start == len(front) * stride
    assert all(core for core in tiling.cores)
    for a, b in pairwise(tiling.tiles):
        assert not a.contains(b)
        assert not b.contains(a)


@light
@given(windows())
def test_by_loop_is_the_loop(window: tuple[int, int, int, int]) -> None:
    length, tile, stride, _ = window
    canvas = list(range(length))
    cut = [canvas[i : i + tile] for i in range(0, length, stride)]
    assert [list(range(*pair)) for pair in pairs(tile_by_loop(length, tile, stride))] == cut


@light
@given(windows())
def test_by_loop_is_by_size_and_then_tiles_that_add_no_row(window: tuple[int, int, int, int]) -> None:
    length, tile, stride, _ = window
    planned, loop = tile_by_size(length, tile, stride), tile_by_loop(length, tile, stride)
    assert loop.tiles[: planned.count] == planned.tiles
    assert all(planned.tiles[-1].contains(extra) for extra in loop.tiles[planned.count :])


@light
@given(counts())
def test_by_count_has_the_count_the_overlap_and_even_sizes(split: tuple[int, int, int]) -> None:
    length, count, overlap = split
    tiling = tile_by_count(length, count, overlap)
    sizes = [len(tile) for tile in tiling.tiles]
    assert tiling.count == count
    assert tiling.overlaps == (overlap,) * (count - 1)
    assert sum(sizes) == length + overlap * (count - 1)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(core for core in tiling.cores)


@light
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 45))
def test_by_count_refuses_exactly_what_would_not_advance_and_its_advice_works(
    length: int, count: int, overlap: int
) -> None:
    if count == 1 or count + overlap <= length:
        assert tile_by_count(length, count, overlap).count == count
        return
    with pytest.raises(PlanError, match=rf"^{count} tiles .*of a length of {length}") as refused:
        tile_by_count(length, count, overlap)
    message = str(refused.value)
    most = re.search(r"at most (\d+) tile", message)
    assert most is not None
    assert tile_by_count(length, int(most[1]), overlap)
    with pytest.raises(PlanError):
        tile_by_count(length, int(most[1]) + 1, overlap)
    less = re.search(r"overlap of at most (\d+) with", message)
    assert (less is not None) == (count <= length)
    if less is not None:
        assert tile_by_count(length, count, int(less[1]))
        with pytest.raises(PlanError):
            tile_by_count(length, count, int(less[1]) + 1)


def test_by_count_worked_example() -> None:
    tiling = tile_by_count(16, 4, 6)
    assert pairs(tiling) == [(0, 9), (3, 12), (6, 14), (8, 16)]
    assert tiling.cores == (Interval(0, 6), Interval(6, 9), Interval(9, 11), Interval(11, 16))
    assert tiling.neighbours(0) == (1, 2, 3)
    assert tile_by_count(12, 3, 4).neighbours(0) == (1, 2)
    assert tile_by_count(34, 8, 5).neighbours(3) == (1, 2, 4, 5)
    assert tile_by_count(16, 1, 99).tiles == (Interval(0, 16),)


@pytest.mark.parametrize(
    ("split", "largest"),
    [((16, 4, 6), "1.143"), ((12, 3, 4), "1.040"), ((34, 8, 5), "1.056"), ((16, 8, 5), "1.556")],
)
def test_case_b2_a_plain_trapezoid_does_not_sum_to_one(split: tuple[int, int, int], largest: str) -> None:
    tiling = tile_by_count(*split)
    sums = [0.0] * tiling.length
    for tile, before, after in zip(tiling.tiles, (0, *tiling.overlaps), (*tiling.overlaps, 0), strict=True):
        for k in range(len(tile)):
            rise = min(1.0, (k + 1) / (before + 1))
            fall = min(1.0, (len(tile) - k) / (after + 1))
            sums[tile.start + k] += rise * fall
    assert f"{max(sums):.3f}" == largest
    assert min(sums) == pytest.approx(1.0)


def test_case_d2_a_window_larger_than_the_length_is_one_tile() -> None:
    for stride in (1, 64, 512):
        assert pairs(tile_by_size(64, 512, stride)) == [(0, 64)]
        assert pairs(tile_by_size(64, 64 + stride, stride)) == [(0, 64)]
    assert pairs(tile_by_size(64, 64, 1)) == [(0, 64)]


@pytest.mark.parametrize("tile_by", [tile_by_size, tile_by_loop])
def test_case_g9_and_g2_a_stride_beyond_the_window_is_refused(tile_by: type) -> None:
    # The length does not matter: refused also where one tile would do.
    for length in (1024, 200):
        with pytest.raises(PlanError, match=r"stride 320 exceeds tile 256: 64 rows .* stride from 1 to 256 or .* 320"):
            tile_by(length, 256, 320)
    with pytest.raises(PlanError, match=r"stride 192 exceeds tile 64: 128 rows"):
        tile_by(256, 64, 192)


@pytest.mark.parametrize("tile_by", [tile_by_size, tile_by_loop])
def test_case_g10_half_overlap_then_a_half_window_pass(tile_by: type) -> None:
    window, overlap = 256, 128
    assert tile_by(640, window, window - overlap).overlaps[0] == 128
    assert tile_by(800, window, window - overlap).overlaps[0] == 128
    # The same overlap with half the window leaves a step of 0.
    with pytest.raises(PlanError, match=r"stride 0 does not advance on tiles of 128; use a stride from 1 to 128"):
        tile_by(640, window // 2, window // 2 - overlap)
    assert tile_by(800, window // 2, 1).overlaps[0] == 127


def test_case_g6_overlap_is_at_most_what_both_tiles_have() -> None:
    # 768 px at factor 8 is a window of 96 latents; a quarter of overlap is a stride of 72; the last tile has 16.
    tiling = tile_by_loop(160, 96, 72)
    assert pairs(tiling) == [(0, 96), (72, 160), (144, 160)]
    assert tiling.overlaps == (24, 16)
    for overlap, a, b in zip(tiling.overlaps, tiling.tiles, tiling.tiles[1:], strict=False):
        assert overlap <= min(len(a), len(b), 96 - 72)
    assert pairs(tile_by_size(160, 96, 72)) == [(0, 96), (72, 160)]


def test_case_ltx_480_no_tile_thinner_than_the_minimum() -> None:
    # 480 x 832 px at factor 32 is 15 x 26 latents; 512/448 px is tile 16, stride 14.
    assert pairs(tile_by_size(15, 16, 14, minimum=2)) == [(0, 15)]
    assert pairs(tile_by_size(26, 16, 14, minimum=2)) == [(0, 16), (14, 26)]
    assert pairs(tile_by_size(29, 16, 14, minimum=2)) == [(0, 16), (14, 29)]
    # The class's own loop has the row that its reflect padding cannot take.
    assert pairs(tile_by_loop(15, 16, 14)) == [(0, 15), (14, 15)]
    assert pairs(tile_by_loop(29, 16, 14)) == [(0, 16), (14, 29), (28, 29)]


def test_the_last_tile_grows_towards_the_first_row() -> None:
    assert pairs(tile_by_size(17, 16, 16)) == [(0, 16), (16, 17)]
    assert pairs(tile_by_size(17, 16, 16, minimum=2)) == [(0, 16), (15, 17)]
    assert pairs(tile_by_size(17, 16, 16, minimum=16)) == [(0, 16), (1, 17)]
    assert pairs(tile_by_size(3, 16, 16, minimum=8)) == [(0, 3)]


@pytest.mark.parametrize(("height", "width", "count"), [(16, 16, 1), (24, 16, 2), (24, 24, 4), (96, 168, 112)])
def test_case_h3_counts(height: int, width: int, count: int) -> None:
    # 256 px tiles with 64 px of overlap at factor 16.
    assert tile_by_size(height, 16, 12).count * tile_by_size(width, 16, 12).count == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 8), r"length is 0; .*at least 1"),
        ((9, 0, 8), r"tile is 0; .*at least 1"),
        ((9, 8, -3), r"stride -3 does not advance on tiles of 8"),
        ((9, 8, 8, 0), r"minimum is 0; .*at least 1"),
        ((9, 8, 8, 9), r"minimum 9 exceeds tile 8; use a minimum from 1 to 8"),
        ((9, 8, 7.5), r"stride is 7\.5 \(float\)"),
        ((9, "8", 8), r"tile is '8' \(str\)"),
    ],
)
def test_by_size_refusals_name_the_numbers(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        tile_by_size(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), r"length is 0"),
        ((8, 0, 0), r"count is 0; .*at least 1"),
        ((8, 2, -1), r"overlap is -1; .*at least 0"),
        ((8, 9, 0), r"9 tiles of a length of 8: .*overlap 0 use at most 8 tiles"),
        (
            (16, 4, 13),
            r"4 tiles with overlap 13 of a length of 16: tiles of 13 rows .* most 3 tiles .* at most 12 with",
        ),
        ((8, 2, 20), r"tiles of 14 rows would not advance; use at most 1 tile with .* at most 6 with"),
    ],
)
def test_by_count_refusals_name_the_numbers(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        tile_by_count(*arguments)


@pytest.mark.parametrize(
    ("length", "tiles", "message"),
    [
        (8, [(1, 8)], r"from 1 to 8 on a length of 8; the first must start at 0"),
        (8, [(0, 7)], r"from 0 to 7 on a length of 8; .* last stop at 8"),
        (8, [(0, 3), (4, 8)], r"tile 0 is \[0, 3\) and tile 1 \[4, 8\): the next one must start from 1 to 3"),
        (8, [(0, 6), (0, 8)], r"tile 1 \[0, 8\): the next one must start from 1 to 6"),
        (8, [(0, 6), (2, 5), (3, 8)], r"tile 1 \[2, 5\): .* stop at 6 or later"),
        (8, [(0, 4), (4, 4), (4, 8)], r"tile 1 is \[4, 4\); a tile must have at least 1 row"),
        (8, [], r"at least 1 interval, got \(\)"),
        (0, [(0, 0)], r"length is 0"),
    ],
)
def test_a_tiling_checks_itself(length: int, tiles: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        DimTiling(length, tuple(Interval(*tile) for tile in tiles))


def test_a_tile_index_that_is_not_there_is_refused() -> None:
    tiling = tile_by_size(9, 8, 8)
    for i in (2, -1):
        with pytest.raises(PlanError, match=rf"tile {i} is not one of 2 tiles; tiles are 0 to 1"):
            tiling.core(i)
        with pytest.raises(PlanError, match=rf"tile {i} is not one of 2"):
            tiling.neighbours(i)

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, Tile, TileGrid, tile_by_count, tile_by_loop, tile_by_size

light = settings(deadline=None, max_examples=60)
Cell = tuple[int, ...]


@st.composite
def tilings(draw: st.DrawFn) -> DimTiling:
    length = draw(st.integers(1, 9))
    if draw(st.booleans()):
        count = draw(st.integers(1, min(length, 4)))
        return tile_by_count(length, count, draw(st.integers(0, length - count)))
    tile = draw(st.integers(2, 6))
    return draw(st.sampled_from([tile_by_size, tile_by_loop]))(length, tile, draw(st.integers(2, tile)))


grids = st.lists(tilings(), min_size=2, max_size=3).map(lambda dims: TileGrid(tuple(dims)))


def cells(regions: tuple[Interval, ...]) -> set[Cell]:
    return set(product(*(range(region.start, region.stop) for region in regions)))


@light
@given(grids)
def test_tiles_cover_and_cores_are_a_partition(grid: TileGrid) -> None:
    canvas = set(product(*(range(length) for length in grid.lengths)))
    assert len(grid.tiles) == grid.count == prod(grid.shape)
    assert [tile.index for tile in grid.tiles] == sorted(product(*map(range, grid.shape)))
    assert all(grid.tile(tile.index) == tile for tile in grid.tiles)
    assert all(tile.cells == len(cells(tile.regions)) for tile in grid.tiles)
    assert set().union(*(cells(tile.regions) for tile in grid.tiles)) == canvas
    assert grid.decoded_cells == sum(tile.cells for tile in grid.tiles)
    times = Counter(cell for tile in grid.tiles for cell in cells(grid.core(tile)))
    assert times == dict.fromkeys(canvas, 1)
    assert all(cells(grid.core(tile)) <= cells(tile.regions) for tile in grid.tiles)


@light
@given(grids)
def test_neighbours_and_overlaps_agree_with_sets_of_cells(grid: TileGrid) -> None:
    for tile in grid.tiles[:: max(1, grid.count // 6)]:
        shared = {other: cells(tile.regions) & cells(other.regions) for other in grid.tiles}
        assert grid.neighbours(tile) == tuple(other for other in grid.tiles if other != tile and shared[other])
        for other in grid.tiles:
            overlap = grid.overlap(tile, other)
            assert (set() if overlap is None else cells(overlap)) == shared[other]
            assert overlap == grid.overlap(other, tile)


def test_worked_example_two_by_two() -> None:
    grid = TileGrid((tile_by_size(8, 5, 3), tile_by_size(8, 4, 4)))
    assert (grid.shape, grid.lengths, grid.count, grid.decoded_cells) == ((2, 2), (8, 8), 4, 80)
    first, right, below, diagonal = grid.tiles
    assert below == Tile((1, 0), (Interval(3, 8), Interval(0, 4)))
    assert below.cells == 20
    assert grid.core(below) == (Interval(4, 8), Interval(0, 4))
    # Tiles that only touch share no cell.
    assert grid.neighbours(first) == (below,)
    assert grid.overlap(first, below) == (Interval(3, 5), Interval(0, 4))
    assert grid.overlap(first, right) is None
    assert grid.overlap(first, diagonal) is None


def test_case_b1_the_diagonal_tile_counts() -> None:
    # 2 x 2 windows of 256 px that share 64.
    side = tile_by_size(448, 256, 192)
    grid = TileGrid((side, side))
    first, *others = grid.tiles
    assert grid.neighbours(first) == tuple(others)
    assert grid.overlap(first, others[-1]) == (Interval(192, 256), Interval(192, 256))


def test_neighbours_reach_past_the_next_tile_in_three_dims() -> None:
    grid = TileGrid((tile_by_count(5, 1, 0), tile_by_count(16, 4, 6), tile_by_count(12, 3, 4)))
    assert len(grid.neighbours(grid.tile((0, 0, 0)))) == 11


def test_refusals_name_the_numbers() -> None:
    dim = tile_by_size(8, 4, 4)
    for count in (1, 4):
        with pytest.raises(PlanError, match=rf"a grid of {count} dims; it must have 2 \(H, W\) or 3 \(F, H, W\)"):
            TileGrid((dim,) * count)
    with pytest.raises(PlanError, match=r"must be a tuple of tilings"):
        TileGrid([dim, dim])  # type: ignore[arg-type]
    grid = TileGrid((dim, dim))
    for index in ((0, 2), (-1, 0), (0,), (0, 0, 0)):
        with pytest.raises(PlanError, match=r"there is no tile .* in a grid of \(2, 2\) tiles"):
            grid.tile(index)
    with pytest.raises(PlanError, match=r"index of dim 1 is 1\.0 \(float\)"):
        grid.tile((0, 1.0))  # type: ignore[arg-type]
    stranger = TileGrid((tile_by_size(8, 5, 3), dim)).tiles[0]
    for refused in (grid.core, grid.neighbours, lambda tile: grid.overlap(grid.tiles[0], tile)):
        with pytest.raises(PlanError, match=r"stop=5.* is not of this grid, where that index is .*stop=4"):
            refused(stranger)
    with pytest.raises(PlanError, match=r"2 index numbers \(0, 0\) and 1 regions"):
        Tile((0, 0), (Interval(0, 4),))
    with pytest.raises(PlanError, match=r"no cells along dim 1: \[4, 4\)"):
        Tile((0, 0), (Interval(0, 4), Interval(4, 4)))
    with pytest.raises(PlanError, match=r"index of dim 0 is -1"):
        Tile((-1, 0), (Interval(0, 4), Interval(0, 4)))

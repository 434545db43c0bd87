"""Windows that sum to 1, and the weighted sum of tiles."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.blend import Blend, windows
from halotile.geometry import DimTiling, Interval, tile_by_count, tile_by_loop, tile_by_size


def _summed(tiling: DimTiling, margins: tuple[int, int] = (0, 0)) -> torch.Tensor:
    total = torch.zeros(tiling.length, dtype=torch.float64)
    for tile, window in zip(tiling.tiles, windows(tiling, margins), strict=True):
        assert window.dtype == torch.float32
        total[tile.start : tile.stop] += window
    return total


def _counts(cells: int, tiles: int, overlap: int) -> DimTiling:
    return tile_by_count(cells, tiles if tiles == 1 else max(1, min(tiles, cells - overlap)), overlap)


TILINGS = st.one_of(
    st.builds(_counts, st.integers(1, 80), st.integers(1, 12), st.integers(0, 20)),
    st.builds(
        lambda length, tile, stride: tile_by_size(length, tile, min(tile, stride)),
        st.integers(1, 80), st.integers(1, 30), st.integers(1, 30),
    ),
    st.builds(
        lambda length, tile, stride: tile_by_loop(length, tile, min(tile, stride)),
        st.integers(1, 80), st.integers(1, 30), st.integers(1, 30),
    ),
)  # fmt: skip


# --- B2


@pytest.mark.parametrize(("cells", "tiles", "overlap"), [(16, 4, 6), (12, 3, 4), (34, 8, 5), (16, 8, 5)])
@pytest.mark.parametrize("ratio", [1, 8])
def test_windows_sum_to_one_where_an_overlap_reaches_past_the_next_tile(cells, tiles, overlap, ratio) -> None:
    of_latents = tile_by_count(cells, tiles, overlap)
    tiling = DimTiling(cells * ratio, tuple(tile.scale(ratio) for tile in of_latents.tiles))
    assert (_summed(tiling) - 1).abs().max() < 1e-6
    assert all((window > 0).all() for window in windows(tiling))


@settings(deadline=None)
@given(TILINGS, st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_windows_of_any_tiling_sum_to_one(tiling: DimTiling, margins: tuple[int, int]) -> None:
    least = min(tiling.overlaps, default=0)
    if sum(margins) > least:
        margins = (0, 0)
    assert (_summed(tiling, margins) - 1).abs().max() < 1e-6
    assert all((window >= 0).all() for window in windows(tiling, margins))


@settings(deadline=None)
@given(TILINGS)
def test_there_is_no_ramp_on_the_borders_of_the_whole(tiling: DimTiling) -> None:
    made = windows(tiling)
    alone = tiling.tiles[1].start if tiling.count > 1 else tiling.length
    assert (made[0][:alone] == 1).all()
    last = tiling.tiles[-1]
    before = tiling.tiles[-2].stop if tiling.count > 1 else 0
    assert (made[-1][before - last.start :] == 1).all()


def test_two_tiles_meet_in_a_straight_ramp() -> None:
    first, second = windows(tile_by_count(12, 2, 4))
    ramp = torch.tensor([0.8, 0.6, 0.4, 0.2])
    torch.testing.assert_close(first, torch.cat([torch.ones(4), ramp]))
    torch.testing.assert_close(second, first.flip(0))


def test_margins_do_not_count_and_the_ramp_is_between_them() -> None:
    first, second = windows(tile_by_count(16, 2, 8), (2, 3))
    torch.testing.assert_close(second, torch.tensor([0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]))
    torch.testing.assert_close(first, torch.tensor([1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]))
    # nothing between them: a cut where both are right
    first, second = windows(tile_by_count(12, 2, 4), (2, 2))
    assert second.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert first.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


# --- B1, D5


def _blended(dims: tuple[DimTiling, DimTiling, DimTiling], tiles) -> torch.Tensor:
    blend, done = Blend(dims), []
    places = iter(product(*(dim.tiles for dim in dims)))
    for _ in range(blend.rows):
        for _ in range(dims[1].count * dims[2].count):
            blend.add(tiles(next(places)))
        done.append(blend.finish_row())
    return torch.cat(done, 2)


def test_four_constants_make_their_normalised_weighted_mean() -> None:
    side, still = tile_by_count(448, 2, 64), tile_by_count(1, 1, 0)
    assert side.tiles == (Interval(0, 256), Interval(192, 448))
    numbers = iter(range(4))
    out = _blended((still, side, side), lambda place: torch.full((1, 1, *map(len, place)), float(next(numbers))))[
        0, 0, 0
    ]
    up = torch.zeros(448)
    up[256:], up[192:256] = 1, (torch.arange(64) + 1) / 65
    expected = 2 * up[:, None] + up[None]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    # the diagonal tile counts where all four meet, and there is no step
    assert abs(float(out[223:225, 223:225].mean()) - 1.5) < 1e-5
    assert out.diff(dim=0).abs().max() < 2 / 64
    assert out.diff(dim=1).abs().max() < 1 / 64


def test_a_constant_that_is_off_by_some_makes_a_ramp_and_not_a_step() -> None:
    side, still = tile_by_count(48, 2, 16), tile_by_count(1, 1, 0)
    values = iter((0.5, 0.8))
    out = _blended((still, side, still), lambda place: torch.full((1, 1, *map(len, place)), next(values)))[
        0, 0, 0, :, 0
    ]
    steps = out.diff()
    assert (steps >= 0).all()
    assert float(steps.max()) < 0.3 / 16
    assert float(out[0]) == 0.5
    assert float(out[-1]) == pytest.approx(0.8)


# --- the sum


@settings(deadline=None, max_examples=30)
@given(TILINGS, TILINGS, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_the_parts_of_a_whole_blend_into_the_whole(frames: DimTiling, height: DimTiling, dtype: torch.dtype) -> None:
    whole = torch.randn(2, 3, frames.length, height.length, 1).to(dtype)
    still = tile_by_count(1, 1, 0)

    def cut(place):
        f, h, _ = place
        return whole[:, :, f.start : f.stop, h.start : h.stop]

    out = _blended((frames, height, still), cut)
    assert out.dtype == torch.promote_types(dtype, torch.float32) or frames.count == height.count == 1
    torch.testing.assert_close(out.to(dtype), whole, atol=1e-6, rtol=1.6e-2 if dtype == torch.bfloat16 else 2e-6)


def test_the_layout_of_a_tile_in_memory_does_not_change_a_bit() -> None:
    dims = (tile_by_count(9, 3, 2), tile_by_count(23, 3, 4), tile_by_count(17, 2, 5))
    generator = torch.Generator().manual_seed(0)
    tiles = {
        place: torch.randn(1, 3, *map(len, place), generator=generator)
        for place in product(*(dim.tiles for dim in dims))
    }
    plain = _blended(dims, tiles.__getitem__)
    last = _blended(dims, lambda place: tiles[place].to(memory_format=torch.channels_last_3d))
    assert torch.equal(plain, last)


def test_frames_come_out_when_no_later_tile_touches_them_and_only_open_ones_are_held() -> None:
    frames, still = tile_by_count(20, 4, 2), tile_by_count(1, 1, 0)
    blend, lengths = Blend((frames, tile_by_count(6, 1, 0), still)), []
    for tile in frames.tiles:
        blend.add(torch.ones(1, 1, len(tile), 6, 1))
        done = blend.finish_row()
        lengths.append(done.shape[2])
        assert blend._sum is None or blend._sum.shape[2] == 2
    assert lengths == [5, 5, 4, 6]


def test_a_tile_out_of_its_place_is_our_own_mistake() -> None:
    blend = Blend((tile_by_count(1, 1, 0), tile_by_count(7, 2, 1), tile_by_count(4, 1, 0)))
    with pytest.raises(AssertionError, match="is not a tile for"):
        blend.add(torch.ones(1, 1, 1, 5, 4))
    blend.add(torch.ones(1, 1, 1, 4, 4))
    with pytest.raises(AssertionError, match="1 tiles of row 0 are in"):
        blend.finish_row()

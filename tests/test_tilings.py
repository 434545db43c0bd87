"""Tilings by count and by size, and the grid of tiles that follows for a latent."""

from __future__ import annotations

import pytest
import tiny_vaes as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile import (
    DimensionSizeConfig,
    DimensionTilingConfig,
    PlanError,
    TileCountConfig,
    TileSizeConfig,
    balanced_tile_split,
)
from halotile.families import family_of
from halotile.geometry import Interval
from halotile.planning.deal import deal_early
from halotile.planning.latent_grid import LatentMap, cut_latent

D, S = DimensionTilingConfig, DimensionSizeConfig
PIXELS = LatentMap(8)


@pytest.mark.parametrize(
    ("n", "split"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7)), (8, (2, 4)), (16, (4, 4))]
)
def test_tiles_are_split_as_squarely_as_their_number_allows(n: int, split: tuple[int, int]) -> None:
    assert balanced_tile_split(n) == split


@settings(deadline=None)
@given(st.integers(1, 500))
def test_a_split_has_its_number_of_tiles_and_no_squarer_one_exists(n: int) -> None:
    rows, columns = balanced_tile_split(n)
    assert rows * columns == n
    assert rows <= columns
    assert not any(n % between == 0 for between in range(rows + 1, columns) if between * between <= n)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: D(0, 0), r"num_tiles is 0"),
        (lambda: D(2, -1), r"overlap is -1"),
        (lambda: D(2.0, 1), r"num_tiles is 2.0 \(float\)"),
        (lambda: S(64, 64), r"tiles of 64 with an overlap of 64 do not advance"),
        (lambda: S(0), r"size is 0"),
        (lambda: TileCountConfig(height=8), r"height=8: give a DimensionTilingConfig"),
        (lambda: TileSizeConfig(width=D(2, 1)), r"width=.*give a DimensionSizeConfig"),
        (lambda: balanced_tile_split(0), r"n is 0"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_built(build, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build()


@pytest.mark.parametrize(
    ("tiling", "lengths", "said"),
    [
        (TileCountConfig(height=D(8, 4)), (1, 11, 8), r"height, 11 latents: 8 tiles with overlap 4.*at most 7 tiles"),
        (TileCountConfig(width=D(9, 0)), (1, 8, 8), r"width, 8 latents: 9 tiles of a length of 8"),
        (TileSizeConfig(height=S(100, 8)), (1, 32, 8), r"height, 32 latents: 8 are one latent, so 100 is not whole"),
        (TileSizeConfig(height=S(64, 12)), (1, 32, 8), r"12 is not whole latents; try 8 or 16"),
    ],
)
def test_what_does_not_fit_a_latent_is_refused_with_its_numbers(tiling, lengths, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        cut_latent(tiling, lengths, [LatentMap(1), PIXELS, PIXELS])


def test_tiles_by_size_count_in_pixels_and_frames() -> None:
    tiling = TileSizeConfig(frames=S(16, 4), height=S(64, 16), width=S(4096, 8))
    grid = cut_latent(tiling, (7, 20, 9), [LatentMap(4, leads=True), PIXELS, PIXELS])
    assert grid.shape == (2, 3, 1)
    assert grid.tilings[0].tiles == (Interval(0, 4), Interval(3, 7))
    assert grid.tilings[1].tiles == (Interval(0, 8), Interval(6, 14), Interval(12, 20))


# --- tiles that are too thin (LTX-480)


def test_a_tile_by_size_that_would_be_too_thin_grows() -> None:
    # LTX-2, its default tiling, at 480 and 832 pixels of 32 a latent; 17 latents leave one for the last tile
    two = LatentMap(32, thinnest=2)
    grid = cut_latent(TileSizeConfig(height=S(512, 64), width=S(512, 64)), (1, 15, 26), [LatentMap(1), two, two])
    assert grid.shape == (1, 1, 2)
    grid = cut_latent(TileSizeConfig(height=S(512, 0)), (1, 17, 8), [LatentMap(1), two, two])
    assert grid.tilings[1].tiles == (Interval(0, 16), Interval(15, 17))


def test_a_tile_by_count_that_would_be_too_thin_is_refused_with_what_would_do() -> None:
    three = LatentMap(32, thinnest=3)
    with pytest.raises(PlanError, match=r"5 tiles with overlap 1.*use at most 4 with this overlap") as caught:
        cut_latent(TileCountConfig(height=D(5, 1)), (1, 9, 8), [LatentMap(1), three, three])
    assert "the thinnest tile would have 2" in str(caught.value)
    assert cut_latent(TileCountConfig(height=D(4, 1)), (1, 9, 8), [LatentMap(1), three, three]).count == 4


# --- time (T4)


def test_seventeen_latent_frames_of_a_causal_clip_are_65_frames() -> None:
    grid = cut_latent(TileCountConfig(frames=D(3, 2)), (17, 4, 4), [LatentMap(4, leads=True), PIXELS, PIXELS])
    assert grid.targets("decode")[0].length == 65
    first, second, third = (part for part in grid.parts("decode"))
    assert (first.source[0], first.skip[0], first.target[0]) == (Interval(0, 7), 0, Interval(0, 25))
    # [5, 12) starts one latent earlier, and the frame that this one makes is cut off
    assert (second.source[0], second.skip[0], second.target[0]) == (Interval(4, 12), 1, Interval(17, 45))
    assert (third.source[0], third.skip[0], third.target[0]) == (Interval(9, 17), 1, Interval(37, 65))


_MAPS = st.builds(LatentMap, st.integers(1, 9), st.booleans())


@settings(deadline=None)
@given(_MAPS, st.integers(1, 24), st.integers(1, 6), st.integers(0, 6), st.sampled_from(["decode", "encode"]))
def test_what_a_tile_makes_is_in_its_place(along: LatentMap, length: int, count: int, overlap: int, half: str) -> None:
    """A coordinate for each cell: an autoencoder that maps as its `LatentMap` says puts every tile's where it is."""
    if count > 1 and count + overlap > length:
        return
    grid = cut_latent(TileCountConfig(frames=D(count, overlap)), (length, 1, 1), [along, LatentMap(1), LatentMap(1)])

    def run(cells: Interval) -> list[Interval]:
        """What a network that is given these cells of the whole makes: as intervals of the whole's other side."""
        if half == "decode":
            made = list(range(cells.start, cells.stop))
            return [_cells_of(along, latent, latent == made[0]) for latent in made]
        if not along.leads:
            return [Interval(at // along.ratio, at // along.ratio + 1) for at in cells_of(cells)[:: along.ratio]]
        firsts = [cells.start, *range(cells.start + 1, cells.stop, along.ratio)]
        return [Interval(-(-at // along.ratio), -(-at // along.ratio) + 1) for at in firsts]

    def cells_of(interval: Interval) -> list[int]:
        return list(range(interval.start, interval.stop))

    whole = grid.targets(half)[0]
    assert whole.length == (along.cells(Interval(0, length)).stop if half == "decode" else length)
    for part in grid.parts(half):
        made = [cell for interval in run(part.source[0]) for cell in cells_of(interval)]
        assert len(made) == part.made[0]
        assert made[part.skip[0] :] == cells_of(part.target[0])


def _cells_of(along: LatentMap, latent: int, first: bool) -> Interval:
    """The cells of a latent: of the first one that a network sees, where that leads, only the last."""
    cells = along.cells(Interval(latent, latent + 1))
    return Interval(cells.stop - 1, cells.stop) if along.leads and first else cells


VIDEO = [name for name, config in tiny.CONFIGS.items() if len(config[2]) == 5]


@pytest.mark.parametrize("name", VIDEO)
def test_each_class_maps_frames_as_its_row_says(name: str) -> None:
    vae = tiny.build(name)
    family = family_of(vae)
    assert family is not None
    assert family.frames is not None
    assert family.frames.ratio(vae) == tiny.CONFIGS[name][4]
    made = {}
    for latent_frames in (3, 4, 7):
        z = torch.zeros(1, tiny.CONFIGS[name][2][1], latent_frames, 2, 2)
        with torch.no_grad():
            made[latent_frames] = tiny.decode(vae, name, z).shape[2]
    causal = {frames: LatentMap(tiny.CONFIGS[name][4], leads=True).cells(Interval(0, frames)).stop for frames in made}
    # what is not 1 + (F - 1) * ratio says why
    assert made == causal or "would not fall in place" in family.frames.apart, made


# --- who decodes what, early frames first


def test_loads_are_even_after_every_row() -> None:
    assert deal_early([(4, 2), (3, 3)], 2) == (0, 1, 1, 0)
    assert deal_early([(5,), (5,), (5,), (5,)], 2) == (0, 1, 0, 1)
    assert deal_early([(1, 1)], 4) == (0, 1)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 5))
def test_no_rank_is_ahead_of_another_by_more_than_a_tile(rows: list[list[int]], ranks: int) -> None:
    owners = iter(deal_early(rows, ranks))
    loads = [0] * ranks
    for row in rows:
        for cost in row:
            loads[next(owners)] += cost
        assert max(loads) - min(loads) <= 9

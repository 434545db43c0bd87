"""The grid of tiles that a tiling makes of a latent, and what its tiles become in the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Literal

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, tile_by_count, tile_by_size
from halotile.planning.tilings import DIMS, DimensionSizeConfig, DimensionTilingConfig, Tiling


@dataclass(frozen=True, slots=True)
class LatentMap:
    """How the cells of one dim of a latent become cells of the sample (pixels, frames).

    ratio: cells of the sample a latent. leads: the first latent makes one cell alone, as in causal autoencoders: L
    latents are 1 + (L - 1) * ratio cells, not L * ratio. thinnest: the fewest latents that a tile may have. apart: why
    tiles along this dim cannot be run apart from each other; empty where they can.
    """

    ratio: int
    leads: bool = False
    thinnest: int = 1
    apart: str = ""

    def cells(self, latents: Interval) -> Interval:
        """The cells that these latents make as part of the whole latent.

        With ratio 4 and `leads`, latent 0 makes frame 0 and latents [2, 4) make frames [5, 13).
        """
        if not self.leads:
            return latents.scale(self.ratio)
        return Interval(*(1 + (end - 1) * self.ratio if end else 0 for end in (latents.start, latents.stop)))

    def latents(self, name: str, cells: int) -> int:
        """How many latents a sample of `cells` has. Raises PlanError when that is not whole."""
        count, rest = divmod(cells - 1, self.ratio) if self.leads else divmod(cells, self.ratio)
        if rest:
            form = f"1 + n * {self.ratio}" if self.leads else f"a multiple of {self.ratio}"
            raise PlanError(f"{cells} cells along {name} are not whole latents; their number must be {form}")
        return count + self.leads


@dataclass(frozen=True, slots=True)
class Part:
    """One tile of a grid for one half of an autoencoder, three dims each: frames, height, width.

    source: the cells of the input that it is made from, context included. skip: leading cells of what comes out that
    are context, and are cut off. target: where the rest is in the whole result.
    """

    index: tuple[int, int, int]
    source: tuple[Interval, Interval, Interval]
    skip: tuple[int, int, int]
    target: tuple[Interval, Interval, Interval]

    @property
    def cells(self) -> int:
        """The work of it: cells of the input."""
        return prod(len(side) for side in self.source)

    @property
    def made(self) -> tuple[int, int, int]:
        """The size of what comes out, context included."""
        frames, height, width = (len(side) + skip for side, skip in zip(self.target, self.skip, strict=True))
        return frames, height, width


@dataclass(frozen=True)
class LatentGrid:
    """The tiles of a latent along frames, height and width, and what they become. `cut_latent` makes one.

    Along a dim that `leads`, a tile after the first is decoded from one latent earlier: the one cell that this latent
    makes when it comes first is context, and counts for nothing.
    """

    tilings: tuple[DimTiling, DimTiling, DimTiling]
    maps: tuple[LatentMap, LatentMap, LatentMap]
    _parts: dict[str, tuple[Part, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tiles along frames, height and width."""
        frames, height, width = (tiling.count for tiling in self.tilings)
        return frames, height, width

    @property
    def count(self) -> int:
        """Number of tiles."""
        return prod(self.shape)

    def targets(self, half: Literal["decode", "encode"]) -> tuple[DimTiling, DimTiling, DimTiling]:
        """The tiles' places in the result, a tiling a dim."""
        if half == "encode":
            return self.tilings
        frames, height, width = (
            DimTiling(
                along.cells(Interval(0, tiling.length)).stop, tuple(along.cells(latents) for latents in tiling.tiles)
            )
            for tiling, along in zip(self.tilings, self.maps, strict=True)
        )
        return frames, height, width

    def parts(self, half: Literal["decode", "encode"]) -> tuple[Part, ...]:
        """All tiles in row-major order: those of early frames first."""
        if half not in self._parts:
            sides = [
                [_side(half, along, latents) for latents in tiling.tiles]
                for tiling, along in zip(self.tilings, self.maps, strict=True)
            ]
            self._parts[half] = tuple(
                _part((f, h, w), sides[0][f], sides[1][h], sides[2][w])
                for f, h, w in product(*(range(count) for count in self.shape))
            )
        return self._parts[half]


def cut_latent(tiling: Tiling, lengths: Sequence[int], maps: Sequence[LatentMap]) -> LatentGrid:
    """The grid that `tiling` makes of a latent of `lengths` (frames, height, width); frames of a picture are 1.

    Eight bands that share 4 of 36 latent rows, [0, 8) [4, 12) ... [28, 36):

    >>> grid = cut_latent(TileCountConfig(height=DimensionTilingConfig(8, 4)), (1, 36, 20), [LatentMap(8)] * 3)
    >>> grid.shape, grid.parts("decode")[1].target[1]
    ((1, 8, 1), Interval(start=32, stop=96))

    Raises PlanError, with the numbers, for a tiling that does not fit: more tiles than there is room for, tiles that do
    not advance, tiles thinner than the autoencoder takes, sizes that are not whole latents, or a dim whose tiles cannot
    be run apart.
    """
    cuts = [
        _cut(name, getattr(tiling, name), length, along)
        for name, length, along in zip(DIMS, lengths, maps, strict=True)
    ]
    return LatentGrid((cuts[0], cuts[1], cuts[2]), (maps[0], maps[1], maps[2]))


def _cut(
    name: str, asked: DimensionTilingConfig | DimensionSizeConfig | None, length: int, along: LatentMap
) -> DimTiling:
    try:
        if isinstance(asked, DimensionTilingConfig):
            tiling = tile_by_count(length, asked.num_tiles, asked.overlap)
        elif asked is None:
            tiling = tile_by_count(length, 1, 0)
        else:
            size, overlap = _whole(asked.size, along), _whole(asked.overlap, along)
            thinnest = min(along.thinnest, length)
            if size < thinnest:
                raise PlanError(f"a tile of {asked.size} has {size} latents; the class takes no fewer than {thinnest}")
            tiling = tile_by_size(length, size, size - overlap, minimum=thinnest)
    except PlanError as error:
        raise PlanError(f"{name}, {length} latents: {error}") from error
    if tiling.count == 1:
        return tiling
    if along.apart:
        raise PlanError(f"{name} cannot be cut into {tiling.count} tiles: {along.apart}")
    # what only serves as context makes a tile thicker, too
    thin = min(len(tile) + (along.leads and tile.start > 0) for tile in tiling.tiles)
    if thin < along.thinnest:
        overlap = max(tiling.overlaps)
        most = max(1, (length - overlap) // max(1, along.thinnest - overlap))
        raise PlanError(
            f"{name}, {length} latents in {tiling.count} tiles with overlap {overlap}: the thinnest tile would have "
            f"{thin}, and the class takes no fewer than {along.thinnest}; use at most {most} with this overlap, or "
            "more of it"
        )
    return tiling


def _whole(cells: int, along: LatentMap) -> int:
    if cells % along.ratio:
        raise PlanError(
            f"{along.ratio} are one latent, so {cells} is not whole latents; try {cells // along.ratio * along.ratio} "
            f"or {(cells // along.ratio + 1) * along.ratio}"
        )
    return cells // along.ratio


Side = tuple[Interval, int, Interval]


def _part(index: tuple[int, int, int], frames: Side, height: Side, width: Side) -> Part:
    return Part(
        index, (frames[0], height[0], width[0]), (frames[1], height[1], width[1]), (frames[2], height[2], width[2])
    )


def _side(half: Literal["decode", "encode"], along: LatentMap, latents: Interval) -> Side:
    """One dim of a tile: the cells of the input that it is made from, how many of the result to skip, and the rest."""
    context = int(along.leads and latents.start > 0)
    read = Interval(latents.start - context, latents.stop)
    if half == "decode":
        return read, context, along.cells(latents)
    # the context's last cell alone: read from there, it is the one that makes a latent by itself
    cells = along.cells(latents)
    return Interval(cells.start - context, cells.stop), context, latents

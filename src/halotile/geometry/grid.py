"""Grids of tiles over height × width or frames × height × width."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from halotile.errors import PlanError
from halotile.geometry.interval import Interval
from halotile.geometry.tiling import DimTiling
from halotile.geometry.whole import require_whole


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Every combination of the tiles of each dim: ``dims`` is (H, W) or (F, H, W), all in latent or all in pixel units.

    Height [0, 5) [3, 8) and width [0, 4) [4, 8) give ``shape`` (2, 2), ``lengths`` (8, 8), 4 tiles of 5 × 4 cells, and
    80 decoded cells for a canvas of 64.
    """

    dims: tuple[DimTiling, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dims, tuple):
            raise PlanError(f"dims must be a tuple of tilings, got {self.dims!r}")
        if len(self.dims) not in (2, 3):
            raise PlanError(f"a grid of {len(self.dims)} dims; it must have 2 (H, W) or 3 (F, H, W)")

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of tiles along each dim."""
        return tuple(dim.count for dim in self.dims)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of cells of the canvas along each dim."""
        return tuple(dim.length for dim in self.dims)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return prod(self.shape)

    @property
    def decoded_cells(self) -> int:
        """Cells of all tiles together: those that several tiles share count once for each."""
        return prod(sum(len(region) for region in dim.tiles) for dim in self.dims)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in row-major order: the last dim varies fastest."""
        return tuple(self._at(index) for index in product(*(range(count) for count in self.shape)))

    def tile(self, index: tuple[int, ...]) -> Tile:
        """The tile at ``index``, one number a dim."""
        for dim, i in enumerate(index):
            require_whole(f"index of dim {dim}", i)
        known = len(index) == len(self.dims) and all(i in range(n) for i, n in zip(index, self.shape, strict=True))
        if not known:
            raise PlanError(f"there is no tile {index} in a grid of {self.shape} tiles")
        return self._at(index)

    def core(self, tile: Tile) -> tuple[Interval, ...]:
        """The tile's own region; the cores of all tiles are a partition of the canvas (see ``DimTiling.core``)."""
        self._require_member(tile)
        return tuple(dim.core(i) for dim, i in zip(self.dims, tile.index, strict=True))

    def neighbours(self, tile: Tile) -> tuple[Tile, ...]:
        """All other tiles that share cells with ``tile``, diagonal and farther ones included, in row-major order."""
        self._require_member(tile)
        near = (sorted((i, *dim.neighbours(i))) for dim, i in zip(self.dims, tile.index, strict=True))
        return tuple(self._at(index) for index in product(*near) if index != tile.index)

    def overlap(self, tile_a: Tile, tile_b: Tile) -> tuple[Interval, ...] | None:
        """The region that both tiles have, one interval a dim; ``None`` when they share no cell."""
        self._require_member(tile_a)
        self._require_member(tile_b)
        shared = tuple(a.intersect(b) for a, b in zip(tile_a.regions, tile_b.regions, strict=True))
        return shared if all(shared) else None

    def _at(self, index: tuple[int, ...]) -> Tile:
        return Tile(index, tuple(dim.tiles[i] for dim, i in zip(self.dims, index, strict=True)))

    def _require_member(self, tile: Tile) -> None:
        if self.tile(tile.index) != tile:
            raise PlanError(f"{tile} is not of this grid, where that index is {self.tile(tile.index)}")


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a grid: its place in the grid, and the region of the canvas that it covers, one interval a dim."""

    index: tuple[int, ...]
    regions: tuple[Interval, ...]

    def __post_init__(self) -> None:
        if len(self.index) != len(self.regions):
            raise PlanError(f"a tile with {len(self.index)} index numbers {self.index} and {len(self.regions)} regions")
        for dim, (i, region) in enumerate(zip(self.index, self.regions, strict=True)):
            require_whole(f"index of dim {dim}", i, least=0)
            if region.empty:
                raise PlanError(f"a tile with no cells along dim {dim}: [{region.start}, {region.stop})")

    @property
    def cells(self) -> int:
        """Number of cells, the product of the regions' lengths."""
        return prod(len(region) for region in self.regions)

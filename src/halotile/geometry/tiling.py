"""Tilings of one dim: by size, by count, and as a VAE's own loop cuts it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from halotile.errors import PlanError
from halotile.geometry.interval import Interval
from halotile.geometry.whole import require_whole


def tile_by_size(length: int, tile: int, stride: int, minimum: int = 1) -> DimTiling:
    """Tiles of ``tile`` rows, ``stride`` apart, up to the first one that reaches the end, which is clipped.

    No tile lies inside its predecessor. A last tile shorter than ``minimum`` grows towards the first row: 17 rows with
    tile 16, stride 16 are [0, 16) [16, 17), and with minimum 2 they are [0, 16) [15, 17). A length below ``minimum`` is
    one tile of that length. All arguments count the same unit; ``tile`` may exceed ``length``, which gives one tile.

    Raises ``PlanError`` when a number is below 1, ``stride`` exceeds ``tile`` or ``minimum`` exceeds ``tile``.
    """
    _require_window(length, tile, stride)
    require_whole("minimum", minimum, least=1)
    if minimum > tile:
        raise PlanError(f"minimum {minimum} exceeds tile {tile}; use a minimum from 1 to {tile} or a larger tile")
    # Tiles beyond the first: as many strides as it takes to bring a tile's end to the length.
    further = -(-max(0, length - tile) // stride)
    tiles = [Interval(i * stride, i * stride + tile) for i in range(further)]
    tiles.append(Interval(max(0, min(further * stride, length - minimum)), length))
    return DimTiling(length, tuple(tiles))


def tile_by_loop(length: int, tile: int, stride: int) -> DimTiling:
    """The tiles of ``for start in range(0, length, stride)``, clipped: what the loops of diffusers' VAEs cut.

    Unlike ``tile_by_size`` the last tiles may lie inside their predecessors: 15 rows with tile 16, stride 14 are
    [0, 15) [14, 15), where ``tile_by_size`` has [0, 15) alone. Use it to predict such a loop, not to plan one.

    Raises ``PlanError`` when a number is below 1 or ``stride`` exceeds ``tile``.
    """
    _require_window(length, tile, stride)
    return DimTiling(length, tuple(Interval(i, min(i + tile, length)) for i in range(0, length, stride)))


def tile_by_count(length: int, count: int, overlap: int) -> DimTiling:
    """Exactly ``count`` tiles that share ``overlap`` rows with the next one, sizes differing by at most one.

    ``size, rest = divmod(length + overlap * (count - 1), count)``; the first ``rest`` tiles have one row more.
    16 rows, 4 tiles, overlap 6: 34 rows in all, so 9, 9, 8, 8: [0, 9) [3, 12) [6, 14) [8, 16). An overlap may reach
    past the next tile, as it does here: tile 0 also shares rows with tile 2. A single tile has no overlap.

    Raises ``PlanError`` when ``count > length``, or when tiles would not advance, that is when there are several and
    ``count + overlap > length``.
    """
    require_whole("length", length, least=1)
    require_whole("count", count, least=1)
    require_whole("overlap", overlap, least=0)
    if count > length:
        raise PlanError(
            f"{count} tiles of a length of {length}: a tile would have no rows of its own; "
            f"with overlap {overlap} use at most {_tiles(max(1, length - overlap))}"
        )
    size, rest = divmod(length + overlap * (count - 1), count)
    if count > 1 and size <= overlap:
        raise PlanError(
            f"{count} tiles with overlap {overlap} of a length of {length}: tiles of {size} rows would not advance; "
            f"use at most {_tiles(max(1, length - overlap))} with this overlap, "
            f"or an overlap of at most {length - count} with this count"
        )
    tiles = []
    start = 0
    for i in range(count):
        tiles.append(Interval(start, start + size + (i < rest)))
        start = tiles[-1].stop - overlap
    return DimTiling(length, tuple(tiles))


@dataclass(frozen=True, slots=True)
class DimTiling:
    """Tiles that cover the rows [0, ``length``) of one dim, in order: starts rise, and stops never fall."""

    length: int
    tiles: tuple[Interval, ...]

    def __post_init__(self) -> None:
        require_whole("length", self.length, least=1)
        if not isinstance(self.tiles, tuple) or not self.tiles:
            raise PlanError(f"tiles must be a tuple of at least 1 interval, got {self.tiles!r}")
        first, last = self.tiles[0], self.tiles[-1]
        if first.start != 0 or last.stop != self.length:
            raise PlanError(
                f"tiles run from {first.start} to {last.stop} on a length of {self.length}; "
                f"the first must start at 0 and the last stop at {self.length}"
            )
        for i, tile in enumerate(self.tiles):
            if tile.empty:
                raise PlanError(f"tile {i} is {_rows(tile)}; a tile must have at least 1 row")
        for i, (tile, after) in enumerate(pairwise(self.tiles)):
            if not tile.start < after.start <= tile.stop <= after.stop:
                raise PlanError(
                    f"tile {i} is {_rows(tile)} and tile {i + 1} {_rows(after)}: the next one must start from "
                    f"{tile.start + 1} to {tile.stop} and stop at {tile.stop} or later"
                )

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.tiles)

    @property
    def overlaps(self) -> tuple[int, ...]:
        """Rows that each tile but the last shares with the next one; ``count - 1`` numbers."""
        return tuple(tile.stop - after.start for tile, after in pairwise(self.tiles))

    @property
    def cores(self) -> tuple[Interval, ...]:
        """Each tile's own rows: inside the tile, in order, and together exactly [0, ``length``). See ``core``."""
        return tuple(self.core(i) for i in range(self.count))

    def core(self, i: int) -> Interval:
        """Tile ``i``'s own rows: neighbours part in the middle of what they share, rounded towards the first row.

        [0, 9) [3, 12) [6, 14) [8, 16) part at 6, 9 and 11, so tile 1's core is [6, 9), although rows 6 to 8 are in
        tiles 0 and 2 too. A core is empty only where tiles end together and start one row apart (``tile_by_loop``
        with stride 1).
        """
        self._require_index(i)
        return Interval(self._cut(i), self._cut(i + 1))

    def neighbours(self, i: int) -> tuple[int, ...]:
        """All other tiles that share rows with tile ``i``, in order; where overlaps are large, not only i ± 1."""
        self._require_index(i)
        tile = self.tiles[i]
        # Starts rise and stops never fall, so those that share rows lie in one run around i.
        first = i
        while first > 0 and self.tiles[first - 1].stop > tile.start:
            first -= 1
        last = i
        while last + 1 < self.count and self.tiles[last + 1].start < tile.stop:
            last += 1
        return (*range(first, i), *range(i + 1, last + 1))

    def _cut(self, i: int) -> int:
        """Where the core of tile ``i`` starts. Starts and stops are ordered, so these midpoints are ordered too."""
        if i == 0:
            return 0
        if i == self.count:
            return self.length
        return (self.tiles[i].start + self.tiles[i - 1].stop) // 2

    def _require_index(self, i: int) -> None:
        require_whole("tile index", i)
        if i not in range(self.count):
            raise PlanError(f"tile {i} is not one of {self.count} tiles; tiles are 0 to {self.count - 1}")


def _require_window(length: int, tile: int, stride: int) -> None:
    require_whole("length", length, least=1)
    require_whole("tile", tile, least=1)
    require_whole("stride", stride)
    if stride < 1:
        raise PlanError(f"stride {stride} does not advance on tiles of {tile}; use a stride from 1 to {tile}")
    if stride > tile:
        raise PlanError(
            f"stride {stride} exceeds tile {tile}: {stride - tile} rows between neighbouring tiles would be lost; "
            f"use a stride from 1 to {tile} or a tile of at least {stride}"
        )


def _rows(interval: Interval) -> str:
    return f"[{interval.start}, {interval.stop})"


def _tiles(count: int) -> str:
    return "1 tile" if count == 1 else f"{count} tiles"

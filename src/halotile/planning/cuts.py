"""All the ways to cut a picture into about as many tiles as there are ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from halotile.errors import PlanError
from halotile.geometry import DimTiling
from halotile.geometry.whole import require_whole

Pair = tuple[int, int]
Cut = Callable[[int, int, int], DimTiling]
"""The tiles of a loop: (length, window, stride) in latent cells."""

ALIGNMENTS = (1, 2, 4, 8)
"""Windows and strides are tried at multiples of these: a class that cannot take every window wants one of them."""


@dataclass(frozen=True)
class Limits:
    """What a grid must keep to."""

    shape_lat: Pair
    ranks: int
    least_lat: int
    least_overlap: Fraction
    cut: Cut

    def __post_init__(self) -> None:
        if len(self.shape_lat) != 2:
            raise PlanError(f"shape_lat is (height, width) in latents, got {self.shape_lat}")
        for name, length in zip(("height", "width"), self.shape_lat, strict=True):
            require_whole(f"the latent's {name}", length, least=1)
        require_whole("ranks", self.ranks, least=1)
        require_whole("least_lat", self.least_lat, least=1)
        if not 0 <= self.least_overlap < 1:
            raise PlanError(f"least_overlap is {self.least_overlap}; it is a part of the window, from 0 to less than 1")

    @property
    def least_window(self) -> int:
        return max(self.least_lat, self.ranks)

    @property
    def least_tiles(self) -> int:
        return max(2, self.ranks)

    @property
    def most_tiles(self) -> int:
        return 4 * self.ranks

    def cuts(self, length: int, wide: bool) -> dict[int, list[AxisCut]]:
        """The smallest windows that cut an axis into so many tiles, one an alignment: count -> cuts, smallest first.

        Overlaps are the least that is allowed; when `wide`, the least window has all overlaps up to half of it too.
        """
        found: dict[int, dict[Pair, AxisCut]] = {1: {}}
        for unit in ALIGNMENTS:
            whole = -(-length // unit) * unit
            found[1].setdefault((whole, whole), AxisCut(whole, 0, self.cut(length, whole, whole)))
            seen = {1}
            for window, stride in self._windows(length, unit, wide):
                # far more tiles than a grid may have: not even cut
                if stride * self.most_tiles < length - window:
                    continue
                tiling = self.cut(length, window, stride)
                # a count that only an alignment reaches, by an overlap far above the least, is none to propose
                if tiling.count in seen or (unit > 1 and tiling.count not in found):
                    continue
                seen.add(tiling.count)
                axis_cut = AxisCut(window, window - stride, tiling)
                found.setdefault(tiling.count, {}).setdefault((window, stride), axis_cut)
        return {
            count: sorted(cuts.values(), key=lambda cut: (cut.window, cut.overlap)) for count, cuts in found.items()
        }

    def shapes(self) -> list[tuple[list[AxisCut], list[AxisCut]]]:
        """The cuts of height and of width for each number of rows and columns that are neither too few nor too many.

        Wide overlaps decode much twice, so they are for pictures that would have no grid at all without them.
        """
        for wide in (False, True):
            height, width = (self.cuts(length, wide) for length in self.shape_lat)
            shapes = [
                (height[rows], width[columns])
                for rows, columns in product(sorted(height), sorted(width))
                if self.least_tiles <= rows * columns <= self.most_tiles
            ]
            if shapes:
                return shapes
        return []

    def _windows(self, length: int, unit: int, wide: bool) -> Iterator[Pair]:
        """Windows that do not clear the axis, and their strides; small windows first, then large strides first."""
        first = -(-self.least_window // unit) * unit
        for window in range(first, length, unit):
            stride = int(window * (1 - self.least_overlap)) // unit * unit
            least = -(-window // 2) if wide and window == first else stride
            yield from ((window, each) for each in range(stride, max(least, 1) - 1, -unit))


@dataclass(frozen=True)
class AxisCut:
    """One axis cut by a window, in latent cells."""

    window: int
    overlap: int
    tiling: DimTiling


def why_no_grid(limits: Limits) -> str:
    """Words for a picture that has none, and how many ranks would have one."""
    height, width = limits.shape_lat
    rows, columns = (max(limits.cuts(length, wide=True)) for length in limits.shape_lat)
    fewer, many = 0, limits.ranks  # a grid is known for `fewer` ranks (when not 0), and none for `many`
    while many - fewer > 1:
        middle = (fewer + many) // 2
        if replace(limits, ranks=middle).shapes():
            fewer = middle
        else:
            many = middle
    works = f"plan for {fewer} rank{'s' * (fewer > 1)}" if fewer else "decode it whole"
    if limits.least_lat > 1 and replace(limits, least_lat=1).shapes():
        works += f", or lower least_lat={limits.least_lat}"
    who = f"{limits.ranks} ranks take" if limits.ranks > 1 else "1 rank takes"
    return (
        f"{who} {limits.least_tiles} to {limits.most_tiles} tiles, but "
        f"windows of at least {limits.least_window} latents that share {limits.least_overlap} or more with the next "
        f"one cut {height} x {width} latents into at most {rows} x {columns}; {works}"
    )

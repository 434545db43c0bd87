"""Tilings that users ask for, by count or by size."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from halotile.errors import PlanError
from halotile.geometry.whole import require_whole

DIMS = ("frames", "height", "width")


@dataclass(frozen=True, slots=True)
class DimensionTilingConfig:
    """`num_tiles` tiles along one dim; each shares `overlap` cells of the latent grid with the next one.

    A single tile has no neighbour, so its overlap says nothing. Raises PlanError for numbers that cannot be.
    """

    num_tiles: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        require_whole("num_tiles", self.num_tiles, least=1)
        require_whole("overlap", self.overlap, least=0)


@dataclass(frozen=True, slots=True)
class TileCountConfig:
    """Tiles by count along frames, height and width, in units of the latent grid.

    `TileCountConfig(height=DimensionTilingConfig(8, 4))` is eight bands that share four latent rows. A picture has one
    frame. A count that does not fit a latent is a PlanError when it is used.

    Tiles of frames do not see what came before their one latent of context, so they are not the untiled decode. On the
    clip model that ships with halotile, 9 latent frames in 3 tiles lose 0.07 dB against the original frames without
    overlap and 0.00 with an overlap of 1, and are 47, 54 and 59 dB from the whole decode with overlaps of 0, 1 and 2
    (`bench/grid_quality.py --width 128`); its decoder is not causal. Classes that hand a cache from frame to frame, or
    whose frames would not fall in place, refuse tiles of frames.
    """

    frames: DimensionTilingConfig = DimensionTilingConfig()
    height: DimensionTilingConfig = DimensionTilingConfig()
    width: DimensionTilingConfig = DimensionTilingConfig()

    def __post_init__(self) -> None:
        for name in DIMS:
            if not isinstance(getattr(self, name), DimensionTilingConfig):
                raise PlanError(f"{name}={getattr(self, name)!r}: give a DimensionTilingConfig, such as {_EXAMPLE}")


_EXAMPLE = DimensionTilingConfig(2, 4)


@dataclass(frozen=True, slots=True)
class DimensionSizeConfig:
    """Tiles of `size` along one dim, each sharing `overlap` with the next: pixels, or frames of the clip.

    Both must be whole latents: multiples of the autoencoder's ratio along that dim (8 pixels and 4 frames, say). The
    last tile is clipped, and grows where it would be thinner than the autoencoder's network takes. Raises PlanError.
    """

    size: int
    overlap: int = 0

    def __post_init__(self) -> None:
        require_whole("size", self.size, least=1)
        require_whole("overlap", self.overlap, least=0)
        if self.overlap >= self.size:
            raise PlanError(f"tiles of {self.size} with an overlap of {self.overlap} do not advance; use less overlap")


@dataclass(frozen=True, slots=True)
class TileSizeConfig:
    """Tiles by size along frames, height and width, in frames and pixels; None leaves a dim whole.

    `TileSizeConfig(frames=DimensionSizeConfig(64, 24), height=DimensionSizeConfig(512, 64))`.
    """

    frames: DimensionSizeConfig | None = None
    height: DimensionSizeConfig | None = None
    width: DimensionSizeConfig | None = None

    def __post_init__(self) -> None:
        for name in DIMS:
            if not isinstance(getattr(self, name), (DimensionSizeConfig, type(None))):
                raise PlanError(f"{name}={getattr(self, name)!r}: give a DimensionSizeConfig(size, overlap), or None")


Tiling = TileCountConfig | TileSizeConfig


def splits_frames(tiling: Tiling) -> bool:
    """Whether `tiling` asks for tiles along frames."""
    return tiling.frames.num_tiles > 1 if isinstance(tiling, TileCountConfig) else tiling.frames is not None


def balanced_tile_split(n: int) -> tuple[int, int]:
    """`n` tiles as (rows, columns), as near to a square as `n` allows, rows at most columns.

    >>> [balanced_tile_split(n) for n in (2, 4, 8, 16, 7)]
    [(1, 2), (2, 2), (2, 4), (4, 4), (1, 7)]
    """
    require_whole("n", n, least=1)
    rows = next(rows for rows in range(isqrt(n), 0, -1) if n % rows == 0)
    return rows, n // rows

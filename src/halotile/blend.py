"""Windows of tiles, and their weighted sum: shared by decoding and denoising."""

from __future__ import annotations

import torch

from halotile.geometry import DimTiling


def windows(tiling: DimTiling, margins: tuple[int, int] = (0, 0)) -> tuple[torch.Tensor, ...]:
    """The blend weights of each tile along one dim: float32, none negative, summing to 1 at every row.

    Each tile is a trapezoid: over the o rows that it shares with a neighbour it rises as 1 / (o + 1), 2 / (o + 1), ...,
    and falls in the same way; at the ends of the dim it stays 1. Where a tile rises and falls at once, the lower of the
    two counts. Divided by their sum at each row, they sum to 1 also where an overlap reaches past the next tile.
    `margins` rows at the beginning and end of a tile, where it was cut, do not count: the ramp is between them.

    Tiles [0, 3) [1, 4) share two rows:

    >>> from halotile.geometry import tile_by_count
    >>> [[round(w, 3) for w in window.tolist()] for window in windows(tile_by_count(4, 2, 2))]
    [[1.0, 0.667, 0.333], [0.333, 0.667, 1.0]]
    """
    shared = (0, *tiling.overlaps, 0)
    raw = [_trapezoid(len(tile), shared[i], shared[i + 1], margins) for i, tile in enumerate(tiling.tiles)]
    total = torch.zeros(tiling.length, dtype=torch.float64)
    for tile, window in zip(tiling.tiles, raw, strict=True):
        total[tile.start : tile.stop] += window
    if not total.all():
        # tiles so short that nothing is left between the margins of some
        return windows(tiling)
    return tuple(
        (window / total[tile.start : tile.stop]).float() for tile, window in zip(tiling.tiles, raw, strict=True)
    )


def _trapezoid(length: int, rising: int, falling: int, margins: tuple[int, int]) -> torch.Tensor:
    rows = torch.arange(length, dtype=torch.float64)
    out = torch.ones(length, dtype=torch.float64)
    before, after = margins
    if rising:
        out = torch.minimum(out, (rows - before + 1) / (rising - before - after + 1))
    if falling:
        out = torch.minimum(out, (length - rows - after) / (falling - before - after + 1))
    return out.clamp(min=0.0)


class Blend:
    """The weighted sum of tiles `B C F H W`, made frame by frame: only frames that are not finished are held.

    `dims` are the tiles' places in the result along frames, height and width, `margins` those of `windows`. Tiles are
    added in row-major order, and after the last one of a row of tiles (those of the same frames) `finish_row` returns
    the frames that no later tile touches. The order, and with it every bit of the result, is that of the grid, however
    the tiles arrive. Multiplying and adding are separate operations, because fused ones round differently for another
    layout of memory. Sums are float32 (float64 for float64 tiles).
    """

    def __init__(
        self,
        dims: tuple[DimTiling, DimTiling, DimTiling],
        margins: tuple[tuple[int, int], ...] = ((0, 0), (0, 0), (0, 0)),
    ) -> None:
        self._frames, self._height, self._width = dims
        self._windows = [windows(dim, margin) for dim, margin in zip(dims, margins, strict=True)]
        self._alone = all(dim.count == 1 for dim in dims)
        self._sum: torch.Tensor | None = None
        self._first = 0
        self._row = 0
        self._place = 0

    @property
    def rows(self) -> int:
        """Rows of tiles: how often `finish_row` returns frames."""
        return self._frames.count

    def add(self, tile: torch.Tensor) -> None:
        """Add the next tile in row-major order; its size is that of its place."""
        row, column = divmod(self._place, self._width.count)
        place = (self._frames.tiles[self._row], self._height.tiles[row], self._width.tiles[column])
        assert tuple(tile.shape[-3:]) == tuple(map(len, place)), f"{tuple(tile.shape)} is not a tile for {place}"
        self._place += 1
        if self._alone:
            self._sum = tile
            return
        dtype = torch.promote_types(tile.dtype, torch.float32)
        if self._sum is None:
            self._sum = self._empty(tile, dtype, self._first, place[0].stop)
        elif self._first + self._sum.shape[-3] < place[0].stop:
            grown = self._empty(tile, dtype, self._first, place[0].stop)
            grown[..., : self._sum.shape[-3], :, :] = self._sum
            self._sum = grown
        along_frames, along_height, along_width = (
            window[i].to(tile.device) for window, i in zip(self._windows, (self._row, row, column), strict=True)
        )
        weights = along_frames[:, None, None] * (along_height[:, None] * along_width)
        here = self._sum[..., place[0].start - self._first : place[0].stop - self._first, :, :]
        here[..., place[1].start : place[1].stop, place[2].start : place[2].stop] += tile.to(dtype) * weights

    def finish_row(self) -> torch.Tensor:
        """The frames that are finished once a row of tiles is in: up to the first one of the next row of tiles."""
        assert self._sum is not None
        assert self._place == self._height.count * self._width.count, f"{self._place} tiles of row {self._row} are in"
        self._row, self._place = self._row + 1, 0
        if self._row == self.rows:
            done, self._sum = self._sum, None
            return done
        stop = self._frames.tiles[self._row].start - self._first
        done = self._sum[..., :stop, :, :]
        # a copy, so that the finished frames do not keep the others alive, or the other way round
        self._sum = self._sum[..., stop:, :, :].clone()
        self._first += stop
        return done

    def _empty(self, tile: torch.Tensor, dtype: torch.dtype, first: int, stop: int) -> torch.Tensor:
        shape = (*tile.shape[:-3], stop - first, self._height.length, self._width.length)
        return torch.zeros(shape, dtype=dtype, device=tile.device)

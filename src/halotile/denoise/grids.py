"""Calls of Wan and HunyuanVideo, which take latents `B C F H W` and cut them into patches themselves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch

from halotile.denoise.calls import Call
from halotile.denoise.layout import Grid
from halotile.denoise.sequences import per_token
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError
from halotile.families.transformers import Transformer


class GridCall(Call):
    """A call whose tokens are patches of a grid of latents. What lies on further channels is cropped with the tile.

    The model counts positions from the first cell of what it is given, so that those of a tile are normalised by
    themselves. Without normalisation its rope makes the positions of the whole grid, and the tile's are taken of them.
    """

    positions = None

    def __init__(
        self,
        row: Transformer,
        cls: type,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        normalize_positions: bool,
    ) -> None:
        super().__init__(row, cls, model, args, kwargs)
        self.normalize_positions = normalize_positions
        self.patch = row.patch(self.inside)
        lengths = self.tokens.shape[2:]
        if len(lengths) != 3 or any(length % patch for length, patch in zip(lengths, self.patch, strict=True)):
            raise PlanError(
                f"{row.name} takes latents B C F H W in patches of {self.patch}, got {tuple(self.tokens.shape)}"
            )
        frames, height, width = (length // patch for length, patch in zip(lengths, self.patch, strict=True))
        self.grid = (frames, height, width)
        self.total = prod(self.grid)

    def own(self) -> torch.Tensor:
        return cells_to_tokens(self.tokens[:, : self.row.channels(self.inside)], self.patch)

    def arguments(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        changed: dict[str, Any] = {"hidden_states": self._crop("hidden_states", self.tokens, tile)}
        for name in self.row.per_cell:
            if self.given.get(name) is not None:
                changed[name] = self._crop(name, self.given[name], tile)
        for name in self.row.per_token:
            if self.given.get(name) is not None:
                changed[name] = per_token(name, self.given[name], tile.kept.to(self.tokens.device), self.total)
        return changed

    def around(self, tile: TokenTile) -> AbstractContextManager[None]:
        if self.normalize_positions:
            return nullcontext()
        return self.other_rope(partial(self._rows_of_whole, tile.kept))

    def _rows_of_whole(self, kept: torch.Tensor, rope: Any, args: Any, kwargs: Any, own: Any) -> Any:
        # only the shape of what it is given is looked at
        whole = self.tokens.new_empty(1).expand(self.tokens.shape)
        return tuple(part.index_select(self.row.rope[1], kept.to(part.device)) for part in rope.forward(whole))

    def as_tokens(self, result: torch.Tensor) -> torch.Tensor:
        return cells_to_tokens(result, self.patch)

    def from_tokens(self, video: torch.Tensor) -> torch.Tensor:
        return tokens_to_cells(video, self.grid, self.patch)

    def _crop(self, name: str, value: Any, tile: TokenTile) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._crop(name, one, tile) for one in value)
        if value.shape[-3:] != self.tokens.shape[-3:]:
            raise PlanError(
                f"{name} of shape {tuple(value.shape)} must have the {tuple(self.tokens.shape[-3:])} frames, rows and "
                "columns of hidden_states"
            )
        region = tuple(
            slice(side.start * patch, side.stop * patch) for side, patch in zip(tile.region, self.patch, strict=True)
        )
        cells = (..., *region)
        return value[cells]


def cells_to_tokens(cells: torch.Tensor, patch: Grid) -> torch.Tensor:
    """`B C F H W` as tokens `B N C*pf*ph*pw`, the cells of one patch in each; nothing is computed."""
    batch, channels, *lengths = cells.shape
    sizes = [size for length, side in zip(lengths, patch, strict=True) for size in (length // side, side)]
    return cells.reshape(batch, channels, *sizes).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def tokens_to_cells(tokens: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
    """The inverse of `cells_to_tokens`."""
    apart = tokens.reshape(tokens.shape[0], *grid, -1, *patch)
    return apart.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)

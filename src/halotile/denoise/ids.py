"""Calls of Flux, whose tokens lie where `img_ids` says: a row (picture, row, column) a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halotile.denoise.layout import Grid
from halotile.denoise.sequences import SequenceCall
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError
from halotile.families.transformers import Transformer


class IdsCall(SequenceCall):
    """A call with `img_ids`, `N 3`. Those whose first number is 0 are generated, and come first, in row-major order.

    Tokens behind them (the reference picture of Kontext has 1 there) are references, which every tile keeps: to the
    tiling their time is negative.
    """

    def __init__(
        self, row: Transformer, cls: type, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(row, cls, model, args, kwargs)
        self.total = self.tokens.shape[1]
        self.ids: torch.Tensor | None = self.given.get("img_ids")
        if self.ids is None or self.ids.shape[-1] != 3 or self.ids.shape[-2] != self.total:
            shape = None if self.ids is None else tuple(self.ids.shape)
            raise PlanError(f"img_ids of {self.total} tokens must be {self.total} 3, got {shape}")
        self.ids = self.ids[0] if self.ids.dim() == 3 else self.ids
        self.grid = grid_of_ids(self.ids)
        self.positions = self._positions(self.ids).expand(self.tokens.shape[0], -1, -1, -1)

    def placed(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        assert positions is not None
        assert self.ids is not None
        picture, row, column = positions[0, :, :, 0]
        # not -picture, which would make -0.0 of the generated ones
        return {"img_ids": torch.stack([0 - picture, row, column], -1).to(self.ids.dtype)}

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        starts = ids.float().T.clone()
        starts[0] = 0 - starts[0]
        _, height, width = self.grid
        # whole numbers: a bfloat16 of img_ids counts no rows beyond 256
        starts[1, : height * width] = torch.arange(height, device=ids.device).repeat_interleave(width)
        starts[2, : height * width] = torch.arange(width, device=ids.device).repeat(height)
        return torch.stack([starts, starts + 1], -1)[None]


def grid_of_ids(ids: torch.Tensor) -> Grid:
    """The grid of the ids whose first number is 0. Raises PlanError when they are not one in row-major order."""
    count = int((ids[:, 0] == 0).long().cumprod(0).sum())
    width = int((ids[:count, 1] == 0).long().cumprod(0).sum())
    height = count // max(width, 1)
    rows = torch.arange(height, device=ids.device).repeat_interleave(width).to(ids.dtype)
    columns = torch.arange(width, device=ids.device).repeat(height).to(ids.dtype)
    complete = count and height * width == count and (ids[count:, 0] > 0).all()
    if not (complete and torch.equal(ids[:count, 1], rows) and torch.equal(ids[:count, 2], columns)):
        raise PlanError(
            f"the {count} img_ids that begin with 0 are not the rows and columns of one picture, in row-major order, "
            "before those of its references; such a sequence cannot be tiled"
        )
    return 1, height, width

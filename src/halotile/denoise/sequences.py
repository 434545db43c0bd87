"""Calls of transformers that take tokens, `B N D`: what is given a token goes to the tiles that have the token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from halotile.denoise.calls import Call
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError


class SequenceCall(Call):
    """A call with tokens in and out. `order` is where each token lies in the model's own sequence; None: as it is."""

    order: torch.Tensor | None = None

    def own(self) -> torch.Tensor:
        return self._ordered(self.tokens[..., : self.row.channels(self.inside)])

    def arguments(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        kept = self.places_of(tile)
        changed: dict[str, Any] = {"hidden_states": self.tokens.index_select(1, kept)}
        for name in self.row.per_token:
            if self.given.get(name) is not None:
                changed[name] = per_token(name, self.given[name], kept, self.total)
        for name in self.row.square:
            if self.given.get(name) is not None:
                changed[name] = per_pair(name, self.given[name], kept, self.total)
        return changed | self.placed(tile, positions)

    def places_of(self, tile: TokenTile) -> torch.Tensor:
        """Where the kept tokens of a tile lie in the model's own sequence, on the device of the tokens."""
        kept = tile.kept.to(self.tokens.device)
        return kept if self.order is None else self.order[kept]

    def from_tokens(self, video: torch.Tensor) -> torch.Tensor:
        return video if self.order is None else video.index_select(1, torch.argsort(self.order))

    def _ordered(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.order is None else tokens.index_select(1, self.order)

    @abstractmethod
    def placed(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        """The arguments that say where the kept tokens lie."""


def per_token(name: str, value: Any, kept: torch.Tensor, total: int) -> Any:
    """The rows of `kept` along dim 1 of a tensor, or of each in a list or tuple.

    A tensor of one dim has one entry a sample, and one with one row holds for all tokens: both stay. So does what is
    no tensor. Raises PlanError for another number of rows than `total`.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(per_token(name, one, kept, total) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return _rows(name, value, 1, kept, total)


def per_pair(name: str, value: torch.Tensor, kept: torch.Tensor, total: int) -> torch.Tensor:
    """The rows and columns of `kept` in the last two dims; a dim of 1 stays. Raises PlanError as `per_token` does."""
    for dim in (value.dim() - 2, value.dim() - 1):
        value = _rows(name, value, dim, kept, total)
    return value


def _rows(name: str, value: torch.Tensor, dim: int, kept: torch.Tensor, total: int) -> torch.Tensor:
    if value.shape[dim] == 1:
        return value
    if value.shape[dim] != total:
        raise PlanError(
            f"{name} of shape {tuple(value.shape)} has {value.shape[dim]} rows along dim {dim}; it must have one for "
            f"each of {total} tokens, or 1"
        )
    return value.index_select(dim, kept.to(value.device))

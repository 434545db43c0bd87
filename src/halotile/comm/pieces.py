"""Delivery of many small results that each have one owner: tiles, not rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from halotile.comm.ranks import Ranks
from halotile.comm.transport import Message


@dataclass(frozen=True)
class Piece:
    """A result before it exists: the rank that makes it, its shape and its dtype."""

    owner: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many values it has."""
        return prod(self.shape)


class Delivery:
    """Every piece on every one of `receivers`; nothing on the other ranks.

    `made` holds this rank's own pieces by their index in `pieces`. All that a rank has for a receiver goes as one
    message of exact size a dtype, so a group of n sends at most n (n - 1) messages. Each piece that is delivered is
    contiguous and has memory of its own, wherever it was made: what follows computes the same bits on every rank.

    Built and delivered in two steps, because whatever can go wrong on one rank alone (a piece of another shape than
    planned, no memory) must do so before the ranks depend on each other's messages.
    """

    def __init__(
        self,
        made: Mapping[int, torch.Tensor],
        pieces: Sequence[Piece],
        ranks: Ranks,
        receivers: Sequence[int],
        device: torch.device,
    ) -> None:
        for index, piece in enumerate(pieces):
            if piece.owner == ranks.rank:
                got = (tuple(made[index].shape), made[index].dtype)
                assert got == (piece.shape, piece.dtype), f"piece {index}: planned {piece}, made {got}"
        self._pieces = pieces
        self._ranks = ranks
        others = [receiver for receiver in receivers if receiver != ranks.rank]
        self._sends: list[Message] = []
        for _, indices in _by_dtype(pieces, ranks.rank):
            if others:
                packed = torch.cat([made[index].reshape(-1) for index in indices])
                self._sends += [(receiver, packed) for receiver in others]
        self._landing: list[tuple[int, list[int], torch.Tensor]] = []
        self._out: dict[int, torch.Tensor] = {}
        if ranks.rank in receivers:
            self._landing = [
                (owner, indices, torch.empty(sum(pieces[i].numel for i in indices), dtype=dtype, device=device))
                for owner in ranks.others
                for dtype, indices in _by_dtype(pieces, owner)
            ]
            self._out = {index: _detached_memory(tensor) for index, tensor in made.items()}
            # nobody sends an empty piece
            self._out |= {
                i: torch.empty(p.shape, dtype=p.dtype, device=device) for i, p in enumerate(pieces) if not p.numel
            }

    def deliver(self) -> dict[int, torch.Tensor]:
        """Send and receive; the pieces by their index, none on a rank that is to have nothing."""
        self._ranks.transport.exchange(self._sends, [(owner, buffer) for owner, _, buffer in self._landing])
        self._sends = []
        out, self._out = self._out, {}
        while self._landing:
            _, indices, buffer = self._landing.pop()
            sizes = [self._pieces[index].numel for index in indices]
            for index, values in zip(indices, torch.split(buffer, sizes), strict=True):
                out[index] = values.clone().reshape(self._pieces[index].shape)
        return out


def _detached_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous; a copy when it is only a part of a larger result, which others may be parts of, too."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor.contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)


def _by_dtype(pieces: Sequence[Piece], owner: int) -> list[tuple[torch.dtype, list[int]]]:
    """The indices of `owner`'s pieces, those of one dtype together, in an order that every rank finds by itself."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.owner == owner and piece.numel:
            groups.setdefault(piece.dtype, []).append(index)
    return list(groups.items())

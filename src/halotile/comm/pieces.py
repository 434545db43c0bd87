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


Strides = tuple[int, ...]


class Delivery:
    """Every piece on every one of `receivers`; nothing on the other ranks.

    `made` holds this rank's own pieces by their index in `pieces`. All that a rank has for a receiver goes as one
    message of exact size a dtype, so a group of n sends at most n (n - 1) messages. Each piece that is delivered has
    memory of its own and lies in it as it did where it was made, since kernels round differently for another layout:
    what follows computes the same bits on every rank. `layouts` says how this rank's pieces lie; `deliver` takes what
    the others said.

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
                if got != (piece.shape, piece.dtype):
                    raise RuntimeError(f"piece {index}: planned {piece}, made {got}")
        self._pieces = pieces
        self._ranks = ranks
        own = {index: _dense(tensor) for index, tensor in made.items()}
        self.layouts = {index: tuple(tensor.stride()) for index, tensor in own.items()}
        others = [receiver for receiver in receivers if receiver != ranks.rank]
        self._sends: list[Message] = []
        for _, indices in _by_dtype(pieces, ranks.rank):
            if others:
                packed = torch.cat([_memory_of(own[index]) for index in indices])
                self._sends += [(receiver, packed) for receiver in others]
        self._landing: list[tuple[int, list[int], torch.Tensor]] = []
        self._out: dict[int, torch.Tensor] = {}
        if ranks.rank in receivers:
            self._landing = [
                (owner, indices, torch.empty(sum(pieces[i].numel for i in indices), dtype=dtype, device=device))
                for owner in ranks.others
                for dtype, indices in _by_dtype(pieces, owner)
            ]
            self._out = own
            # nobody sends an empty piece
            self._out |= {
                i: torch.empty(p.shape, dtype=p.dtype, device=device) for i, p in enumerate(pieces) if not p.numel
            }

    def deliver(self, layouts: Mapping[int, Strides]) -> dict[int, torch.Tensor]:
        """Send and receive; the pieces by their index, none on a rank that is to have nothing."""
        self._ranks.transport.exchange(self._sends, [(owner, buffer) for owner, _, buffer in self._landing])
        self._sends = []
        out, self._out = self._out, {}
        while self._landing:
            _, indices, buffer = self._landing.pop()
            sizes = [self._pieces[index].numel for index in indices]
            for index, values in zip(indices, torch.split(buffer, sizes), strict=True):
                shape = self._pieces[index].shape
                piece = torch.empty_strided(shape, layouts[index], dtype=buffer.dtype, device=buffer.device)
                _memory_of(piece).copy_(values)
                out[index] = piece
        return out


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory of its own without gaps; a contiguous copy when it is only a part of a larger result."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size > 1:
            if stride != reach:
                return tensor.contiguous()
            reach *= size
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        # its memory holds more than this piece, which others may be parts of, too
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor without gaps, in the order of its memory, as a flat view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _by_dtype(pieces: Sequence[Piece], owner: int) -> list[tuple[torch.dtype, list[int]]]:
    """The indices of `owner`'s pieces, those of one dtype together, in an order that every rank finds by itself."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.owner == owner and piece.numel:
            groups.setdefault(piece.dtype, []).append(index)
    return list(groups.items())

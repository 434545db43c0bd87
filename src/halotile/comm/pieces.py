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


def deliver_pieces(
    made: Mapping[int, torch.Tensor],
    pieces: Sequence[Piece],
    ranks: Ranks,
    receivers: Sequence[int],
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Every piece on every one of `receivers`; nothing on the other ranks.

    `made` holds this rank's own pieces by their index in `pieces`. All that a rank has for a receiver goes as one
    message of exact size a dtype, so a group of n sends at most n (n - 1) messages. Each piece that is returned is
    contiguous and has memory of its own, wherever it was made: what follows computes the same bits on every rank.
    """
    for index, tensor in made.items():
        planned = pieces[index]
        assert tuple(tensor.shape) == planned.shape, (
            f"piece {index}: planned {planned.shape}, got {tuple(tensor.shape)}"
        )
        assert tensor.dtype == planned.dtype, f"piece {index}: planned {planned.dtype}, got {tensor.dtype}"
    sends: list[Message] = []
    for dtype, indices in _by_dtype(pieces, ranks.rank):
        if any(receiver != ranks.rank for receiver in receivers):
            packed = torch.cat([made[index].reshape(-1) for index in indices]).to(dtype)
            sends += [(receiver, packed) for receiver in receivers if receiver != ranks.rank]
    if ranks.rank not in receivers:
        ranks.transport.exchange(sends, [])
        return {}
    landing = [
        (owner, indices, torch.empty(sum(pieces[index].numel for index in indices), dtype=dtype, device=device))
        for owner in ranks.others
        for dtype, indices in _by_dtype(pieces, owner)
    ]
    ranks.transport.exchange(sends, [(owner, buffer) for owner, _, buffer in landing])
    out = {index: _detached_memory(tensor) for index, tensor in made.items()}
    # nobody sends an empty piece
    out |= {i: torch.empty(p.shape, dtype=p.dtype, device=device) for i, p in enumerate(pieces) if not p.numel}
    while landing:
        _, indices, buffer = landing.pop()
        sizes = [pieces[index].numel for index in indices]
        for index, values in zip(indices, torch.split(buffer, sizes), strict=True):
            out[index] = values.clone().reshape(pieces[index].shape)
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

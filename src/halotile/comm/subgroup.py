"""The transport protocol among some ranks of a group, over that group's own messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halotile.comm.transport import Board, Exchange, Message, Reduction, Transport


class SubgroupTransport:
    """The transport of `members` (ranks of `whole`, this one among them), numbered 0 to n - 1 in the order given.

    For the time of one call. No process group is made: all ranks of the program would have to take part in that. What
    would be collectives are messages between each two members, for small tensors, and what is added up is added in the
    order of ranks. So their bits do not depend on which ranks of `whole` the members are, nor on how many it has.
    """

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        assert whole.rank in members, (whole.rank, members)
        self._whole = whole
        self._members = tuple(members)
        self.counters = whole.counters
        self.calls = whole.calls
        self.forgotten = whole.forgotten
        self.entered = 0
        self.timeout_s = whole.timeout_s
        self.lost = whole.lost

    @property
    def rank(self) -> int:
        return self._members.index(self._whole.rank)

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def board(self) -> Board:
        return self._whole.board

    def global_rank(self, rank: int) -> int:
        return self._whole.global_rank(self._members[rank])

    @property
    def address(self) -> str:
        return ""

    def meet(self, addresses: Sequence[str]) -> None:
        pass

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives).wait()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], large: bool = False) -> Exchange:
        self.entered += 1
        return self._whole.begin(self._renumbered(sends), self._renumbered(receives), large)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        stacked = torch.stack(self.all_gather(tensor))
        if op == "sum":
            return stacked.sum(0, dtype=tensor.dtype)
        return stacked.amax(0) if op == "max" else stacked.amin(0)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        parts = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.exchange([(rank, own) for rank in others], [(rank, parts[rank]) for rank in others])
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        carried = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.rank == source:
            self.exchange([(rank, carried) for rank in range(self.size) if rank != source], [])
        else:
            self.exchange([], [(source, carried)])
        return carried

    def abort(self, why: str) -> None:
        self.lost = why
        self._whole.abort(why)

    def _renumbered(self, messages: Sequence[Message]) -> list[Message]:
        return [(self._members[rank], tensor) for rank, tensor in messages]

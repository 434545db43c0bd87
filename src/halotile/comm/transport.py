"""What halotile asks of whatever carries its messages: the transport protocol, and the counters of its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from halotile.errors import LostGroupError, MissingRankError

Reduction = Literal["sum", "max", "min"]
Message = tuple[int, torch.Tensor]
"""(group-local rank of the peer, contiguous tensor to send or to receive into)"""


@dataclass
class Counters:
    """Traffic of one rank: messages and bytes that it sent, collectives and agreements that it took part in."""

    messages: int = 0
    bytes_sent: int = 0
    collectives: int = 0

    def since(self, earlier: Counters) -> Counters:
        """The traffic between `earlier` (a `snapshot`) and now."""
        return Counters(
            self.messages - earlier.messages,
            self.bytes_sent - earlier.bytes_sent,
            self.collectives - earlier.collectives,
        )

    def snapshot(self) -> Counters:
        """A copy that later traffic does not change."""
        return Counters(self.messages, self.bytes_sent, self.collectives)

    def sent(self, sends: Sequence[Message]) -> None:
        """Count one batch of outgoing messages."""
        self.messages += len(sends)
        self.bytes_sent += sum(t.numel() * t.element_size() for _, t in sends)


class Board(Protocol):
    """Small shared notes outside the data path: who arrived where, and who failed.

    A rank that waits reads the board and can stop waiting; nothing of it is left in a queue that a later call reads.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a note; an older one under the same key is replaced."""

    def get(self, key: str) -> bytes | None:
        """The note under `key`, or None. Never waits."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 when new) and return its new value, atomically over all ranks."""

    def delete(self, key: str) -> None:
        """Forget a note or a counter; nothing happens when there is none."""


class LinkError(MissingRankError):
    """Messages of this rank, or a collective, ended unfinished: another rank gave up, is gone, or is too late."""


class Exchange(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when all have been sent and received. Must be called, and once only. Raises LinkError."""


class Transport(Protocol):
    """All traffic of one group of ranks. Every rank in here is group-local: 0 to `size` - 1."""

    counters: Counters
    calls: int
    """How many calls this rank has begun: the number of the next one."""
    forgotten: int
    """The notes of calls before this one are off the board."""
    entered: int
    """How many exchanges and collectives this rank has begun; the same on all ranks at one point of their work."""
    timeout_s: float
    """How long one of them may take; the call under way sets it."""
    lost: str | None
    """How the group was lost, if it was."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    def board(self) -> Board:
        """The group's notes."""

    def global_rank(self, rank: int) -> int:
        """The number by which the whole program knows group-local `rank`."""

    @property
    def address(self) -> str:
        """Where this rank can be reached other than by the group's messages; empty where it cannot."""

    def meet(self, addresses: Sequence[str]) -> None:
        """All ranks are here, and this is what each said: they may connect."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """One batch of point-to-point messages of exact size; returns when all have been sent and received.

        Several messages between the same two ranks arrive in the order of the lists. Empty tensors are not sent: both
        sides leave them out, since both know the sizes.
        """

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], large: bool = False) -> Exchange:
        """The messages of `exchange`, started and left under way: none of the tensors may be touched before `wait`.

        `large`, said by both ends of a message alike: together they are too much to be held twice.
        """

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """The elementwise reduction over all ranks, the same bits on each."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks (equal shapes), in rank order."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """`source`'s tensor on every rank; the others pass one of the same shape and dtype."""

    def abort(self, why: str) -> None:
        """Give the group up: no rank of it waits any longer, and its traffic raises from now on. Never raises."""


def check_not_lost(transport: Transport) -> None:
    """Raise LostGroupError if the group of `transport` was given up."""
    if transport.lost is not None:
        raise LostGroupError(
            f"this group was lost in an earlier call ({transport.lost}), and its connections are closed, so that no "
            "rank waits for ever; make a new one on all ranks (torch.distributed.new_group) and pass that"
        )


def without_empty(messages: Sequence[Message]) -> list[Message]:
    """`messages` without the empty ones."""
    return [(peer, tensor) for peer, tensor in messages if tensor.numel()]

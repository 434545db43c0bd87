"""The transport protocol between threads of one process: ranks without processes, for tests and scaling studies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from halotile.comm.transport import (
    Board,
    Counters,
    Exchange,
    LinkError,
    Message,
    Reduction,
    check_not_lost,
    without_empty,
)
from halotile.errors import MissingRankError, PlanError

T = TypeVar("T")


class VirtualGroup:
    """The shared state of `size` virtual ranks: mailboxes, a meeting place and a board."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        if size < 1:
            raise PlanError(f"a group needs at least 1 rank, got {size}")
        self.size = size
        self.timeout_s = timeout_s
        self.board = MemoryBoard()
        self._mailboxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor | None]] = {}
        self._lock = threading.Lock()
        self.slots: list[torch.Tensor | None] = [None] * size
        self.meeting = threading.Barrier(size)
        self._broken = False

    def mailbox(self, source: int, target: int, call: int) -> queue.SimpleQueue[torch.Tensor | None]:
        """Where messages wait; one a call, so that those of a call left half-way never enter a later one."""
        with self._lock:
            box = self._mailboxes.setdefault((source, target, call), queue.SimpleQueue())
            if self._broken:
                box.put(None)
            return box

    def break_off(self) -> None:
        """End all waits: a mailbox with None in it is closed."""
        self.meeting.abort()
        with self._lock:
            self._broken = True
            for box in self._mailboxes.values():
                box.put(None)

    def transport(self, rank: int) -> VirtualTransport:
        """The transport of one of the group's ranks."""
        return VirtualTransport(self, rank)


class VirtualTransport:
    """One virtual rank's view of its group. A program's own numbering does not exist: ranks are their own."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.counters = Counters()
        self.calls = 0
        self.forgotten = 0
        self.entered = 0
        self.timeout_s = group.timeout_s
        self.lost: str | None = None
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def board(self) -> Board:
        return self.group.board

    def global_rank(self, rank: int) -> int:
        return rank

    @property
    def address(self) -> str:
        return ""

    def meet(self, addresses: Sequence[str]) -> None:
        pass

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives).wait()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], large: bool = False) -> Exchange:
        check_not_lost(self)
        self.entered += 1
        sends, receives = without_empty(sends), without_empty(receives)
        assert all(tensor.is_contiguous() for _, tensor in (*sends, *receives)), "a message must be contiguous"
        for peer, tensor in sends:
            self.group.mailbox(self.rank, peer, self.calls).put(tensor.detach().clone())
        self.counters.sent(sends)
        return _Awaited(self, receives, self.calls)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        stacked = torch.stack(self.all_gather(tensor))
        if op == "sum":
            return stacked.sum(0, dtype=tensor.dtype)
        return stacked.amax(0) if op == "max" else stacked.amin(0)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not tensor.numel():
            return [tensor.clone() for _ in range(self.size)]
        check_not_lost(self)
        self.entered += 1
        self.counters.collectives += 1
        self.group.slots[self.rank] = tensor.detach().clone()
        self._meet()
        parts = [part.clone() for part in self.group.slots if part is not None]
        self._meet()
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self.all_gather(tensor)[source]

    def abort(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self.group.break_off()

    @property
    def patience_s(self) -> float:
        """How long a wait may take."""
        return min(self.timeout_s, self.group.timeout_s)

    def _meet(self) -> None:
        try:
            self.group.meeting.wait(self.patience_s)
        except threading.BrokenBarrierError:
            raise LinkError(f"rank {self.rank} waited for the other ranks of a collective") from None


@dataclass(frozen=True)
class _Awaited:
    transport: VirtualTransport
    receives: Sequence[Message]
    call: int

    def wait(self) -> None:
        group, rank = self.transport.group, self.transport.rank
        for peer, buffer in self.receives:
            try:
                arrived = group.mailbox(peer, rank, self.call).get(timeout=self.transport.patience_s)
            except queue.Empty:
                raise LinkError(f"rank {rank} waited for a message of rank {peer}") from None
            if arrived is None:
                raise LinkError(f"rank {rank} waited for rank {peer} when the group was given up")
            assert arrived.shape == buffer.shape, f"planned {tuple(buffer.shape)}, got {tuple(arrived.shape)}"
            assert arrived.dtype == buffer.dtype, f"planned {buffer.dtype}, got {arrived.dtype}"
            buffer.copy_(arrived)


class MemoryBoard:
    """The board in the memory of one process."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._notes[key] = value

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._notes.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]

    def delete(self, key: str) -> None:
        with self._lock:
            self._notes.pop(key, None)
            self._counts.pop(key, None)


def run_virtual(size: int, work: Callable[[VirtualTransport], T], timeout_s: float = 60.0) -> list[T]:
    """Run `work` on `size` virtual ranks and return what each returned, in rank order.

    A rank's exception ends the waits of the others, and is raised here; the lowest rank's first.
    """
    group = VirtualGroup(size, timeout_s)

    def one(rank: int) -> T:
        try:
            return work(group.transport(rank))
        except BaseException:
            group.break_off()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="virtual-rank") as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # the first cause, not the ranks that only waited for it
        raise next((error for error in errors if not isinstance(error, (MissingRankError, LinkError))), errors[0])
    return [future.result() for future in futures]

"""The transport protocol over a `torch.distributed` process group (gloo, NCCL)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from halotile.comm.host_links import HostLinks, Posted, is_for_memory
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
from halotile.errors import MembershipError

_NOBODY = 2**31 - 1
"""A tag that no message has."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchTransport:
    """A process group's transport. Use `TorchTransport.of`: calls are numbered, so a group has just one."""

    # neither keeps a group alive that its program has destroyed
    _of_group: ClassVar[WeakKeyDictionary[dist.ProcessGroup, TorchTransport]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self.counters = Counters()
        self.calls = 0
        self.forgotten = 0
        self.entered = 0
        self.timeout_s = 300.0
        self.lost: str | None = None
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._board = StoreBoard(group)
        self._links = HostLinks(self._rank, self._size)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TorchTransport:
        """The one transport of `group`. Raises MembershipError when this process is not a member of it."""
        if not isinstance(group, (dist.ProcessGroup, int)):
            raise MembershipError(f"a group must be a torch.distributed process group, got {group!r}")
        # new_group hands an int to the processes it leaves out
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise MembershipError(
                f"process {dist.get_rank()} of {dist.get_world_size()} is not a member of the group it passed; "
                "only the group's members may make this call"
            )
        if group not in cls._of_group:
            cls._of_group[group] = cls(group)
        return cls._of_group[group]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises MembershipError when it is no more: to torch, no group would mean the world."""
        group = self._group()
        if group is None:
            raise MembershipError("the process group of this call was destroyed; make a new one, and parallelize again")
        return group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def board(self) -> Board:
        return self._board

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    @property
    def address(self) -> str:
        return "" if self.size == 1 or self._wire_device(torch.device("cpu")).type != "cpu" else self._links.address

    def meet(self, addresses: Sequence[str]) -> None:
        self._links.connect(addresses)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives).wait()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], large: bool = False) -> Exchange:
        check_not_lost(self)
        self.entered += 1
        sends, receives = without_empty(sends), without_empty(receives)
        if not sends and not receives:
            return _UnderWay(self, [], None, [], [])
        # a message of a call that was left half-way must not match one of a later call
        tag = self.calls
        landed = [(peer, buffer, self._on_wire(buffer, empty=True)) for peer, buffer in receives]
        wires = [(peer, self._on_wire(tensor)) for peer, tensor in sends]
        self.counters.sent(sends)
        moves = [(buffer, wire) for _, buffer, wire in landed if wire is not buffer]
        arriving = [(peer, wire) for peer, _, wire in landed]
        posted = None
        if self._links.connected and not large:
            here = [[message for message in way if is_for_memory(message[1])] for way in (wires, arriving)]
            posted = self._links.post(tag, *here)
            wires, arriving = ([m for m in way if not is_for_memory(m[1])] for way in (wires, arriving))
            if not wires and not arriving:
                return _UnderWay(self, [], posted, moves, [])
        ops = [dist.P2POp(dist.isend, wire, group=self.group, tag=tag, group_peer=peer) for peer, wire in wires]
        ops += [dist.P2POp(dist.irecv, wire, group=self.group, tag=tag, group_peer=peer) for peer, wire in arriving]
        with _linked():
            works = dist.batch_isend_irecv(ops)
        return _UnderWay(self, works, posted, moves, [wire for _, wire in (*wires, *arriving)])

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        if not tensor.numel():
            return tensor.clone()
        wire = self._on_wire(tensor.detach().clone(memory_format=torch.contiguous_format))
        with self._collective():
            self.finish(dist.all_reduce(wire, op=_OPS[op], group=self.group, async_op=True), wire)
        return wire.to(tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        # gloo ends the process with SIGFPE when it is given an empty tensor
        if not tensor.numel():
            return [tensor.clone() for _ in range(self.size)]
        wire = self._on_wire(tensor.detach().contiguous())
        parts = [torch.empty_like(wire) for _ in range(self.size)]
        if self._links.connected and is_for_memory(wire):
            with self._collective():
                others = [rank for rank in range(self.size) if rank != self.rank]
                parts[self.rank].copy_(wire)
                messages = [(rank, wire) for rank in others], [(rank, parts[rank]) for rank in others]
                self._links.wait(self._links.post(self.calls, *messages), self.timeout_s)
            return [part.to(tensor.device) for part in parts]
        with self._collective():
            self.finish(dist.all_gather(parts, wire, group=self.group, async_op=True), wire)
        return [part.to(tensor.device) for part in parts]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if not tensor.numel():
            return tensor.clone()
        wire = self._on_wire(tensor.detach().clone(memory_format=torch.contiguous_format))
        with self._collective():
            self.finish(dist.broadcast(wire, src=self.global_rank(source), group=self.group, async_op=True), wire)
        return wire.to(tensor.device)

    def abort(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        self._links.close()
        group = self._group()
        if group is None or self.size == 1:
            return
        backends = dist.get_backend_config(group)
        with suppress(Exception):
            if "nccl" in backends:
                group._get_backend(torch.device("cuda")).abort()
        with suppress(Exception):
            if "gloo" in backends:
                # gloo closes all connections of a group when a wait on one of them ends in vain, and with that ends
                # the waits of its other ranks; its own abort leaves them waiting
                lonely = dist.irecv(torch.empty(1), group=group, group_src=(self.rank + 1) % self.size, tag=_NOBODY)
                assert lonely is not None
                lonely.wait(timedelta(milliseconds=1))

    def finish(self, work: dist.Work | None, carried: torch.Tensor) -> None:
        """Wait for what carries a tensor, no longer than the timeout where the wait is the host's."""
        assert work is not None
        if carried.device.type == "cpu":
            work.wait(timedelta(seconds=self.timeout_s))
        else:
            # NCCL queues the wait on the stream; with a timeout it would hold the host, and has a watchdog of its own
            work.wait()

    def land(self, posted: Posted) -> None:
        """Wait for messages by way of this machine's memory."""
        self._links.wait(posted, self.timeout_s)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        check_not_lost(self)
        self.entered += 1
        with _linked():
            yield
        self.counters.collectives += 1

    def _on_wire(self, tensor: torch.Tensor, empty: bool = False) -> torch.Tensor:
        """`tensor`, or its stand-in on a device that the group's backends carry."""
        device = self._wire_device(tensor.device)
        if device.type == tensor.device.type:
            return tensor
        return torch.empty_like(tensor, device=device) if empty else tensor.to(device)

    def _wire_device(self, device: torch.device) -> torch.device:
        # reads like "cpu:gloo,cuda:nccl"
        backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(self.group).split(","))
        if device.type == "cpu" and "cpu" not in backends:
            return torch.device(next(iter(backends)))
        # gloo lists cuda, but does point-to-point on CPU tensors only
        return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


@contextmanager
def _linked() -> Iterator[None]:
    """What a backend raises, as LinkError."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(str(error)) from error


@dataclass(frozen=True)
class _UnderWay:
    transport: TorchTransport
    works: list[dist.Work]
    posted: Posted | None
    moves: list[tuple[torch.Tensor, torch.Tensor]]
    carried: list[torch.Tensor]
    """what is being sent and received, kept alive until it is"""

    def wait(self) -> None:
        with _linked():
            for work in self.works:
                self.transport.finish(work, self.carried[0])
        if self.posted is not None:
            self.transport.land(self.posted)
        for buffer, wire in self.moves:
            buffer.copy_(wire)


class StoreBoard:
    """The board in the key-value store by which the processes found each other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # torch has no public way to the store of a running program; torchelastic and DeviceMesh use the same name
        default = distributed_c10d._get_default_store()
        members = "-".join(str(rank) for rank in dist.get_process_group_ranks(group))
        prefix = f"halotile/{group.group_name}/{members}"
        # a program may end its groups and make others of the same name over the same store: torchrun keeps one
        life = default.add(f"{prefix}/lives/{dist.get_rank(group)}", 1)
        self._store = distributed_c10d.PrefixStore(f"{prefix}/{life}", default)
        self._store.set_timeout(timedelta(seconds=60))

    def set(self, key: str, value: bytes) -> None:
        # a store waits for ever for an empty value
        self._store.set(key, b"=" + value)  # type: ignore[arg-type]  # bytes are accepted and kept as they are

    def get(self, key: str) -> bytes | None:
        return bytes(self._store.get(key))[1:] if self._store.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

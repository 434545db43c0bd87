"""The two ends of a `Mailbox`. Each producer has a socket: tensors go one way, acknowledgements the other."""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from halotile.comm.parcel import Parcel, collect
from halotile.errors import MissingRankError, PlanError

Check = Callable[[], None]
"""Called now and then while an end of the mailbox waits; what it raises ends the wait."""
LOOK_S = 0.05
_HELLO_S = 2.0
_CLOSED = "has closed its end"

Letter = tuple[int, int, torch.Tensor | tuple[torch.Tensor, ...]]
"""(rank that sent it, its index, the tensor: a tuple where several were sent)"""


class Producer:
    """The sending end of one rank. Not for several threads."""

    def __init__(self, link: Connection[Any, Any], token: bytes, rank: int, timeout_s: float, in_flight: int) -> None:
        self.rank = rank
        self._link = link
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        # what is on its way, and the memory that must live until it has been taken
        self._on_its_way: deque[torch.Tensor | None] = deque()
        with self._to_consumer():
            link.send_bytes(token + str(rank).encode())

    def send(
        self, job: int, index: int, tensor: torch.Tensor | Sequence[torch.Tensor], check: Check | None = None
    ) -> None:
        """Send one tensor, or several of one device in one message, as `index` of `job`. They may be changed then.

        Waits when `in_flight` messages have not been taken yet. Raises MissingRankError when the consumer has ended, or
        takes nothing for `timeout_s`.
        """
        tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
        if len({part.device for part in tensors}) > 1:
            raise PlanError(f"the tensors of one message lie on {', '.join(str(part.device) for part in tensors)}")
        self._wait_until_fewer_than(self._in_flight, check)
        with self._to_consumer():
            header = (job, index, isinstance(tensor, torch.Tensor))
            with Parcel(header, tensors, keep_device=True) as parcel:
                parcel.send(self._link)
            self._on_its_way.append(parcel.kept)

    def close(self) -> None:
        """Say that nothing follows. What was sent still arrives; memory on CUDA is kept until it has been taken."""
        if self._link.closed:
            return
        try:
            with suppress(MissingRankError):
                if any(kept is not None for kept in self._on_its_way):
                    self._wait_until_fewer_than(1, None)
                with self._to_consumer(), Parcel(None) as goodbye:
                    goodbye.send(self._link)
        finally:
            self._link.close()
            self._on_its_way.clear()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_fewer_than(self, limit: int, check: Check | None) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._count(0) >= limit:
            if self._count(LOOK_S) < limit:
                return
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise MissingRankError(
                    f"rank {self.rank} waited {self._timeout_s:g} s for the consumer of its mailbox, which has not "
                    f"taken {len(self._on_its_way)} of its messages"
                )

    def _count(self, patience_s: float) -> int:
        """How many messages are on their way, once those are let go of that have been taken."""
        with self._to_consumer():
            while self._on_its_way and self._link.poll(patience_s):
                self._link.recv_bytes()
                self._on_its_way.popleft()
                patience_s = 0
        return len(self._on_its_way)

    @contextmanager
    def _to_consumer(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError, BlockingIOError) as error:
            raise MissingRankError(f"the consumer of rank {self.rank}'s mailbox has ended ({error})") from error


class Consumer:
    """The receiving end. Not for several threads."""

    def __init__(
        self,
        listener: socket.socket,
        path: Path | None,
        token: bytes,
        ranks: Collection[int],
        timeout_s: float,
        device: torch.device | None,
    ) -> None:
        self.ranks = tuple(ranks)
        self._listener = listener
        self._path = path
        self._token = token
        self._timeout_s = timeout_s
        self._device = device
        self._links: dict[int, Connection[Any, Any]] = {}
        self._ended: dict[int, str] = {}
        self._arrived: defaultdict[int, deque[Letter]] = defaultdict(deque)
        self._job = -1

    def receive(self, job: int, owing: Collection[int] | None = None, check: Check | None = None) -> Letter:
        """The next message of `job`, of whichever rank; those of earlier jobs are dropped, those of later ones kept.

        Job numbers grow. `owing` are the ranks that still have to send something for this job: when one of them has
        ended without it, or none sends anything for `timeout_s`, MissingRankError names it. None is all that have not
        closed their ends. On CPU the tensor lies in shared memory, which is freed with it.
        """
        if job < self._job:
            raise PlanError(f"job {job} comes after job {self._job} in this mailbox; the numbers of jobs must grow")
        self._job = job
        deadline = time.monotonic() + self._timeout_s
        while True:
            letter = self._next(job)
            if letter is not None:
                return letter
            owed = owing or [rank for rank in self.ranks if self._ended.get(rank) != _CLOSED] or self.ranks
            gone = [f"rank {rank} {self._ended[rank]}" for rank in owed if rank in self._ended]
            if gone:
                raise MissingRankError(f"job {job} of this mailbox cannot be finished: {', '.join(gone)}")
            if time.monotonic() > deadline:
                silent = [f"rank {rank} {'is silent' if rank in self._links else 'never came'}" for rank in owed]
                raise MissingRankError(
                    f"waited {self._timeout_s:g} s in job {job} of this mailbox: {', '.join(silent)}"
                )
            self._take()
            if check is not None:
                check()

    def close(self) -> None:
        """End it: producers that send from now on get MissingRankError."""
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._arrived.clear()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, job: int) -> Letter | None:
        for earlier in [number for number in self._arrived if number < job]:
            for rank, _, _ in self._arrived.pop(earlier):
                self._acknowledge(rank)
        letters = self._arrived.get(job)
        if not letters:
            return None
        letter = letters.popleft()
        self._acknowledge(letter[0])
        return letter

    def _acknowledge(self, rank: int) -> None:
        if rank in self._links:
            # it may have ended, which its own link says when all of it has been read
            with suppress(OSError):
                self._links[rank].send_bytes(b"+")

    def _take(self) -> None:
        """Wait a moment for new producers and messages: one message of each that has some."""
        ranks = {link: rank for rank, link in self._links.items()}
        for ready in wait([self._listener, *ranks], LOOK_S):
            if isinstance(ready, Connection):
                self._read(ranks[ready], ready)
            else:
                self._admit()

    def _admit(self) -> None:
        end, _ = self._listener.accept()
        link = linked(end, self._timeout_s)
        try:
            # a producer says it at once; nothing of a stranger is waited for or unpickled
            hello = link.recv_bytes(maxlength=64) if link.poll(_HELLO_S) else b""
        except (EOFError, OSError):
            hello = b""
        if not hmac.compare_digest(hello[:16], self._token):
            link.close()
            return
        rank = int(hello[16:])
        if rank in self._links:
            self._links.pop(rank).close()
        self._links[rank] = link
        self._ended.pop(rank, None)

    def _read(self, rank: int, link: Connection[Any, Any]) -> None:
        try:
            header, tensors = collect(link, self._device)
        except (EOFError, OSError, RuntimeError) as error:
            # on CUDA the memory of a message ends with its producer
            self._end(rank, f"ended in the midst of its work ({error or type(error).__name__})")
            return
        if header is None:
            self._end(rank, _CLOSED)
            return
        job, index, single = header
        self._arrived[job].append((rank, index, tensors[0] if single else tuple(tensors)))

    def _end(self, rank: int, how: str) -> None:
        self._ended[rank] = how
        self._links.pop(rank).close()


def linked(end: socket.socket, timeout_s: float) -> Connection[Any, Any]:
    """A connected socket as a link in which no message waits for ever half-way: the other process may stand still."""
    # a program may have set a default timeout for its sockets
    end.settimeout(None)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6)))
    return Connection(end.detach())

"""How finished tiles get to the driver of a stream: the protocol, and the group's own point-to-point messages."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist

from halotile.comm import Call, Exchange, LinkError, Message, TorchTransport
from halotile.errors import MissingRankError

_MAX_PAUSE_S = 0.005


class TileLink(Protocol):
    """Carries finished tiles from the ranks that make them to the driver; a tile goes by its index in the grid."""

    @property
    def closed(self) -> bool:
        """Whether the driver wants no more."""

    def send(self, index: int, tile: torch.Tensor) -> None:
        """Hand tile `index` over, contiguous, and return at once: never waits for the driver."""

    def expect(self, indices: Sequence[int]) -> None:
        """On the driver: these may come now, in the background. Does not wait."""

    def receive(self) -> tuple[int, torch.Tensor]:
        """On the driver: the next tile to come, among those expected. Raises when a rank failed or is missing."""

    def close(self) -> None:
        """On the driver: no more tiles are wanted."""


class GroupLink:
    """Tiles as exact-size messages of the group itself, each announced on the board once it is on its way.

    The driver asks for a tile only when it is announced, so that no wait of its is in vain when a rank fails, and the
    group stays usable. It asks for no more than it expects, so what it holds is bounded by that; what is not asked for
    stays with the rank that made it, which keeps at most its share of the result until the driver has taken it.
    """

    def __init__(self, call: Call, owners: Sequence[int], driver: int, device: torch.device) -> None:
        self._call = call
        self._ranks = call.ranks
        self._board = call.ranks.transport.board
        self._driver = driver
        self._device = device
        self._coming = {
            peer: deque(index for index, owner in enumerate(owners) if owner == peer) for peer in self._ranks.others
        }
        self._own = [index for index, owner in enumerate(owners) if owner == self._ranks.rank]
        self._expected: set[int] = set()
        self._under_way: dict[int, tuple[int, Exchange, torch.Tensor]] = {}
        self._sent: deque[Exchange] = deque()
        self._acknowledged = 0

    @property
    def closed(self) -> bool:
        return self._board.get(self._key("closed")) is not None

    def send(self, index: int, tile: torch.Tensor) -> None:
        exchange = self._begin([(self._driver, tile)], [])
        self._sent.append(exchange)
        self._board.set(self._key(f"tile/{index}"), json.dumps([list(tile.shape), str(tile.dtype)]).encode())
        self._board.add(self._key("made"), 1)
        self._reap()

    def expect(self, indices: Sequence[int]) -> None:
        self._expected.update(indices)
        self._ask()

    def receive(self) -> tuple[int, torch.Tensor]:
        pause, made, deadline = 0.0002, -1, time.monotonic() + self._ranks.timeout_s
        while True:
            self._ask()
            if self._under_way:
                return self._land()
            self._call.check()
            now_made = self._board.add(self._key("made"), 0)
            if now_made != made:
                # a rank that still finishes tiles is late, not lost
                made, deadline = now_made, time.monotonic() + self._ranks.timeout_s
            if time.monotonic() > deadline:
                raise MissingRankError(self._who_is_missing())
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_PAUSE_S)

    def close(self) -> None:
        with suppress(LinkError):
            # these are on their way, and must not meet a later call
            while self._under_way:
                self._land()
        self._board.set(self._key("closed"), b"")
        if any(self._coming.values()):
            self._give_up_if_stuck()

    def wait_for_peers(self, drew: bool) -> bool:
        """On a rank that has sent its tiles: wait until all but the driver have; whether any of them drew noise."""
        self._board.set(self._key(f"ended/{self._ranks.rank}"), b"drew" if drew else b"")
        waiting = [rank for rank in self._ranks.others if rank != self._driver]
        pause, made, deadline = 0.0002, -1, time.monotonic() + self._ranks.timeout_s
        while waiting and not self.closed:
            notes = {rank: self._board.get(self._key(f"ended/{rank}")) for rank in waiting}
            drew |= b"drew" in notes.values()
            waiting = [rank for rank, note in notes.items() if note is None]
            self._call.check()
            now_made = self._board.add(self._key("made"), 0)
            if now_made != made:
                made, deadline = now_made, time.monotonic() + self._ranks.timeout_s
            if time.monotonic() > deadline:
                raise MissingRankError(self._missing(waiting))
            if waiting:
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_PAUSE_S)
        # a driver that failed, or saw another fail, has closed the stream as well
        self._call.check()
        return drew

    def linger(self) -> None:
        """Wait until the driver has this rank's tiles, closes the stream or fails, no longer than the timeout."""
        deadline = time.monotonic() + self._ranks.timeout_s
        while self._sent and time.monotonic() < deadline and not self.closed:
            self._call.check()
            self._reap()
            time.sleep(_MAX_PAUSE_S)

    def forget(self) -> None:
        if self._sent:
            self._give_up_if_stuck()
        self._sent.clear()
        names = [f"taken/{self._ranks.rank}", f"ended/{self._ranks.rank}", *(f"tile/{index}" for index in self._own)]
        for name in [*names, "made", "closed"] if self._ranks.rank == self._driver else names:
            self._board.delete(self._key(name))

    def _ask(self) -> None:
        """Start to receive what is expected and announced; tiles of one rank come in their order."""
        for peer, coming in self._coming.items():
            while coming and coming[0] in self._expected:
                note = self._board.get(self._key(f"tile/{coming[0]}"))
                if note is None:
                    break
                shape, dtype = json.loads(note)
                buffer = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._device)
                exchange = self._begin([], [(peer, buffer)])
                self._under_way[coming.popleft()] = (peer, exchange, buffer)

    def _begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Messages of the stream's call, also where this rank has begun a later one, and was refused."""
        transport = self._ranks.transport
        calls, transport.calls = transport.calls, self._call.number + 1
        try:
            return transport.begin(sends, receives)
        finally:
            transport.calls = calls

    def _land(self) -> tuple[int, torch.Tensor]:
        index = next(iter(self._under_way))
        peer, exchange, buffer = self._under_way.pop(index)
        exchange.wait()
        self._expected.discard(index)
        self._board.add(self._key(f"taken/{peer}"), 1)
        return index, buffer

    def _reap(self) -> None:
        """Let go of the tiles that the driver has: waiting for them takes no time any more."""
        taken = self._board.add(self._key(f"taken/{self._ranks.rank}"), 0)
        while self._acknowledged < taken:
            self._sent.popleft().wait()
            self._acknowledged += 1

    def _give_up_if_stuck(self) -> None:
        """NCCL cannot take back a message that nobody will receive: its stream would wait for ever."""
        transport = self._ranks.transport
        if self._device.type != "cuda" or not isinstance(transport, TorchTransport):
            return
        if "nccl" in dist.get_backend_config(transport.group):
            transport.abort(f"call {self._call.number}: a stream was left before its end")

    def _who_is_missing(self) -> str:
        late = sorted({peer for peer, coming in self._coming.items() if coming and coming[0] in self._expected})
        return self._missing(late)

    def _missing(self, ranks: Sequence[int]) -> str:
        names = ", ".join(f"{rank} (global rank {self._ranks.global_rank(rank)})" for rank in ranks)
        return (
            f"rank {self._ranks.rank} waited {self._ranks.timeout_s:g} s in call {self._call.number} for tiles of "
            f"ranks {names}, which made none meanwhile"
        )

    def _key(self, name: str) -> str:
        return f"{self._call.number}/stream/{name}"

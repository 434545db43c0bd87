"""Tiles of a stream through a `Mailbox`: shared memory between the processes of one machine, not the group's links."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch

from halotile.comm import Call, Consumer, Mailbox
from halotile.decode.link import GroupLink
from halotile.errors import HalotileError, MissingRankError


class MailboxLink(GroupLink):
    """A `TileLink` whose tiles go through a mailbox; what else ranks tell each other is on the board, as in its base.

    A thread hands the tiles over, so that a rank does not wait for the driver: it keeps at most its share of the result
    until the driver has taken it. The driver keeps tiles that come before they are expected: a fast rank may be a row
    ahead.
    """

    def __init__(self, call: Call, owners: Sequence[int], driver: int, device: torch.device, mailbox: Mailbox) -> None:
        super().__init__(call, owners, driver, device)
        self._mailbox = mailbox
        self._early: dict[int, torch.Tensor] = {}
        self._owed = {peer: len(coming) for peer, coming in self._coming.items() if coming}
        self._tiles: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        self._failure: HalotileError | None = None
        self._inbox: Consumer | None = None
        self._thread: threading.Thread | None = None
        if self._ranks.rank == driver and self._owed:
            self._inbox = mailbox.consumer(tuple(self._owed), device)

    def send(self, index: int, tile: torch.Tensor) -> None:
        if self._failure is not None and not self.closed:
            raise self._failure
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand_over, name="halotile tiles", daemon=True)
            self._thread.start()
        self._tiles.put((index, tile))
        self._board.add(self._key("made"), 1)

    def expect(self, indices: Sequence[int]) -> None:
        self._expected.update(indices)

    def receive(self) -> tuple[int, torch.Tensor]:
        assert self._inbox is not None
        while not (ready := self._expected & self._early.keys()):
            owing = [peer for peer, count in self._owed.items() if count]
            peer, index, tile = self._inbox.receive(self._call.number, owing, self._call.check)
            assert isinstance(tile, torch.Tensor)
            self._owed[peer] -= 1
            self._early[index] = tile
        index = min(ready)
        self._expected.discard(index)
        return index, self._early.pop(index)

    def wait_for_peers(self, drew: bool) -> bool:
        self._tiles.put(None)
        return super().wait_for_peers(drew)

    def close(self) -> None:
        self._board.set(self._key("closed"), b"")
        self._early.clear()
        if self._inbox is not None:
            self._inbox.close()

    def linger(self) -> None:
        deadline = time.monotonic() + self._ranks.timeout_s
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._call.check()
            self._thread.join(0.05)

    def forget(self) -> None:
        if self._thread is not None:
            # the driver is past the stream: it has all tiles, or has closed its end
            self._tiles.put(None)
            self._thread.join(self._ranks.timeout_s)
        super().forget()

    def _hand_over(self) -> None:
        try:
            with self._mailbox.producer(self._ranks.rank) as out:
                while (item := self._tiles.get()) is not None:
                    out.send(self._call.number, *item, check=self._stop_if_closed)
        except HalotileError as error:
            # told to the rank by its next tile, or by the driver
            self._failure = error

    def _stop_if_closed(self) -> None:
        closed = True
        with suppress(Exception):
            closed = self.closed
        if closed:
            raise MissingRankError("the driver has closed the stream")

"""`Mailbox`: tensors from several processes of one machine to one of them, without a process group.

Each producer has a socket of its own to the consumer, not one queue with a lock: a producer that is killed takes no
lock with it, leaves nobody's message torn but its own, and its end is seen at once.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from halotile.comm.mailbox_ends import LOOK_S, Consumer, Producer, linked
from halotile.comm.ranks import DEFAULT_TIMEOUT_S
from halotile.errors import MissingRankError, PlanError, UnsupportedError


class Mailbox:
    """A mailbox that processes of one machine share: several producers, one consumer.

    Make one anywhere and hand it to the others (it pickles, to spawned processes and over a store). It holds nothing
    until an end of it is opened: `producer(rank)` in each process that sends, `consumer(ranks)` in the one that
    receives.

    timeout_s: how long an end waits for the other. in_flight: how many messages of one producer may be on their way; it
    waits when there are more. Raises PlanError for numbers that cannot be, UnsupportedError without Unix sockets.

    Example:
        box = Mailbox()
        # in the process of rank 2
        with box.producer(2) as out:
            out.send(job=0, index=5, tensor=tile)
        # in the driver's
        with box.consumer(ranks=[1, 2, 3]) as inbox:
            rank, index, tile = inbox.receive(job=0)
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, in_flight: int = 8) -> None:
        if not 0 < timeout_s < math.inf or in_flight < 1:
            raise PlanError(f"timeout_s={timeout_s} and in_flight={in_flight} must be positive, and finite")
        if not hasattr(socket, "AF_UNIX"):
            raise UnsupportedError("a mailbox needs Unix sockets, which this system does not have")
        self.timeout_s = timeout_s
        self.in_flight = in_flight
        name = f"halotile-{secrets.token_hex(8)}"
        # where the system knows names that are no files, nothing is left behind however the processes end
        self._address = f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / name)
        self._token = secrets.token_bytes(16)

    def producer(self, rank: int) -> Producer:
        """The sending end of `rank`. Waits for the consumer; raises MissingRankError when it does not come."""
        return Producer(self._connect(), self._token, rank, self.timeout_s, self.in_flight)

    def consumer(self, ranks: Collection[int], device: torch.device | None = None) -> Consumer:
        """The receiving end, of which there is one; `ranks` are those of the producers.

        device: where tensors are put; None leaves them where they were made. Raises UnsupportedError when another
        process has it.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
        except OSError as error:
            listener.close()
            raise UnsupportedError(f"this mailbox has a consumer already: one process receives ({error})") from error
        listener.listen(128)
        path = None if self._address.startswith("\0") else Path(self._address)
        return Consumer(listener, path, self._token, ranks, self.timeout_s, device)

    def _connect(self) -> Connection[Any, Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect(self._address)
                return linked(end, self.timeout_s)
            except OSError as error:
                end.close()
                if time.monotonic() > deadline:
                    raise MissingRankError(
                        f"waited {self.timeout_s:g} s for the consumer of this mailbox to open its end ({error}); "
                        "it must do so on the same machine"
                    ) from error
            time.sleep(LOOK_S)

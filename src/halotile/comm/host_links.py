"""Messages in CPU memory between the processes of one machine: through shared memory, told of by a Unix socket.

A process group carries them through its sockets and a thread of its own, which takes a core from a rank that computes.
Here a message is copied twice and nothing else runs: into memory that both processes have, and out of it. Sending never
waits. When a process ends, however it ends, its sockets close, and whoever waits for it knows.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from halotile.comm.memory_link import LARGE, MemoryLink, Receive
from halotile.comm.transport import LinkError, Message

_CONNECT_S = 30.0


def is_for_memory(message: torch.Tensor) -> bool:
    """Whether a message goes by way of memory, if that is there: a large one would be held twice.

    Both ends answer alike.
    """
    return message.device.type == "cpu" and message.numel() * message.element_size() <= LARGE


@dataclass(frozen=True)
class Posted:
    """Messages under way."""

    receives: Sequence[tuple[int, Receive]]
    """with whom they are from"""
    targets: frozenset[int]
    """to whom messages go"""


class HostLinks:
    """This rank's connections to all others of a group, if all are processes of one machine (Linux).

    Each rank says its `address` when the ranks meet, and all `connect` then, or none. Messages between two ranks arrive
    in the order of their posting; those of a call that was left half-way never enter a later one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._links: dict[int, MemoryLink] = {}
        self._lock = threading.RLock()
        self._sockets: list[socket.socket] = []
        weakref.finalize(self, _close, self._sockets)
        _ALL.add(self)
        self.address = self._listen()

    @property
    def connected(self) -> bool:
        """Whether messages go this way."""
        return len(self._links) > 0

    def _listen(self) -> str:
        """Where the others can connect; nothing on a system that has not what it takes, or by the user's wish."""
        if os.environ.get("HALOTILE_HOST_LINKS", "1") in ("", "0"):
            return ""
        try:
            # processes find each other by such a name if they share a kernel and its network namespace, and let each
            # other in if they are of one user
            with open("/proc/sys/kernel/random/boot_id") as file:
                host = [file.read().strip(), os.readlink("/proc/self/ns/net"), os.getuid()]
            name = f"halotile-{secrets.token_hex(16)}"
            os.close(os.memfd_create("halotile"))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets.append(listener)
            listener.bind("\0" + name)
            listener.listen(self._size)
        except (OSError, AttributeError):
            return ""
        return json.dumps([host, name])

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, by what each said, if they are of one machine; all ranks call it, or none.

        Raises LinkError when a rank does not come.
        """
        said = [json.loads(address) for address in addresses if address]
        hosts = [host for host, _ in said]
        if self.connected or self._size == 1 or len(said) < self._size or any(host != hosts[0] for host in hosts):
            return
        listener = self._sockets[0]
        listener.settimeout(_CONNECT_S)
        try:
            for peer in range(self._rank):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(link)
                link.settimeout(_CONNECT_S)
                link.connect("\0" + said[peer][1])
                link.send(struct.pack("=Q", self._rank))
                self._links[peer] = MemoryLink(link)
            while len(self._links) < self._size - 1:
                link, _ = listener.accept()
                self._sockets.append(link)
                if _user_of(link) != os.getuid():
                    link.close()
                    continue
                link.settimeout(_CONNECT_S)
                (peer,) = struct.unpack("=Q", link.recv(8))
                self._links[peer] = MemoryLink(link)
        except (OSError, struct.error) as error:
            self.close()
            raise LinkError(f"rank {self._rank} could not connect to ranks of its machine: {error}") from error
        listener.close()

    def post(self, call: int, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Send, and say what is expected; `call` numbers the calls of the group. Never waits.

        Raises LinkError when a rank that is sent to is gone.
        """
        with self._lock:
            for target in dict.fromkeys(peer for peer, _ in sends):
                if self._links[target].gone:
                    raise LinkError(f"rank {self._rank} had a message for rank {target}, whose connection closed")
                self._links[target].send(call, [tensor for peer, tensor in sends if peer == target])
            expected = [(peer, self._links[peer].expect(call, buffer)) for peer, buffer in receives]
            return Posted(expected, frozenset(peer for peer, _ in sends))

    def wait(self, posted: Posted, timeout_s: float) -> None:
        """Until all have come, and are sent. Raises LinkError when one of the ranks is gone, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                for link in self._links.values():
                    # also of those that nothing is to come from: they may wait for room to say what they have taken
                    link.drain()
                    link.flush()
                expected = {peer for peer, receive in posted.receives if not receive.done}
                full = {peer for peer in posted.targets if self._links[peer].full}
                if not expected and not full:
                    return
                gone = [peer for peer in sorted(expected) if self._links[peer].gone]
                if gone:
                    raise LinkError(f"rank {self._rank} waited for rank {gone[0]}, whose connection closed")
                poll = select.poll()
                for peer in expected | full:
                    poll.register(self._links[peer].socket, select.POLLIN | select.POLLOUT * (peer in full))
            left = deadline - time.monotonic()
            if left <= 0:
                raise LinkError(f"rank {self._rank} waited {timeout_s:g} s for ranks {sorted(expected | full)}")
            # another thread of this process may take the note, so look again before long
            poll.poll(min(left, 0.05) * 1000)

    def close(self) -> None:
        """End all waits, here and at the other ends."""
        with self._lock:
            _close(self._sockets)
            for link in self._links.values():
                link.forget()

    def left_to_parent(self) -> None:
        """In a process that was forked from the one whose connections these are: when that ends, they are to close."""
        for each in self._sockets:
            each.close()


_ALL: weakref.WeakSet[HostLinks] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_ALL):
        each.left_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _user_of(link: socket.socket) -> int:
    """Who is at the other end, by the kernel's word."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

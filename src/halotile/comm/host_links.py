"""Messages in CPU memory between the processes of one machine: through shared memory, told of by a Unix socket.

A process group carries them through its sockets and a thread of its own, which takes a core from a rank that computes.
Here a message is copied twice and nothing else runs: into memory that both processes have, and out of it. Sending never
waits. When a process ends, however it ends, its sockets close, and whoever waits for it knows.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from halotile.comm.transport import LinkError, Message

# kind of note, call, bytes, number of the segment
_NOTE = struct.Struct("=BQQQ")
_INLINE, _SHARED, _TAKEN, _DROPPED = range(4)
# what travels in the note itself
_SHORT = 4096
_LONGEST_NOTE = _NOTE.size + _SHORT
# of a connection: memory that is kept for the next messages, since new memory takes ten times as long as a copy into it
_KEPT = 64 << 20
_CONNECT_S = 30.0


@dataclass
class _Segment:
    """Memory that two processes have; without a name, so that nothing of it outlives them."""

    number: int
    memory: mmap.mmap

    def view(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self.memory, np.uint8, nbytes)


@dataclass
class _Receive:
    """A message that is to come, and where it goes."""

    peer: int
    buffer: torch.Tensor
    call: int
    done: bool = False


@dataclass(frozen=True)
class Posted:
    """Messages under way."""

    receives: Sequence[_Receive]
    targets: frozenset[int]
    """to whom messages go"""


@dataclass
class _Peer:
    """One connection: what was lent and is free again, what has come, and what is expected."""

    socket: socket.socket
    free: list[_Segment] = field(default_factory=list)
    lent: dict[int, _Segment] = field(default_factory=dict)
    theirs: dict[int, _Segment] = field(default_factory=dict)
    unsent: deque[tuple[bytes, int | None]] = field(default_factory=deque)
    come: deque[tuple[int, int, bytes | _Segment]] = field(default_factory=deque)
    expected: deque[_Receive] = field(default_factory=deque)
    gone: bool = False


class HostLinks:
    """This rank's connections to all others of a group, if all are processes of one machine (Linux).

    Each rank says its `address` when the ranks meet, and all `connect` then, or none. Messages between two ranks arrive
    in the order of their posting; those of a call that was left half-way never enter a later one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.RLock()
        self._numbers = 0
        self._sockets: list[socket.socket] = []
        weakref.finalize(self, _close, self._sockets)
        self.address = self._listen()

    @property
    def connected(self) -> bool:
        """Whether messages go this way."""
        return bool(self._peers)

    def _listen(self) -> str:
        """Where the others can connect; nothing on a system that has not what it takes, or by the user's wish."""
        if os.environ.get("HALOTILE_HOST_LINKS", "1") in ("", "0"):
            return ""
        try:
            # processes find each other by such a name if they share a kernel and its network namespace
            with open("/proc/sys/kernel/random/boot_id") as file:
                host = [file.read().strip(), os.readlink("/proc/self/ns/net")]
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
                self._add(peer, link)
            while len(self._peers) < self._size - 1:
                link, _ = listener.accept()
                self._sockets.append(link)
                if _user_of(link) != os.getuid():
                    link.close()
                    continue
                link.settimeout(_CONNECT_S)
                self._add(struct.unpack("=Q", link.recv(8))[0], link)
        except (OSError, struct.error) as error:
            raise LinkError(f"rank {self._rank} could not connect to ranks of its machine: {error}") from error
        listener.close()

    def _add(self, peer: int, link: socket.socket) -> None:
        link.setblocking(False)
        self._peers[peer] = _Peer(link)

    def post(self, call: int, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Send, and say what is expected; `call` numbers the calls of the group. Never waits.

        Raises LinkError when a rank that is sent to is gone.
        """
        with self._lock:
            for peer, tensor in sends:
                self._send(peer, call, tensor)
            posted = []
            for peer, buffer in receives:
                expected = self._peers[peer].expected
                while expected and expected[0].call < call:
                    # of a call that was left
                    expected.popleft()
                posted.append(_Receive(peer, buffer, call))
                expected.append(posted[-1])
            return Posted(posted, frozenset(peer for peer, _ in sends))

    def wait(self, posted: Posted, timeout_s: float) -> None:
        """Until all have come, and are sent. Raises LinkError when one of the ranks is gone, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                for peer in {receive.peer for receive in posted.receives if not receive.done}:
                    self._drain(self._peers[peer])
                for peer in posted.targets:
                    self._flush(self._peers[peer])
                expected = {receive.peer for receive in posted.receives if not receive.done}
                full = {peer for peer in posted.targets if self._peers[peer].unsent}
                if not expected and not full:
                    return
                gone = [peer for peer in sorted(expected) if self._peers[peer].gone]
                if gone:
                    raise LinkError(f"rank {self._rank} waited for rank {gone[0]}, whose connection closed")
                poll = select.poll()
                for peer in expected | full:
                    events = select.POLLIN * (peer in expected) | select.POLLOUT * (peer in full)
                    poll.register(self._peers[peer].socket, events)
            left = deadline - time.monotonic()
            if left <= 0:
                raise LinkError(f"rank {self._rank} waited {timeout_s:g} s for ranks {sorted(expected | full)}")
            # another thread of this process may take the note, so look again before long
            poll.poll(min(left, 0.05) * 1000)

    def close(self) -> None:
        """End all waits, here and at the other ends."""
        _close(self._sockets)
        for peer in self._peers.values():
            peer.gone = True

    def _send(self, target: int, call: int, tensor: torch.Tensor) -> None:
        peer = self._peers[target]
        if peer.gone:
            raise LinkError(f"rank {self._rank} had a message for rank {target}, whose connection closed")
        content = _bytes_of(tensor)
        if content.size <= _SHORT:
            self._note(peer, _NOTE.pack(_INLINE, call, content.size, 0) + content.tobytes())
            return
        segment, descriptor = self._segment(peer, content.size)
        np.copyto(segment.view(content.size), content)
        peer.lent[segment.number] = segment
        self._note(peer, _NOTE.pack(_SHARED, call, content.size, segment.number), descriptor)

    def _segment(self, peer: _Peer, nbytes: int) -> tuple[_Segment, int | None]:
        """Memory for a message: some that has come back, or new, and then its descriptor."""
        if not any(len(segment.memory) >= nbytes for segment in peer.free):
            self._drain(peer)
        for segment in sorted(peer.free, key=lambda segment: len(segment.memory)):
            if len(segment.memory) >= nbytes:
                peer.free.remove(segment)
                return segment, None
        # a size that suits other messages as well; what is not written to takes no memory
        nbytes = 1 << (nbytes - 1).bit_length()
        self._numbers += 1
        descriptor = os.memfd_create("halotile", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return _Segment(self._numbers, mmap.mmap(descriptor, nbytes)), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def _returned(self, peer: _Peer, number: int) -> None:
        """Keep a segment for the next message, or let go of it."""
        segment = peer.lent.pop(number)
        if sum(len(each.memory) for each in peer.free) + len(segment.memory) <= _KEPT:
            peer.free.append(segment)
        else:
            self._note(peer, _NOTE.pack(_DROPPED, 0, 0, number))

    def _note(self, peer: _Peer, note: bytes, descriptor: int | None = None) -> None:
        peer.unsent.append((note, descriptor))
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """Send what can be sent: an end that reads nothing takes some hundred notes."""
        while peer.unsent:
            note, descriptor = peer.unsent[0]
            try:
                if peer.gone:
                    pass
                elif descriptor is None:
                    peer.socket.send(note)
                else:
                    socket.send_fds(peer.socket, [note], [descriptor])
            except BlockingIOError:
                return
            except OSError as error:
                # a user may have only so many descriptors on their way; receivers take them off
                if error.errno == errno.ETOOMANYREFS:
                    return
                peer.gone = True
            peer.unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _drain(self, peer: _Peer) -> None:
        """Read all notes that are there, and hand out what is expected."""
        while not peer.gone:
            try:
                note, descriptors, _, _ = socket.recv_fds(peer.socket, _LONGEST_NOTE, 1)
            except BlockingIOError:
                break
            except OSError:
                note = b""
            if not note:
                peer.gone = True
                break
            kind, call, nbytes, number = _NOTE.unpack_from(note)
            if kind == _TAKEN:
                self._returned(peer, number)
                continue
            if kind == _DROPPED:
                del peer.theirs[number]
                continue
            if kind == _INLINE:
                peer.come.append((call, nbytes, note[_NOTE.size :]))
                continue
            if descriptors:
                size = os.fstat(descriptors[0]).st_size
                peer.theirs[number] = _Segment(number, mmap.mmap(descriptors[0], size))
                os.close(descriptors[0])
            peer.come.append((call, nbytes, peer.theirs[number]))
        while peer.expected and peer.come and peer.come[0][0] <= peer.expected[0].call:
            call, nbytes, content = peer.come.popleft()
            if call == peer.expected[0].call:
                receive = peer.expected.popleft()
                target = _bytes_of(receive.buffer)
                assert target.size == nbytes, f"planned {target.size} bytes of rank {receive.peer}, got {nbytes}"
                np.copyto(
                    target, np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content.view(nbytes)
                )
                receive.done = True
            if isinstance(content, _Segment):
                self._note(peer, _NOTE.pack(_TAKEN, 0, 0, content.number))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    array: np.ndarray = flat.numpy()
    return array


def _user_of(link: socket.socket) -> int:
    """Who is at the other end, by the kernel's word."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

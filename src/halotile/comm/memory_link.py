"""One connection between two processes of a machine: messages in memory that both have, told of by a Unix socket."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

# kind of note, call, bytes, number of the segment
_NOTE = struct.Struct("=BQQQ")
_INLINE, _SHARED, _TAKEN, _DROPPED = range(4)
# what travels in the note itself
_SHORT = 4096
_LONGEST_NOTE = _NOTE.size + _SHORT
# new memory takes ten times as long as a copy into it: so much is kept of a connection for the next messages, but none
# of a message that is larger than half of it
_KEPT = 64 << 20
_LARGE = _KEPT // 2


@dataclass
class _Segment:
    """Memory that two processes have; without a name, so that nothing of it outlives them."""

    number: int
    memory: mmap.mmap

    def view(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self.memory, np.uint8, nbytes)


@dataclass
class Receive:
    """A message that is to come, and where it goes."""

    buffer: torch.Tensor
    call: int
    done: bool = False


class MemoryLink:
    """Messages to and from one other process, in the order of their posting; none enters a call that it is not of.

    Sending never waits: what is sent is copied, and may change at once. Nothing is locked here.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.gone = False
        """whether the other end is closed; what it sent before still arrives"""
        self._numbers = 0
        self._free: list[_Segment] = []
        self._lent: dict[int, _Segment] = {}
        self._theirs: dict[int, _Segment] = {}
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._come: deque[tuple[int, int, bytes | _Segment]] = deque()
        self._expected: deque[Receive] = deque()

    @property
    def full(self) -> bool:
        """Whether messages wait until the other end reads: it takes some hundred notes.

        What it lent and may have back can wait: it may be done, and read no more.
        """
        return any(note[0] in (_INLINE, _SHARED) for note, _ in self._unsent)

    def forget(self) -> None:
        """The connection is closed at this end."""
        self.gone = True
        self.flush()
        for kept in (self._free, self._lent, self._theirs):
            kept.clear()

    def send(self, call: int, tensor: torch.Tensor) -> None:
        """A contiguous tensor on CPU, as a message of a call."""
        content = _bytes_of(tensor)
        if content.size <= _SHORT:
            self._note(_NOTE.pack(_INLINE, call, content.size, 0) + content.tobytes())
            return
        segment, descriptor = self._segment(content.size)
        np.copyto(segment.view(content.size), content)
        if content.size <= _LARGE:
            self._lent[segment.number] = segment
        self._note(_NOTE.pack(_SHARED, call, content.size, segment.number), descriptor)

    def expect(self, call: int, buffer: torch.Tensor) -> Receive:
        """The next message of a call, into a contiguous tensor of its size; those of earlier calls are dropped."""
        while self._expected and self._expected[0].call < call:
            self._expected.popleft()
        self._expected.append(Receive(buffer, call))
        return self._expected[-1]

    def drain(self) -> None:
        """Read all notes that are there, and hand out what is expected."""
        while not self.gone:
            try:
                note, descriptors, _, _ = socket.recv_fds(self.socket, _LONGEST_NOTE, 1)
            except BlockingIOError:
                break
            except OSError:
                note = b""
            if not note:
                self.gone = True
                break
            kind, call, nbytes, number = _NOTE.unpack_from(note)
            if kind == _TAKEN:
                self._returned(number)
                continue
            if kind == _DROPPED:
                del self._theirs[number]
                continue
            if kind == _INLINE:
                self._come.append((call, nbytes, note[_NOTE.size :]))
                continue
            if descriptors:
                size = os.fstat(descriptors[0]).st_size
                self._theirs[number] = _Segment(number, mmap.mmap(descriptors[0], size))
                os.close(descriptors[0])
            self._come.append((call, nbytes, self._theirs[number]))
        while self._expected and self._come and self._come[0][0] <= self._expected[0].call:
            call, nbytes, content = self._come.popleft()
            if call == self._expected[0].call:
                receive = self._expected.popleft()
                target = _bytes_of(receive.buffer)
                assert target.size == nbytes, f"planned {target.size} bytes, got {nbytes}"
                np.copyto(
                    target, np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content.view(nbytes)
                )
                receive.done = True
            if nbytes > _LARGE:
                assert isinstance(content, _Segment)
                del self._theirs[content.number]
            elif isinstance(content, _Segment):
                self._note(_NOTE.pack(_TAKEN, 0, 0, content.number))

    def flush(self) -> None:
        """Send what can be sent: an end that reads nothing takes some hundred notes."""
        while self._unsent:
            note, descriptor = self._unsent[0]
            try:
                if self.gone:
                    pass
                elif descriptor is None:
                    self.socket.send(note)
                else:
                    socket.send_fds(self.socket, [note], [descriptor])
            except BlockingIOError:
                return
            except OSError as error:
                # a user may have only so many descriptors on their way; receivers take them off
                if error.errno == errno.ETOOMANYREFS:
                    return
                self.gone = True
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _segment(self, nbytes: int) -> tuple[_Segment, int | None]:
        """Memory for a message: some that has come back, or new, and then its descriptor."""
        if nbytes <= _LARGE:
            if not any(len(segment.memory) >= nbytes for segment in self._free):
                self.drain()
            for segment in sorted(self._free, key=lambda segment: len(segment.memory)):
                if len(segment.memory) >= nbytes:
                    self._free.remove(segment)
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

    def _returned(self, number: int) -> None:
        """Keep a segment for the next message, or let go of it."""
        segment = self._lent.pop(number)
        if sum(len(each.memory) for each in self._free) + len(segment.memory) <= _KEPT:
            self._free.append(segment)
        else:
            self._note(_NOTE.pack(_DROPPED, 0, 0, number))

    def _note(self, note: bytes, descriptor: int | None = None) -> None:
        self._unsent.append((note, descriptor))
        self.flush()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    array: np.ndarray = flat.numpy()
    return array

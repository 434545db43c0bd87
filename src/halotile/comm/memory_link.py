"""One connection between two processes of a machine: messages in memory that both have, told of by a Unix socket."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from halotile.comm.parcel import nameless_file
from halotile.comm.transport import LinkError

# kind of note, call, bytes, number of the segment, the first byte in it, whether it is the last message in it
_NOTE = struct.Struct("=BQQQQ?")
_INLINE, _SHARED, _TAKEN, _DROPPED = range(4)
# what travels in the note itself
_SHORT = 4096
_LONGEST_NOTE = _NOTE.size + _SHORT
# new memory takes ten times as long as a copy into it: so much is kept each way for the next messages, but none
# that is larger than half of it; each segment also takes a descriptor at both ends
_KEPT = 64 << 20
LARGE = _KEPT // 2
_SEGMENTS = 8
_ALIGN = 64


class _Segment:
    """Memory that two processes have; without a name, so that nothing of it outlives them.

    It is mapped where it is kept. What is for one message is written and read through its descriptor: the first touch
    of each page of a new mapping takes longer than that.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor if self.size > LARGE else None
        self._memory = mmap.mmap(descriptor, self.size) if self.size <= LARGE else None

    def write(self, first: int, content: np.ndarray) -> None:
        if self._memory is not None:
            np.copyto(np.frombuffer(self._memory, np.uint8, content.size, first), content)
            return
        assert self._descriptor is not None
        done = 0
        while done < content.size:
            done += os.pwrite(self._descriptor, content[done:].data, first + done)

    def read(self, first: int, target: np.ndarray) -> None:
        if self._memory is not None:
            np.copyto(target, np.frombuffer(self._memory, np.uint8, target.size, first))
            return
        assert self._descriptor is not None
        done = 0
        while done < target.size:
            done += os.preadv(self._descriptor, [target[done:].data], first + done)

    def close(self) -> None:
        """Let go of the descriptor, if this holds one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass
class _Come:
    """A message that has come: in its note, or in a segment, which goes back with its last message."""

    call: int
    nbytes: int
    content: bytes | _Segment
    first: int
    last: bool

    def into(self, target: np.ndarray) -> None:
        assert target.size == self.nbytes, f"planned {target.size} bytes, got {self.nbytes}"
        if isinstance(self.content, _Segment):
            self.content.read(self.first, target)
        else:
            np.copyto(target, np.frombuffer(self.content, np.uint8))


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
        self._come: deque[_Come] = deque()
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
        for segment in self._theirs.values():
            segment.close()
        for kept in (self._free, self._lent, self._theirs):
            kept.clear()

    def send(self, call: int, tensors: Sequence[torch.Tensor]) -> None:
        """Contiguous tensors on CPU, as messages of a call, one after the other."""
        contents = [_bytes_of(tensor) for tensor in tensors]
        places, end = [], 0
        for content in contents:
            places.append(end)
            # all in one segment: it takes a descriptor, and there may be a message for each channel of each frame
            end += 0 if content.size <= _SHORT else -(-content.size // _ALIGN) * _ALIGN
        segment, descriptor = self._segment(end) if end else (None, None)
        if segment is not None and end <= LARGE:
            self._lent[segment.number] = segment
        if segment is not None:
            for content, first in zip(contents, places, strict=True):
                if content.size > _SHORT:
                    segment.write(first, content)
        for content, first, after in zip(contents, places, [*places[1:], end], strict=True):
            if content.size <= _SHORT or segment is None:
                self._note(_NOTE.pack(_INLINE, call, content.size, 0, 0, False) + content.tobytes())
                continue
            self._note(_NOTE.pack(_SHARED, call, content.size, segment.number, first, after == end), descriptor)
            descriptor = None

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
                note, descriptors, flags, _ = socket.recv_fds(self.socket, _LONGEST_NOTE, 1)
            except BlockingIOError:
                break
            except OSError:
                note = b""
            if not note:
                self.gone = True
                break
            if flags & socket.MSG_CTRUNC:
                raise LinkError("a message came without its memory: this process has as many open files as it may")
            self._read(note, descriptors)
        while self._expected and self._come and self._come[0].call <= self._expected[0].call:
            come = self._come.popleft()
            if come.call == self._expected[0].call:
                receive = self._expected.popleft()
                come.into(_bytes_of(receive.buffer))
                receive.done = True
            if come.last and isinstance(come.content, _Segment):
                self._give_back(come.content)

    def _read(self, note: bytes, descriptors: Sequence[int]) -> None:
        kind, call, nbytes, number, first, last = _NOTE.unpack_from(note)
        if kind == _TAKEN:
            self._returned(number)
        elif kind == _DROPPED:
            del self._theirs[number]
        elif kind == _INLINE:
            self._come.append(_Come(call, nbytes, note[_NOTE.size :], 0, True))
        else:
            if descriptors:
                self._theirs[number] = _Segment(number, descriptors[0])
                if self._theirs[number].size <= LARGE:
                    os.close(descriptors[0])
            self._come.append(_Come(call, nbytes, self._theirs[number], first, last))

    def _give_back(self, segment: _Segment) -> None:
        if segment.size > LARGE:
            self._theirs.pop(segment.number).close()
        else:
            self._note(_NOTE.pack(_TAKEN, 0, 0, segment.number, 0, False))

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
        if nbytes <= LARGE:
            if not any(segment.size >= nbytes for segment in self._free):
                self.drain()
            for segment in self._free:
                if segment.size >= nbytes:
                    self._free.remove(segment)
                    return segment, None
            # a size that suits other messages as well; what is not written to takes no memory
            nbytes = max(1 << (nbytes - 1).bit_length(), 1 << 16)
        self._numbers += 1
        descriptor = nameless_file(nbytes)
        try:
            return _Segment(self._numbers, descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def _returned(self, number: int) -> None:
        """Keep a segment for the next message, and let go of the smallest where that is too many or too much."""
        self._free.append(self._lent.pop(number))
        self._free.sort(key=lambda segment: segment.size)
        while len(self._free) > _SEGMENTS or sum(segment.size for segment in self._free) > _KEPT:
            # a large one also serves for small messages
            self._note(_NOTE.pack(_DROPPED, 0, 0, self._free.pop(0).number, 0, False))

    def _note(self, note: bytes, descriptor: int | None = None) -> None:
        self._unsent.append((note, descriptor))
        self.flush()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
    array: np.ndarray = flat.numpy()
    return array

"""Tensors in one packed buffer, from one process of a machine to another: shared memory, or an IPC handle on CUDA.

A message is a small header and at most one descriptor, however many tensors it carries. On CPU the buffer has no name
(nothing is left in /dev/shm, whatever is killed), and whoever sent it may end: the socket keeps it.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

_ALIGN = 64
"""What CPU kernels like best; every dtype's size divides it."""
_TRY_AGAIN_S = 0.01
_SIZE = struct.Struct("!Q")


class Layout(NamedTuple):
    """Where one tensor lies in the packed buffer: its first byte, and its strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Parcel:
    """A header (picklable) and tensors of any shape, dtype and layout, packed once, for any number of receivers.

    They arrive on CPU, where all receivers share the one buffer. With `keep_device` those on CUDA arrive there, and
    `kept` is the buffer on that device, which must live until the receivers have taken their copies. A context
    manager, since it holds a descriptor.
    """

    def __init__(self, header: object, tensors: Sequence[torch.Tensor] = (), keep_device: bool = False) -> None:
        self.kept: torch.Tensor | None = None
        self._descriptors: list[int] = []
        handle = b""
        layouts, nbytes = _plan(tensors)
        if keep_device and tensors and tensors[0].is_cuda:
            self.kept = torch.empty(max(nbytes, _ALIGN), dtype=torch.uint8, device=tensors[0].device)
            _fill(self.kept, layouts, tensors)
            handle = bytes(ForkingPickler.dumps(self.kept))
        elif nbytes:
            self._descriptors = [nameless_file(nbytes)]
            _fill(_mapped(self._descriptors[0], nbytes), layouts, tensors)
        self._content = pickle.dumps((header, layouts, nbytes, handle))

    def send(self, link: Connection[Any, Any]) -> None:
        """To the other end of `link`, a Unix socket. Raises OSError when it is closed."""
        message = _SIZE.pack(len(self._content)) + self._content
        with _channel(link) as channel:
            while True:
                try:
                    # at once, descriptor and all, so that an interrupt leaves no part of a message behind
                    if self._descriptors:
                        sent = socket.send_fds(channel, [message], self._descriptors)
                    else:
                        sent = channel.send(message)
                    break
                except OSError as error:
                    # a user may have only so many descriptors on their way; receivers take them off
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                    time.sleep(_TRY_AGAIN_S)
            # nothing sent to an end that has all it wanted, and is gone, is an error all the same
            if sent < len(message):
                channel.sendall(memoryview(message)[sent:])

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def collect(link: Connection[Any, Any], device: torch.device | None = None) -> tuple[Any, list[torch.Tensor]]:
    """What a `Parcel` held, the tensors in memory of this process's own, on `device` (None: where they were sent from).

    On CPU they are the sender's buffer itself, without a copy: it lives as long as one of them. Waits for the message.
    Raises EOFError or OSError when the other end is closed, also in the midst of a message.
    """
    descriptors, (header, layouts, nbytes, handle) = _receive(link)
    if handle:
        sent = ForkingPickler.loads(handle)
        buffer = sent.to(device or sent.device, copy=True)
        # the sender takes its memory back when it is told that this is done, and that is not said on the stream
        torch.cuda.synchronize(sent.device)
    elif nbytes:
        try:
            buffer = _mapped(descriptors[0], nbytes)
        finally:
            os.close(descriptors[0])
    else:
        buffer = torch.empty(0, dtype=torch.uint8)
    if device is not None:
        buffer = buffer.to(device)
    return header, [_place(buffer, layout) for layout in layouts]


def _plan(tensors: Sequence[torch.Tensor]) -> tuple[list[Layout], int]:
    layouts, end = [], 0
    for tensor in tensors:
        # strides without gaps in the tensor's own order of dims: what follows rounds by the layout
        stride = torch.empty_like(tensor, device="meta").stride()
        layouts.append(Layout(tensor.dtype, tuple(tensor.shape), tuple(stride), end))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return layouts, end


def _fill(buffer: torch.Tensor, layouts: Sequence[Layout], tensors: Sequence[torch.Tensor]) -> None:
    for layout, tensor in zip(layouts, tensors, strict=True):
        _place(buffer, layout).copy_(tensor.detach())


def _place(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    empty = 0 in layout.shape
    if empty:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=buffer.device)
    return buffer[layout.offset :].view(layout.dtype).as_strided(layout.shape, layout.stride)


def nameless_file(nbytes: int) -> int:
    """A descriptor of memory that is gone when nobody has it any more."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("halotile", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The file's bytes as a tensor, which keeps no descriptor: a receiver may hold more tiles than open files."""
    return torch.from_file(f"/dev/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)


def _receive(link: Connection[Any, Any]) -> tuple[list[int], Any]:
    with _channel(link) as channel:
        begun, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        try:
            size = _SIZE.unpack(begun + _exactly(channel, _SIZE.size - len(begun)))[0]
            return descriptors, pickle.loads(_exactly(channel, size))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise


def _exactly(channel: socket.socket, size: int) -> bytes:
    message = bytearray()
    while len(message) < size:
        part = channel.recv(size - len(message))
        if not part:
            raise EOFError("the other end was closed")
        message += part
    return bytes(message)


def _channel(link: Connection[Any, Any]) -> socket.socket:
    """`link` as a socket, which can carry descriptors; to be closed apart from it."""
    channel = socket.socket(fileno=os.dup(link.fileno()))
    # a program may have set a default timeout for its sockets
    channel.settimeout(None)
    return channel

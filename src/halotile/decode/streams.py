"""Streams of a group: while one is under way the group makes no other call, and what one leaves behind is cleared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from halotile.comm import Transport
from halotile.errors import PlanError


class Open(Protocol):
    """A stream that its driver has not finished."""

    @property
    def where(self) -> str:
        """How far it is."""


L = TypeVar("L", bound="Leavable")


class Leavable(Iterator[torch.Tensor]):
    """An iterator that may be left before its end: by `close()`, `with`, or when nobody holds it any more."""

    def close(self) -> None:
        """Want no more. Does nothing the second time."""
        raise NotImplementedError

    def __iter__(self: L) -> L:
        return self

    def __enter__(self: L) -> L:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # at the end of a program the board may be gone already
        with suppress(Exception):
            self.close()


class Remains(Protocol):
    """What a stream leaves on a rank until the next call: tiles on their way, notes on the board."""

    def linger(self) -> None:
        """Wait until the driver has all tiles of this rank, or wants no more."""

    def forget(self) -> None:
        """Drop all of it; the driver is past the stream."""


_open: WeakKeyDictionary[Transport, ref[Open]] = WeakKeyDictionary()
_left: WeakKeyDictionary[Transport, list[Remains]] = WeakKeyDictionary()
_staying: set[int] = set()
"""this process (and the one it was forked from), if it waits before it ends for the drivers of streams that it left"""


def begin_stream(transport: Transport, stream: Open) -> None:
    """Let `transport` make no other call until `end_stream`, or until nobody holds `stream`."""
    _open[transport] = ref(stream)


def end_stream(transport: Transport) -> None:
    """The driver's stream is over."""
    _open.pop(transport, None)


def refuse_open_stream(transport: Transport) -> None:
    """Raise PlanError when this rank's last stream over the group is not over: its tiles are still coming."""
    stream = _open[transport]() if transport in _open else None
    if stream is not None:
        raise PlanError(
            f"a stream over this group is still open {stream.where}; iterate to its end, or close() it, before the "
            "group's next call"
        )


def leave(transport: Transport, remains: Remains) -> None:
    """Keep `remains` until the next call of the group, or the end of the program."""
    if os.getpid() not in _staying:
        # not by atexit: a process that multiprocessing has forked does not come to it
        _staying.add(os.getpid())
        Finalize(None, _linger, exitpriority=0)
    _left.setdefault(transport, []).append(remains)


def forget_streams(transport: Transport) -> None:
    """Clear what earlier streams left: all ranks are in a later call."""
    for remains in _left.pop(transport, []):
        remains.forget()


def _linger() -> None:
    for left in list(_left.values()):
        for remains in left:
            # the program is ending, with or without the other ranks
            with suppress(Exception):
                remains.linger()

"""What a fleet's program and its workers say to each other, and how arguments and errors travel."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halotile.decode import DecodeReport
from halotile.errors import HalotileError, RemoteRankError, UnsupportedError

What = Literal["decode", "encode", "stream"]


@dataclass(frozen=True)
class Setup:
    """To a worker, first of all: who it is and what it loads. `main` is the program's module, as `main_of` says it."""

    rank: int
    ranks: int
    device: str
    backend: str
    dtype: torch.dtype | None
    threads: int | None
    source: bytes
    main: tuple[str | None, str | None]


@dataclass(frozen=True)
class Join:
    """To all workers: all have loaded the model; meet at rank 0's `port`."""

    port: int


@dataclass(frozen=True)
class Job:
    """To all workers: a call, its packed arguments, and where the program's random numbers stand."""

    number: int
    what: What
    arguments: bytes
    random: bytes
    progress: bool


@dataclass(frozen=True)
class Take:
    """To rank 0: the program has taken a batch of the stream, so that another may come."""

    number: int


@dataclass(frozen=True)
class Cancel:
    """To all workers: nobody wants the result of this job any more."""

    number: int


@dataclass(frozen=True)
class Stop:
    """To all workers: end."""


@dataclass(frozen=True)
class Listening:
    """From rank 0: the port of the store by which the workers find each other."""

    port: int


@dataclass(frozen=True)
class Started:
    """From a worker: the model is loaded (`step` "loaded"), the group is there ("joined"), or why not."""

    step: Literal["loaded", "joined"]
    failure: Failure | None = None


@dataclass(frozen=True)
class Progress:
    """From rank 0: so many tiles are done."""

    number: int
    done: int
    total: int


@dataclass(frozen=True)
class Result:
    """From rank 0, with a tensor: the result, or the next batch of a stream."""

    number: int


@dataclass(frozen=True)
class End:
    """From each worker: it has done its part of a job.

    `calls` counts the calls of its group and `lost` says how the group was lost: ranks that differ in the first, or
    have the second, cannot work together any more. `random` is where its random numbers stand.
    """

    number: int
    failure: Failure | None
    report: DecodeReport | None
    calls: int
    lost: str | None
    random: bytes


@dataclass(frozen=True)
class Failure:
    """An error on its way to the program: what it was, where it was raised; the error itself if it is halotile's."""

    rank: int
    kind: str
    message: str
    trace: str
    error: bytes | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """`error` as raised on `rank`."""
        own = None
        if isinstance(error, HalotileError):
            with suppress(Exception):
                own = pickle.dumps(error)
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(rank, type(error).__name__, str(error), trace, own)

    @property
    def failing_rank(self) -> int:
        """The rank whose error this is an echo of; its own where it is none."""
        error = self.rebuilt()
        return error.rank if isinstance(error, RemoteRankError) else self.rank

    def rebuilt(self) -> HalotileError:
        """The error to raise in the program, with the worker's traceback as its cause."""
        error: HalotileError = RemoteRankError(self.rank, self.kind, self.message)
        if self.error is not None:
            with suppress(Exception):  # a class of the factory's own, which this program cannot find
                error = pickle.loads(self.error)
        error.__cause__ = WorkerTraceback(f"in the worker of rank {self.rank}:\n{self.trace}")
        return error


class WorkerTraceback(Exception):
    """The cause of an error that comes from a worker: its text is the traceback there."""


def packed(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """`value` as a pickle, and its tensors apart from it. Raises UnsupportedError for what cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"worker processes cannot be given this, since it does not pickle: {error}; pass plain values, tensors, "
            "and functions and classes that a module defines by name"
        ) from error
    return file.getvalue(), pickler.tensors


def unpacked(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What was packed, with `tensors` in their places."""
    return _Unpickler(pickled, tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._places[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[int(pid)]

"""A worker process of a fleet: loads the model once, then does what the program asks, until either ends."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from halotile.comm import Call, Ranks
from halotile.comm.parcel import Parcel, collect
from halotile.decode import DecodeReport, parallelize, stream
from halotile.decode.door import tensor_of
from halotile.decode.functions import as_vae
from halotile.errors import HalotileError
from halotile.fleet.messages import (
    Cancel,
    End,
    Failure,
    Job,
    Join,
    Listening,
    Progress,
    Result,
    Setup,
    Started,
    Stop,
    Take,
    unpacked,
)
from halotile.fleet.source import importable, load_model, set_main

_LOOK_S = 1.0
_JOIN_S = 120.0
_AHEAD = 2
"""Batches of a stream that may wait for the program to take them."""
_PR_SET_PDEATHSIG = 1


class Cancelled(HalotileError):
    """The program does not want the result of this job any more."""


def main(descriptor: int, program: int, tied: bool) -> None:
    """The worker's life, with the pipe `descriptor` to the process `program`; never returns."""
    if tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = _Worker(Connection(descriptor), program)
    threading.Thread(target=worker.watch, daemon=True).start()
    worker.work()
    sys.stdout.flush()
    sys.stderr.flush()
    # nothing here is worth waiting for threads of gloo or CUDA
    os._exit(0)


class _Worker:
    """The main thread works; another listens, so that it sees at once when the program ends."""

    def __init__(self, link: Connection[Any, Any], program: int) -> None:
        self._link = link
        self._program = program
        self._inbox: queue.SimpleQueue[tuple[Any, list[torch.Tensor]]] = queue.SimpleQueue()
        self._cancelled = -1
        self._taken = threading.Semaphore(0)
        self._store: Any = None
        self._rank = 0
        self._device = torch.device("cpu")
        self._model: Any = None
        self._setup: Setup | None = None

    def watch(self) -> None:
        """Sort what the program says; end this process when the program has ended."""
        try:
            while True:
                # its pipe may be held open by a process that it forked
                while not self._link.poll(_LOOK_S):
                    if os.getppid() != self._program:
                        return
                message, tensors = collect(self._link)
                if isinstance(message, Cancel):
                    self._cancelled = message.number
                    self._taken.release()
                elif isinstance(message, Take):
                    self._taken.release()
                else:
                    self._inbox.put((message, tensors))
                # not kept until the next one comes
                del message, tensors
        finally:
            # whatever ends it: nobody would see the program's end any more
            os._exit(1)

    def work(self) -> None:
        """Do one thing after the other, until told to stop."""
        while True:
            message, tensors = self._inbox.get()
            if isinstance(message, Stop):
                if dist.is_initialized():
                    dist.destroy_process_group()
                return
            if isinstance(message, Setup):
                self._start(message)
            elif isinstance(message, Join):
                self._join(message)
            else:
                self._do(message, tensors)
            # not kept until the next one comes
            del message, tensors

    def _start(self, setup: Setup) -> None:
        self._setup, self._rank, self._device = setup, setup.rank, torch.device(setup.device)
        failure = None
        try:
            set_main(setup.main)
            if setup.threads is not None:
                torch.set_num_threads(setup.threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if setup.rank == 0:
                # any free port: this worker tells it to the others through the program
                store = _store(0, setup.ranks)
                self._store = store
                self._say(Listening(store.port))
            self._model = load_model(setup.source, self._device, setup.dtype)
        except BaseException as error:
            failure = Failure.of(self._rank, error)
        self._say(Started("loaded", failure))

    def _join(self, join: Join) -> None:
        setup = self._setup
        assert setup is not None
        failure = None
        try:
            if self._store is None:
                self._store = _store(join.port, setup.ranks)
            dist.init_process_group(
                setup.backend,
                store=self._store,
                rank=setup.rank,
                world_size=setup.ranks,
                timeout=timedelta(seconds=_JOIN_S),
            )
        except BaseException as error:
            failure = Failure.of(self._rank, error)
        self._say(Started("joined", failure))

    def _do(self, job: Job, tensors: list[torch.Tensor]) -> None:
        failure, report = None, None
        ranks = Ranks.of(None)
        before = ranks.transport.calls
        while self._taken.acquire(blocking=False):
            pass
        try:
            self._set_random(job.random)
            # copies: the buffer is shared by all workers
            own = [tensor.to(self._device, copy=True) for tensor in tensors]
            with importable(job.arguments):
                arguments = unpacked(job.arguments, own)
            tensors.clear()
            report = self._stream(job, arguments) if job.what == "stream" else self._call(job, arguments)
        except BaseException as error:
            if ranks.transport.calls == before:
                # the other ranks are making this call, and count it
                Call(ranks).fail(error)
            failure = Failure.of(self._rank, error)
        random = torch.get_rng_state().numpy().tobytes()
        self._say(End(job.number, failure, report, ranks.transport.calls, ranks.transport.lost, random))

    def _call(self, job: Job, arguments: dict[str, Any]) -> DecodeReport | None:
        assert job.what != "stream"
        x, options, own = arguments["x"], arguments["options"], arguments["own"]
        model = as_vae(self._model, job.what)
        with parallelize(
            model, halves=(job.what,), deliver="driver", driver=0, progress=self._progress_of(job), **options
        ) as handle:
            result = tensor_of(getattr(model, job.what)(x, **own))
        if result is not None:
            self._say(Result(job.number), [result])
        return handle.report

    def _stream(self, job: Job, arguments: dict[str, Any]) -> DecodeReport | None:
        x, options, own = arguments["x"], arguments["options"], arguments["own"]
        self._taken.release(_AHEAD)
        with stream(self._model, x, driver=0, progress=self._progress_of(job), **options, **own) as batches:
            for batch in batches:
                self._taken.acquire()
                self._check_wanted(job)
                self._say(Result(job.number), [batch])
        return batches.report

    def _progress_of(self, job: Job) -> Callable[[int, int], None]:
        """What rank 0 is to call after each tile: the place where a job that is given up stops."""

        def show(done: int, total: int) -> None:
            self._check_wanted(job)
            if job.progress:
                self._say(Progress(job.number, done, total))

        return show

    def _check_wanted(self, job: Job) -> None:
        if self._cancelled == job.number:
            raise Cancelled("the program gave this job up")

    def _set_random(self, state: bytes) -> None:
        """All ranks and the program itself stand at the same random numbers, as one process would."""
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.manual_seed(int(torch.randint(2**62, ())))

    def _say(self, message: object, tensors: list[torch.Tensor] | None = None) -> None:
        try:
            with Parcel(message, tensors or []) as parcel:
                parcel.send(self._link)
        except OSError:
            # the program has ended
            os._exit(1)


def _store(port: int, ranks: int) -> Any:
    """The store by which the workers find each other: port 0 keeps it here, at any free port."""
    return dist.TCPStore("127.0.0.1", port, ranks, port == 0, wait_for_workers=False)  # type: ignore[attr-defined]

"""The worker processes of a fleet, as the program sees them: started, written to, listened to, watched, ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_executable
from typing import Any, Protocol

import torch

from halotile.comm.parcel import Parcel, collect
from halotile.errors import MissingRankError
from halotile.fleet.messages import Join, Listening, Setup, Started, Stop

_LOOK_S = 0.2
_LEAVE_S = 5.0


class Job(Protocol):
    """What is told of the workers while it is the crew's `job`; in the crew's own thread."""

    def hear(self, rank: int, message: Any, tensors: list[torch.Tensor]) -> None:
        """A worker's message."""

    def wake(self) -> None:
        """The workers have ended."""


class Crew:
    """Running workers, one a rank. Their life ends by `kill`, and with the program, however it ends.

    Each is a fresh interpreter: nothing of the program is imported again, which is why a script needs no guard. Each
    has a pipe to the program, closed by the system when either ends, and a session of its own, which Ctrl-C in the
    program's terminal does not reach. A thread listens to them, since Ctrl-C in the main thread could lose a message.

    `lost`: why they cannot work together any more, if so. `running`: whether they are all there. `turn`: held by who
    has given them a job. `job`: whom the thread tells what they say.
    """

    def __init__(self, setups: Sequence[Setup]) -> None:
        self.lost: str | None = None
        self.running = True
        self.turn = threading.Lock()
        self.job: Job | None = None
        self._links: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._owner = os.getpid()
        self._stopping = False
        try:
            for _ in setups:
                self._start_one()
            self._set_up(setups)
        except BaseException:
            self.kill("its start failed")
            raise
        self._thread = threading.Thread(target=self._attend, name="halotile-fleet", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, in rank order."""
        return tuple(process.pid for process in self._processes)

    def tell(self, message: object, tensors: Sequence[torch.Tensor] = (), rank: int | None = None) -> None:
        """Send to one worker, or to all. Raises MissingRankError for one that has ended."""
        with Parcel(message, tensors) as parcel:
            self.send(parcel, range(len(self._links)) if rank is None else (rank,))

    def send(self, parcel: Parcel, ranks: Iterable[int]) -> None:
        """Send what is packed already. Raises MissingRankError for a worker that has ended."""
        for rank in ranks:
            try:
                parcel.send(self._links[rank])
            except OSError as error:
                raise self._ended(rank) from error

    def stop(self) -> None:
        """End workers that have no job, in good order; kill those that do not end by themselves."""
        self._stopping = True
        for rank in range(len(self._links)):
            with suppress(MissingRankError):
                self.tell(Stop(), rank=rank)
        deadline = time.monotonic() + _LEAVE_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill("it was closed")

    def kill(self, why: str) -> None:
        """End all workers at once."""
        self.lost = self.lost or why
        # a process that the program forked has a copy of this, but no workers
        if os.getpid() == self._owner:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()

    def release(self) -> None:
        """Close the pipes of workers that have ended; nobody may be telling them anything."""
        self._thread.join(_LEAVE_S)
        for link in self._links:
            link.close()

    def _start_one(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._links.append(ours)
        fd = theirs.fileno()
        # Linux ends a worker with the thread that started it: only the main thread's end is the program's
        tied = threading.current_thread() is threading.main_thread()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        code = (
            f"import sys; sys.path[:] = {path!r}; from halotile.fleet.worker import main; "
            f"main({fd}, {os.getpid()}, {tied})"
        )
        try:
            self._processes.append(
                subprocess.Popen(
                    [os.fsdecode(get_executable()), "-c", code],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        finally:
            theirs.close()

    def _set_up(self, setups: Sequence[Setup]) -> None:
        """Have all load the model, then form their group; the first failure is raised."""
        for setup in setups:
            self.tell(setup, rank=setup.rank)
        port = self._until_all("loaded")
        assert port is not None
        self.tell(Join(port))
        self._until_all("joined")

    def _until_all(self, step: str) -> int | None:
        missing, port = set(range(len(self._links))), None
        while missing:
            for rank, said, _ in self._listen():
                if isinstance(said, Listening):
                    port = said.port
                    continue
                assert isinstance(said, Started)
                assert said.step == step
                if said.failure is not None:
                    raise said.failure.rebuilt()
                missing.discard(rank)
        return port

    def _attend(self) -> None:
        """Hand on what the workers say, until one of them has ended; then end the others, who may wait for it."""
        try:
            while True:
                for rank, message, tensors in self._listen():
                    if self.job is not None:
                        self.job.hear(rank, message, tensors)
                    del tensors
        except MissingRankError as error:
            if not self._stopping:
                self.kill(str(error))
        except BaseException as error:
            self.kill(f"what its workers say is not understood ({error!r})")
            raise
        finally:
            self.running = False
            if self.job is not None:
                self.job.wake()

    def _listen(self) -> Iterator[tuple[int, Any, list[torch.Tensor]]]:
        """What workers have said: one message of each that has some. Raises MissingRankError when one has ended."""
        ranks = {link: rank for rank, link in enumerate(self._links)}
        heard = wait(self._links, _LOOK_S)
        for link in heard:
            assert isinstance(link, Connection)
            try:
                message, tensors = collect(link)
            except (EOFError, OSError) as error:
                raise self._ended(ranks[link]) from error
            yield ranks[link], message, tensors
        if not heard:
            for rank, process in enumerate(self._processes):
                # its pipe may be held open by a process that it forked
                if process.poll() is not None:
                    raise self._ended(rank)

    def _ended(self, rank: int) -> MissingRankError:
        process = self._processes[rank]
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return MissingRankError(f"the worker of rank {rank} (process {process.pid}) has closed its pipe")
        if code >= 0:
            how = f"exit code {code}"
        else:
            name = signal.Signals(-code).name
            how = f"{name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
        return MissingRankError(f"the worker of rank {rank} (process {process.pid}) has ended: {how}")

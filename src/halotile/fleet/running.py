"""One job of a fleet while it runs, and the iterator of a stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from halotile.comm.parcel import Parcel
from halotile.decode import DecodeReport, Progress
from halotile.errors import LostGroupError, MissingRankError
from halotile.fleet import messages
from halotile.fleet.crew import Crew
from halotile.fleet.messages import Cancel, End, Failure, Job, Result, Take, What

_ECHOES = ("MissingRankError", "LinkError", "LostGroupError")
"""What ranks raise that only saw another one fail."""


class Running:
    """A job that the workers of `crew` were given: what has come of it, and how it ended.

    The crew's thread calls `hear` and `wake`, the program the rest.
    """

    def __init__(self, crew: Crew, number: int, what: What, device: torch.device, progress: Progress | None) -> None:
        self._crew = crew
        self._number = number
        self._what = what
        self._device = device
        self._progress = progress
        self._arrived: deque[torch.Tensor] = deque()
        self._ends: dict[int, End] = {}
        self._steps: deque[tuple[int, int]] = deque()
        self._given_up = False
        self._changed = threading.Condition()
        self._random = torch.get_rng_state().numpy().tobytes()

    @property
    def settled(self) -> bool:
        """Whether every worker has ended its part."""
        return len(self._ends) == len(self._crew.pids)

    def end_turn(self) -> None:
        """Let the workers be given another job."""
        self._crew.turn.release()

    def start(self, arguments: bytes, tensors: list[torch.Tensor]) -> None:
        """Give it to the workers: to all of them, or the fleet is lost. What cannot be packed changes nothing."""
        job = Job(self._number, self._what, arguments, self._random, self._progress is not None)
        with Parcel(job, tensors) as parcel:
            self._crew.job = self
            try:
                self._crew.send(parcel, range(len(self._crew.pids)))
            except BaseException as error:
                self._crew.kill(f"job {self._number} did not reach all workers: {error!r}")
                if isinstance(error, MissingRankError):
                    raise self._broken(str(error)) from error
                raise

    def result(self) -> torch.Tensor:
        """Wait for all workers; the result. Raises the error that the job ended with."""
        self._wait_until(lambda: self.settled)
        self._raise_failure()
        assert len(self._arrived) == 1
        return self._arrived.popleft().to(self._device)

    def batch(self) -> torch.Tensor | None:
        """Wait for the next batch of a stream; None after the last. Raises the error that the job ended with."""
        self._wait_until(lambda: bool(self._arrived) or self.settled)
        if not self._arrived:
            self._raise_failure()
            return None
        batch = self._arrived.popleft().to(self._device)
        if not self.settled:
            # when a worker has ended meanwhile, the next batch says so
            with suppress(MissingRankError):
                self._crew.tell(Take(self._number), rank=0)
        return batch

    def report(self) -> DecodeReport | None:
        """What rank 0 did; the program's random numbers go on from where it left them."""
        end = self._ends[0]
        if end.random != self._random:
            torch.set_rng_state(torch.frombuffer(bytearray(end.random), dtype=torch.uint8))
        return end.report

    def give_up(self) -> None:
        """Tell the workers that nobody wants it any more. Does not wait for them: `settle` does."""
        if not self.settled and not self._given_up:
            self._given_up = True
            with suppress(MissingRankError):
                self._crew.tell(Cancel(self._number))
        self._arrived.clear()

    def settle(self) -> None:
        """Wait until no worker has anything more to say about it, or cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self.settled or not self._crew.running)

    def hear(self, rank: int, message: Any, tensors: list[torch.Tensor]) -> None:
        """A worker's message, as the crew's thread has it."""
        with self._changed:
            if message.number != self._number:
                return
            if isinstance(message, Result) and not self._given_up:
                self._arrived += tensors
            elif isinstance(message, messages.Progress):
                self._steps.append((message.done, message.total))
            elif isinstance(message, End):
                self._ends[rank] = message
                self._see_whether_lost(message)
                if self.settled:
                    # what it holds, such as the program's function for progress, must not live as long as the crew
                    self._crew.job = None
            self._changed.notify_all()

    def wake(self) -> None:
        """The workers have ended."""
        with self._changed:
            self._changed.notify_all()

    def _see_whether_lost(self, end: End) -> None:
        if end.lost is not None:
            self._crew.lost = self._crew.lost or f"in job {self._number} its group was lost ({end.lost})"
        elif self.settled and len({end.calls for end in self._ends.values()}) > 1:
            self._crew.lost = f"in job {self._number} its ranks made different numbers of calls"

    def _wait_until(self, enough: Callable[[], bool]) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: enough() or bool(self._steps) or not self._crew.running)
                if self._steps:
                    step = self._steps.popleft()
                    if self._progress is not None:
                        self._progress(*step)
                elif enough():
                    return
                elif not self._crew.running:
                    raise self._broken(self._crew.lost)
        except BaseException:
            self.give_up()
            raise

    def _broken(self, how: str | None) -> MissingRankError:
        return MissingRankError(
            f"job {self._number} ({self._what}): {how}; this fleet must be restarted, call restart() on it"
        )

    def _raise_failure(self) -> None:
        failures = [end.failure for end in self._ends.values() if end.failure is not None]
        if not failures:
            return
        error = min(failures, key=_distance_from_cause).rebuilt()
        if self._crew.lost is not None and hasattr(error, "add_note"):
            error.add_note("this fleet must be restarted: call restart() on it")
        raise error


def _distance_from_cause(failure: Failure) -> tuple[bool, bool, int]:
    return failure.kind in _ECHOES, failure.failing_rank != failure.rank, failure.rank


class FleetStream:
    """The batches of a stream, `B C f H W`, in their order: an iterator, and a context manager that closes it."""

    def __init__(self, running: Running, finished: Callable[[Running], None]) -> None:
        self._running = running
        self._finished = finished
        self._open = True
        self._cut_short = ""
        self._reading = threading.Lock()

    def __iter__(self) -> FleetStream:
        return self

    def __next__(self) -> torch.Tensor:
        with self._reading:
            if self._cut_short:
                raise LostGroupError(self._cut_short)
            if not self._open:
                raise StopIteration
            try:
                batch = self._running.batch()
                if batch is None:
                    self._finished(self._running)
            except BaseException:
                self._shut()
                raise
            if batch is None:
                self._shut()
                raise StopIteration
            return batch

    def close(self) -> None:
        """Give up the rest of it. Returns at once; the fleet's next job begins when the workers have stopped."""
        self._close("")

    def cut_short(self, why: str) -> None:
        """The fleet ends it: whoever reads on gets LostGroupError, and not what looks like the end."""
        self._close(why)

    def _close(self, why: str) -> None:
        # whoever reads it in another thread sees the workers' end
        if self._reading.acquire(blocking=False):
            try:
                if self._open:
                    self._cut_short = why
                self._shut()
            finally:
                self._reading.release()

    def __enter__(self) -> FleetStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # at the end of a program what this needs may be gone already
        with suppress(Exception):
            self.close()

    def _shut(self) -> None:
        if self._open:
            self._open = False
            self._running.give_up()
            self._running.end_turn()

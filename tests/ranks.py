"""Real gloo ranks for tests: a pool of worker processes that lives as long as the session.

`run_ranks(fn, n, *args)` runs `fn(group, *args)` on n ranks and returns what each returned, in rank order. A hang ends
in an error with the traceback of every rank; so does an exception.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
_STARTUP_S = 120.0
_PRELOADED = ["halotile", "diffusers.models.autoencoders", "torch.distributed", "pytest", "hypothesis"]
"""What nearly every rank imports, in seconds of CPU: once, by the server that forks the ranks of every pool.

None of these starts threads of torch's or touches OpenMP when imported, so its forks are as good as fresh processes."""
# for whoever asks for the first fork: the server stays as it was started
mp.get_context("forkserver").set_forkserver_preload(_PRELOADED)


class RankFailure(AssertionError):
    """One or more ranks of a test raised or hung; the text has their tracebacks."""


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0, members: tuple[int, ...] | None = None
) -> list[Any]:
    """Run `fn(group, *args)` on a group of `n` of the pool's ranks and return their results, in rank order.

    The group is global ranks 0 to n - 1, or `members` of the world of four. Functions and arguments are pickled: they
    must be importable, and results small or tensors.
    """
    return _Pool.get().run(fn, members or tuple(range(n)), args, timeout)


def run_world(fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(None, *args)` on all four ranks, whose default group is the world."""
    return _Pool.get().run(fn, None, args, timeout)


class _Pool:
    _current: _Pool | None = None

    @classmethod
    def get(cls) -> _Pool:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="halotile-ranks-"))
        context = mp.get_context("forkserver")
        self.pipes, self.workers = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_worker, args=(rank, str(self.folder), theirs), daemon=True)
            worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)
        self._collect(range(WORLD), _STARTUP_S)

    def run(self, fn: Any, members: tuple[int, ...] | None, args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((fn, members, args))
        # the ranks outside the group take part in making it, and return None
        results = self._collect(range(WORLD), timeout)
        return results if members is None else [results[rank] for rank in members]

    def _collect(self, ranks: range, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * len(ranks)
        waiting, failures, ended = set(ranks), [], False
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait([self.pipes[rank] for rank in waiting], left)
            for rank in sorted(waiting):
                if self.pipes[rank] not in ready:
                    continue
                try:
                    ok, value = self.pipes[rank].recv()
                except EOFError:
                    self.workers[rank].join(5.0)
                    ended = True
                    ok, value = False, f"the process ended with exit code {self.workers[rank].exitcode}"
                waiting.discard(rank)
                results[rank] = value
                if not ok:
                    failures.append(f"--- rank {rank}\n{value}")
                    # the others may wait for this one for ever
                    deadline = min(deadline, time.monotonic() + 20.0)
        if waiting:
            failures += [f"--- rank {rank} did not return; it was at\n{self._where(rank)}" for rank in sorted(waiting)]
        if waiting or ended:
            # the next test gets a new pool
            self.close()
        if failures:
            raise RankFailure("\n".join(failures))
        return results

    def _where(self, rank: int) -> str:
        process = self.workers[rank]
        if process.pid is None or not process.is_alive():
            return f"(ended, exit code {process.exitcode})"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        trace = self.folder / f"trace{rank}"
        return trace.read_text() if trace.exists() else "(its start)"

    def close(self) -> None:
        _Pool._current = None
        for worker in self.workers:
            worker.kill()


@atexit.register
def _close() -> None:
    if _Pool._current is not None:
        _Pool._current.close()


def _worker(rank: int, folder: str, pipe: Any) -> None:
    warnings.simplefilter("error")
    trace = (Path(folder) / f"trace{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    torch.set_num_threads(1)
    # by itself gloo takes the interface that the machine's name stands for: half as fast, and not known everywhere
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    groups: dict[tuple[int, ...], Any] = {}
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            fn, members, args = pipe.recv()
        except EOFError:
            return
        try:
            if members is not None and members not in groups:
                groups[members] = dist.new_group(list(members))
            inside = members is None or rank in members
            result = fn(None if members is None else groups[members], *args) if inside else None
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

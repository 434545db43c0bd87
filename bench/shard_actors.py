"""The processes of the benches of the sharded decode: alive for all rounds, waiting at a pipe while others work."""

from __future__ import annotations

import copy
import gc
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import distvae_peer
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shard_cases import CASES

import halotile

Contestant = Literal["plain", "halotile", "distvae"]
_TUNABLES = {
    # no mapping of its own for each large tensor, and none of what was freed goes back to the system
    "mmap_max": 0,
    "trim_threshold": 1 << 40,
    "arena_max": 1,
    # aligned chunks: the scrap beside one would stay in a cache, and a freed chunk never fit its own size again
    "tcache_count": 0,
    "mxfast": 0,
}
ALLOCATOR = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())}
"""For all processes alike: else each large tensor is zeroed by the system, page by page, every time it is made."""


@dataclass(frozen=True)
class Took:
    """One decode of one process. `output` only when it was asked for; `refusal` instead of the rest."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    output: Any = None
    report: dict[str, Any] = field(default_factory=dict)
    calls: distvae_peer.Calls = field(default_factory=distvae_peer.Calls)
    refusal: str | None = None


class Actor:
    """The parent's end of one process; `rank` None is a process by itself."""

    def __init__(self, threads: int, rank: int | None = None, ranks: int = 1, store: str = "") -> None:
        os.environ.update(ALLOCATOR)
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, threads, rank, ranks, store), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        """Start a method of the process's `_Body`."""
        self.pipe.send((method, args))

    def answer(self, timeout_s: float = 900.0) -> Any:
        """Its result. Raises RuntimeError when it raised, ended or takes too long."""
        if not self.pipe.poll(timeout_s):
            raise RuntimeError(f"no answer within {timeout_s:g} s")
        ok, value = self.pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value


def together(actors: list[Actor], method: str, *args: Any) -> list[Any]:
    """The same method on several processes at the same time."""
    for actor in actors:
        actor.ask(method, *args)
    return [actor.answer() for actor in actors]


def _live(pipe: Connection, threads: int, rank: int | None, ranks: int, store: str) -> None:
    torch.set_num_threads(threads)
    body = _Body(rank, ranks, store)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(body, method)(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class _Body:
    def __init__(self, rank: int | None, ranks: int, store: str) -> None:
        self.rank = rank
        if rank is not None:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
            )

    def load(self, case: str, batch: int, side: int | None, peer: bool) -> str | None:
        """Build the case, and with `peer` DistVAE's copy of it. Returns why DistVAE refuses it, or None."""
        self.peer = None
        self.vae, self.latents = CASES[case].build(batch, side)
        if not peer or self.rank is None:
            return None
        try:
            self.peer = copy.deepcopy(self.vae)
            distvae_peer.shard_decoder(self.peer)
        except Exception as error:
            self.peer = None
            return f"{type(error).__name__}: {error}"
        return None

    def halve(self) -> None:
        """Keep the upper half of the latents."""
        self.latents = self.latents[..., : self.latents.shape[-2] // 2, :].contiguous()

    def decode(self, contestant: Contestant, keep: bool) -> Took:
        """One timed decode; the ranks start it together. `keep` sends the picture along, and counts calls."""
        work = self._work(contestant)
        gc.collect()
        if self.rank is not None:
            dist.barrier()
        with torch.no_grad(), distvae_peer.counted() as calls:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                output, report = work()
            except (halotile.HalotileError, ValueError, RuntimeError, AssertionError) as error:
                return Took(refusal=f"{type(error).__name__}: {error}")
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Took(wall, cpu, output.numpy() if keep else None, report, calls)

    def peak(self, strategy: Literal["serial", "shard"], deliver: str) -> dict[str, Any]:
        """The report of a decode whose bytes are of interest, not its time."""
        with torch.no_grad(), halotile.parallelize(self.vae, self._group(), strategy, deliver, halves=("decode",)) as h:
            self.vae.decode(self.latents)
        assert h.report is not None
        return h.report.to_dict()

    def profile(self, contestant: Contestant) -> str | None:
        """The operations of one decode that take most of this process's CPU; the first rank's only."""
        work = self._work(contestant)
        with torch.no_grad():
            work()
            if self.rank is not None:
                dist.barrier()
            if self.rank:
                work()
                return None
            started = time.perf_counter()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                work()
            wall = time.perf_counter() - started
        events = profiler.key_averages()
        inside = sum(event.self_cpu_time_total for event in events) / 1e6
        table = events.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=48)
        said = f"{wall:.2f} s under the profiler, of which {inside:.2f} s inside operations"
        return f"{said}; an operation counts once more for each dispatch mode that it passes\n{table}"

    def faults_of_a_buffer(self) -> int:
        """Page faults of writing 256 MB for the fourth time: none when the allocator keeps what was freed."""
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(1 << 26)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def _work(self, contestant: Contestant) -> Callable[[], tuple[torch.Tensor, dict[str, Any]]]:
        if contestant == "halotile":
            return self._halotile
        vae = self.vae if contestant == "plain" else self.peer
        assert vae is not None, "DistVAE refused this case"
        return lambda: (vae.decode(self.latents).sample, {})

    def _halotile(self) -> tuple[torch.Tensor, dict[str, Any]]:
        with halotile.parallelize(self.vae, self._group(), "shard", "all", halves=("decode",)) as handle:
            output = self.vae.decode(self.latents).sample
        assert handle.report is not None
        return output, handle.report.to_dict()

    def _group(self) -> Any:
        return halotile.Ranks.alone() if self.rank is None else dist.group.WORLD

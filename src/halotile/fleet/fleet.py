"""`Fleet`: ranks for a program that is one process, such as a notebook, a server or a graph editor."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S
from halotile.decode import DecodeReport, Progress, Strategy
from halotile.decode.door import check_input
from halotile.errors import BusyError, LostGroupError, PlanError, UnsupportedError
from halotile.families import Half
from halotile.fleet.crew import Crew
from halotile.fleet.messages import Setup, What, packed
from halotile.fleet.places import backend_for, placed_on, threads_for
from halotile.fleet.running import FleetStream, Running
from halotile.fleet.source import Source, check_not_importing_main, main_of_this_program, packed_source
from halotile.planning import Scheduler
from halotile.planning.tilings import Tiling

_LEAVE_S = 5.0


class Fleet:
    """Worker processes that hold the model, each a rank, and decode and encode for this process together.

    The workers are started once, load the model once, and stay until `close`, the end of the `with` block or the end of
    the program, however it ends. torch.distributed is initialised in them only. One job runs at a time.

    source: a folder made by a VAE's `save_pretrained`, or a function without arguments that makes the model in each
        worker (it must pickle: defined by name in a module, or a functools.partial of such a one). What the function
        does to the model, `enable_tiling()` say, holds for all jobs. It may return whatever `halotile.decode` takes.
    ranks: how many workers. devices: one for each rank, such as ["cuda:0", "cuda:1"] or ["cpu"] * 4; None takes the
        machine's CUDA devices where there are enough of them, else the CPU. dtype: what the model is loaded in, or cast
        to. threads: how many threads a worker has; None gives it its share of the cores on CPU.

    Latents and pixels may be on any device; they travel through shared memory, and the result comes to the device of
    the input, in its dtype. Random numbers that a model draws are those of this process's generator
    (`torch.manual_seed`), which then stands where one rank's decode would have left it.

    Raises PlanError and UnsupportedError for what cannot be, before anything is started; RemoteRankError when the model
    cannot be loaded, with the worker's traceback as its cause; MissingRankError when a worker ends.

    Example:
        with halotile.Fleet("path/to/vae", ranks=4) as fleet:
            image = fleet.decode(latents, strategy="tile")
            for frames in fleet.stream(clip_latents, tiling=halotile.TileCountConfig(frames=3)):
                show(frames)
            fleet.report.seconds
    """

    def __init__(
        self,
        source: Source,
        ranks: int,
        devices: Sequence[str | torch.device] | None = None,
        *,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> None:
        check_not_importing_main()
        if os.name != "posix":
            raise UnsupportedError("a Fleet needs pipes that carry shared memory, which only Unix systems have")
        if type(ranks) is not int or ranks < 1:
            raise PlanError(f"ranks={ranks!r}: give the number of worker processes, at least 1")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise PlanError(f"threads={threads!r}: give a number of threads for each worker, at least 1, or None")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PlanError(f"dtype={dtype!r}: give a floating dtype, such as torch.bfloat16, or None")
        placed = placed_on(devices, ranks)
        pickled, main = packed_source(source), main_of_this_program()
        self.ranks = ranks
        self.devices = tuple(placed)
        self.report: DecodeReport | None = None
        self._setups = [
            Setup(
                rank, ranks, str(device), backend_for(placed), dtype, threads_for(threads, device, ranks), pickled, main
            )
            for rank, device in enumerate(placed)
        ]
        self._last: Running | None = None
        self._stream: weakref.ref[FleetStream] | None = None
        self._jobs = 0
        self._closed = False
        self._start_crew()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers, in rank order."""
        return self._crew.pids

    def decode(
        self,
        latents: torch.Tensor,
        *,
        strategy: Strategy = "auto",
        tiling: Tiling | None = None,
        scheduler: Scheduler = "balanced",
        strict: bool = False,
        dim: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        progress: Progress | None = None,
        **own: Any,
    ) -> torch.Tensor:
        """Decode `latents` (`B C H W`, `B C F H W`) on the workers; see `halotile.decode`. `own` goes to the VAE.

        Raises what `halotile.decode` raises there, with the worker's traceback as its cause; BusyError while another
        job runs (`progress` and what other threads do included); LostGroupError when the fleet must be restarted.
        """
        return self._call(
            "decode", latents, own, progress, strategy=strategy, tiling=tiling, scheduler=scheduler, strict=strict,
            dim=dim, timeout_s=timeout_s,
        )  # fmt: skip

    def encode(
        self,
        pixels: torch.Tensor,
        *,
        strategy: Strategy = "auto",
        tiling: Tiling | None = None,
        scheduler: Scheduler = "balanced",
        strict: bool = False,
        dim: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        progress: Progress | None = None,
        **own: Any,
    ) -> torch.Tensor:
        """Encode `pixels` (`B C H W`, `B C F H W`, -1 to 1) on the workers; see `halotile.encode` and `decode`."""
        return self._call(
            "encode", pixels, own, progress, strategy=strategy, tiling=tiling, scheduler=scheduler, strict=strict,
            dim=dim, timeout_s=timeout_s,
        )  # fmt: skip

    def stream(
        self,
        latents: torch.Tensor,
        *,
        tiling: Tiling,
        scheduler: Scheduler = "balanced",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        progress: Progress | None = None,
        **own: Any,
    ) -> FleetStream:
        """Decode `latents` (`B C F H W`); an iterator of temporal batches `B C f H W`, each as soon as it is finished.

        See `halotile.stream`, to which this goes. The workers wait while two batches have not been taken, so that
        memory stays bounded. A stream that is not read to its end holds the fleet until it is closed or collected;
        then its job is given up, and the next may begin.
        """
        options = {"tiling": tiling, "scheduler": scheduler, "timeout_s": timeout_s}
        running = self._begin("stream", latents, options, own, progress)
        stream = FleetStream(running, self._finished)
        self._stream = weakref.ref(stream)
        return stream

    def restart(self) -> None:
        """End the workers, whatever they do, and start others that load the model anew."""
        self._end_crew()
        self._last, self._closed, self.report = None, False, None
        self._start_crew()

    def close(self) -> None:
        """End the workers. A job that is running in another thread raises MissingRankError there."""
        if not self._closed:
            self._closed = True
            self._end_crew()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, half: Half, x: torch.Tensor, own: dict[str, Any], progress: Progress | None, **options: Any
    ) -> torch.Tensor:
        running = self._begin(half, x, options, own, progress)
        try:
            result = running.result()
            self._finished(running)
            return result
        finally:
            running.end_turn()

    def _begin(
        self, what: What, x: torch.Tensor, options: dict[str, Any], own: dict[str, Any], progress: Progress | None
    ) -> Running:
        """Take the turn and give the workers a job. Whoever calls this releases the turn."""
        check_input(x, "encode" if what == "encode" else "decode")
        refused = sorted({"group", "deliver", "driver", "device_fn"} & own.keys())
        if refused:
            raise PlanError(f"{', '.join(refused)}: a fleet is its own group, and delivers to the program that has it")
        if progress is not None and not callable(progress):
            raise PlanError(f"progress={progress!r} is not callable; give a function of (done, total)")
        pickled, tensors = packed({"x": x, "options": options, "own": own})
        crew = self._crew
        if not crew.turn.acquire(blocking=False):
            raise BusyError(
                "this fleet is at work on another job, and does one at a time: wait for it, and read a stream to its "
                "end or close() it; or start a second Fleet"
            )
        try:
            self._check_ready()
            self._jobs += 1
            self.report = None
            running = Running(crew, self._jobs, what, x.device, progress)
            running.start(pickled, tensors)
            self._last = running
        except BaseException:
            crew.turn.release()
            raise
        return running

    def _check_ready(self) -> None:
        if self._closed:
            raise LostGroupError("this fleet is closed; call restart() on it, or start another Fleet")
        if self._last is not None:
            self._last.settle()
        if self._crew.lost is not None:
            raise LostGroupError(f"this fleet must be restarted, call restart() on it: {self._crew.lost}")

    def _finished(self, running: Running) -> None:
        """A job has come to its end: keep its report, or raise its error."""
        self.report = running.report()

    def _start_crew(self) -> None:
        self._crew = Crew(self._setups)
        # a fleet that nobody holds any more ends as well, and so does one that the end of the program finds open
        self._finalizer = weakref.finalize(self, self._crew.kill, "its program let it go")

    def _end_crew(self) -> None:
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.cut_short("this fleet was closed or restarted before the stream had come to its end")
        crew = self._crew
        mine = crew.turn.acquire(blocking=False)
        if mine and (self._last is None or self._last.settled):
            crew.stop()
        else:
            crew.kill("it was closed")
        # a thread that waits for its job sees its workers' end
        if mine or crew.turn.acquire(timeout=_LEAVE_S):
            crew.release()
            crew.turn.release()
        self._finalizer.detach()

"""The same function on every rank: here alone, on local ranks that are started for it, or on torchrun's ranks."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halotile.errors import HalotileError, PlanError, UnsupportedError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Seat:
    """Where this process sits: its `rank` of `ranks`, their group (None when alone) and its device."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def is_driver(self) -> bool:
        """Whether this rank reports and writes files."""
        return self.rank == 0


class RankFailure(HalotileError):
    """A rank that was started here failed; the message is its error's."""


def on_ranks(work: Callable[..., T], ranks: int | None, device: str | None, *arguments: Any) -> T:
    """`work(seat, *arguments)` on every rank; returns the driver's result (under torchrun: this rank's own).

    `ranks`: how many; None is torchrun's number, or 1. `device`: "cpu", "cuda", or None for cuda where it has a device
    for each rank. `work` and its arguments are pickled when ranks are started. Raises `PlanError` when torchrun started
    another number of ranks, `UnsupportedError` for a device that is not here and `RankFailure` for a failed rank.
    """
    world = torchrun_world()
    if world is not None and ranks not in (None, world):
        raise PlanError(f"--ranks {ranks} differs from the {world} ranks that torchrun started; leave it out")
    try:
        if world is not None or ranks in (None, 1):
            return _run(work, device, arguments)
        assert ranks is not None
        _device(device, 0, ranks)  # refuse here, in one voice, before any rank is started
        return _start_local_ranks(work, ranks, device, arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def torchrun_world() -> int | None:
    """How many ranks torchrun started; None outside torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def one_line(error: BaseException) -> str:
    """What happened, for a person: halotile's own messages as they are, others with the kind of error in front."""
    if isinstance(error, HalotileError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _run(work: Callable[..., T], device: str | None, arguments: tuple[Any, ...]) -> T:
    with _seat(device) as seat:
        return work(seat, *arguments)


@contextmanager
def _seat(device: str | None) -> Iterator[Seat]:
    """Join the group that the environment describes; without one, sit alone."""
    import torch
    import torch.distributed as dist

    world = torchrun_world()
    if world is None:
        yield Seat(0, 1, None, _device(device, 0, 1))
        return
    local_rank, local_ranks = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
    )
    here = _device(device, local_rank, local_ranks)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // local_ranks))
    backend = "nccl" if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield Seat(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, here)
    finally:
        dist.destroy_process_group()


def _device(name: str | None, local_rank: int, local_ranks: int) -> torch.device:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and found < local_ranks:
        raise UnsupportedError(f"--device cuda with {local_ranks} ranks needs as many CUDA devices, found {found}")
    if name == "cpu" or found < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def _cores() -> int:
    """The cores that this process may use; not every system can say, and then all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_method(device: torch.device) -> str:
    """How local ranks are started; those that are forked share one import of torch and diffusers, 2 s of CPU a rank.

    Not with CUDA, which a process cannot use when the one that it was forked from has touched it, as an import may;
    and not where system libraries do not survive a fork, or Python would look for modules in the working directory.
    """
    if device.type != "cpu" or sys.platform != "linux" or not hasattr(sys.flags, "safe_path"):
        return "spawn"
    import multiprocessing.forkserver as server

    os.environ["PYTHONSAFEPATH"] = "1"  # the server is a `python -c`: a random.py that lies here must not be imported
    server.set_forkserver_preload(["halotile.cli.ahead"])
    server.ensure_running()
    return "forkserver"


def _start_local_ranks(work: Callable[..., T], ranks: int, device: str | None, arguments: tuple[Any, ...]) -> T:
    # first, since a server imports while this process still prepares
    method = _start_method(_device(device, 0, ranks))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence(("torch.distributed", "torch.multiprocessing"))
    with tempfile.TemporaryDirectory(prefix="halotile-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # else it looks up the machine's own name, which not every network knows
            max_restarts=0,
            start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results: dict[int, T] = elastic_launch(config, _rank_main)(work, device, Path(folder), arguments)
        except SignalException as stop:
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as error:
            raise RankFailure(_first_failure(Path(folder), error)) from None
        return results[0]


def _rank_main(work: Callable[..., T], device: str | None, folder: Path, arguments: tuple[Any, ...]) -> T | None:
    """What a started rank runs. Its error goes to a file: the launcher would print tracebacks of every rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, where Python would print a traceback
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    if sys.platform == "linux":
        # by itself gloo takes the interface that the machine's name stands for: slower, and not known everywhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return _run(work, device, arguments)
    except Exception as error:
        if os.environ.get("HALOTILE_TRACEBACK"):
            traceback.print_exc()
        failure = {"at": time.time(), "rank": os.environ["RANK"], "message": one_line(error)}
        (folder / f"failure-{os.environ['RANK']}.json").write_text(json.dumps(failure), encoding="utf-8")
        raise SystemExit(2) from None


def _end_with_the_launcher() -> None:
    """A launcher that is killed cannot end its ranks, and forked ones are not the system's to end with it."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _first_failure(folder: Path, error: Exception) -> str:
    """The earliest error of any rank: those of the others are mostly its echo."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    if failures:
        return str(min(failures, key=lambda failure: float(failure["at"]))["message"])
    return f"a rank ended without a word (killed? out of memory?): {_exit_codes(error)}"


def _exit_codes(error: Any) -> str:
    return ", ".join(f"rank {rank} exit code {failure.exitcode}" for rank, failure in sorted(error.failures.items()))


def _silence(prefixes: tuple[str, ...]) -> None:
    """The launcher logs what befalls ranks, tracebacks included, and each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)

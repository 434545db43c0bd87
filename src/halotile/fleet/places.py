"""Where the ranks of a fleet are: their devices, what connects these, their threads."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from halotile.errors import PlanError, UnsupportedError


def placed_on(devices: Sequence[str | torch.device] | None, ranks: int) -> list[torch.device]:
    """The device of each rank. Raises PlanError and UnsupportedError for devices that cannot be."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices is None:
        return [torch.device("cuda", rank) if found >= ranks else torch.device("cpu") for rank in range(ranks)]
    if isinstance(devices, (str, torch.device)) or len(devices) != ranks:
        raise PlanError(f"devices={devices!r}: give a list of {ranks} devices, one for each rank")
    try:
        placed = [torch.device(device) for device in devices]
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"devices={devices!r}: {error}") from error
    for device in placed:
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"device {device}: a fleet works on cpu and on cuda")
        if device.type == "cuda" and (device.index is None or device.index >= found):
            raise PlanError(f"device {device}: name one of the {found} CUDA devices of this machine, such as cuda:0")
    return placed


def backend_for(devices: Sequence[torch.device]) -> str:
    """What carries their messages: NCCL wants a device for each rank alone, gloo carries whatever there is."""
    alone = all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)
    return "nccl" if alone else "gloo"


def threads_for(threads: int | None, device: torch.device, ranks: int) -> int | None:
    """How many threads a worker has: as asked for, or on CPU its share of the cores; None is torch's own choice."""
    if threads is not None or device.type != "cpu":
        return threads
    # not every system can say which cores a process may use, and then all there are
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)

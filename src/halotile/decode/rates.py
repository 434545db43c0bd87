"""How fast one rank of this machine is: measured by `halotile calibrate` and kept, or documented defaults."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from halotile.decode.known import cache_path, read, write
from halotile.errors import PlanError
from halotile.planning.situation import Rates

# of a plain convolution network in float32; what a strategy is chosen by are the ratios of seconds, and small calls
_CPU_FLOPS_PER_THREAD = 4e10
DEFAULTS = {
    "cpu": Rates(_CPU_FLOPS_PER_THREAD, 0.005, 1.2, 0.0015, 1e9, "defaults for one thread of a CPU, not measured"),
    "cuda": Rates(3e13, 0.001, 1.15, 0.0001, 5e10, "defaults for a GPU, not measured"),
}
"""Without a calibration. Of these only the CPU's are near what was seen: see docs/strategy.md."""


def rates_of(vae: Any, device: torch.device) -> Rates:
    """What `halotile calibrate` measured for this class, dtype and machine, or the default of the device's type."""
    row = read(rates_path()).get(rates_key(vae, device))
    if isinstance(row, dict):
        try:
            return Rates(**row)
        except (TypeError, PlanError):
            pass
    return rates_of_type(device)


def rates_of_type(device: torch.device) -> Rates:
    """The defaults for such a device, a CPU's with the threads that this rank has."""
    default = DEFAULTS.get(device.type, DEFAULTS["cpu"])
    if device.type != "cpu":
        return default
    threads = torch.get_num_threads()
    source = f"defaults for a CPU with {threads} threads, not measured"
    return replace(default, flops_per_s=default.flops_per_s * threads, source=source)


def keep_rates(vae: Any, device: torch.device, rates: Rates) -> bool:
    """Put them where `rates_of` finds them; says whether that could be done."""
    path = rates_path()
    return write(path, read(path) | {rates_key(vae, device): asdict(rates)})


def rates_path() -> Path:
    """The file of calibrations, `rates.json` (`halotile.decode.known`)."""
    return cache_path("rates.json")


def rates_key(vae: Any, device: torch.device) -> str:
    """Class, dtype, and device or processor with the threads that a rank has."""
    dtype = str(next(iter(vae.parameters())).dtype).removeprefix("torch.")
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"
    return f"{type(vae).__name__} {dtype} on {platform.node()}, {where}"


def budget_of(device: torch.device, ranks: int) -> int | None:
    """Bytes that the activations of one rank may take: what is free on its GPU, or its part of the memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // ranks
    except (ValueError, OSError, AttributeError):
        # not told by every system
        return None

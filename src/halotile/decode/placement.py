"""Which device a batch of a stream goes to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from halotile.errors import PlanError

DeviceOf = Callable[[int], torch.device | str]
Placement = DeviceOf | Literal["round_robin"]


def place_note(device: torch.device) -> bytes:
    """Machine and device of this rank, in one line, for the driver."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return f"{socket.gethostname()} {torch.device(device.type, index) if index is not None else device.type}\n".encode()


def split_note(note: bytes) -> tuple[str, str, bytes]:
    """Machine, device, and what follows them in a rank's note."""
    line, _, rest = note.partition(b"\n")
    machine, _, device = line.decode().rpartition(" ")
    return machine, device, rest


def device_of(placement: Placement | None, notes: Sequence[bytes], driver: int) -> DeviceOf | None:
    """What `placement` says of batch i, given the notes of all ranks; None leaves batches where they are.

    `round_robin`: the devices of the ranks on the driver's machine, each once, in rank order, the driver's first.
    """
    if placement is None or callable(placement):
        return placement
    places = [split_note(note)[:2] for note in notes]
    here = [device for machine, device in (*places[driver:], *places[:driver]) if machine == places[driver][0]]
    devices = list(dict.fromkeys(here))
    return lambda batch: devices[batch % len(devices)]


def check_placement(placement: object) -> None:
    """Raise PlanError for what is neither a function of the batch's number, nor `round_robin`, nor None."""
    if placement is not None and placement != "round_robin" and not callable(placement):
        raise PlanError(f"device_fn={placement!r}: give a function of the batch's number, 'round_robin' or None")

"""`halotile calibrate`: measure, once for a machine, what strategies are chosen by."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halotile.cli.launch import Seat, on_ranks
from halotile.cli.options import DeviceOption, DType, DTypeOption, RanksOption
from halotile.cli.plan import FramesOption
from halotile.errors import PlanError

if TYPE_CHECKING:
    from halotile.planning.situation import Rates


def calibrate(
    vae: Annotated[Path | None, typer.Option("--vae", metavar="DIR", help="Folder of a diffusers VAE.")] = None,
    height: Annotated[int, typer.Option("--height", min=1, metavar="PX", help="Height of the larger decode.")] = 512,
    width: Annotated[int, typer.Option("--width", min=1, metavar="PX", help="Width of the larger decode.")] = 512,
    *,
    frames: FramesOption = None,
    ranks: RanksOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Decodes of each kind; the fastest counts.")] = 3,
    dtype: DTypeOption = DType.float32,
    device: DeviceOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print what is kept, and where.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete all that is kept.")] = False,
) -> None:
    """Time whole and sharded decodes of noise with a VAE on these ranks, and keep the rates for --strategy auto.

    They are kept for the class, the dtype and this machine with the threads that a rank has now.
    """
    from halotile.decode.known import read
    from halotile.decode.rates import rates_path

    if [vae is not None, show, forget].count(True) != 1:
        raise PlanError("give one of --vae DIR, --show and --forget")
    path = rates_path()
    if show:
        for key, row in read(path).items():
            print(f"{key}: {row}")
        print(path)
    elif forget:
        there = path.exists()
        path.unlink(missing_ok=True)
        print(f"deleted {path}" if there else f"nothing to delete: no {path}")
    else:
        assert vae is not None
        job = Job(vae, height, width, frames, repeats, dtype.value)
        found = on_ranks(_work, ranks, device and device.value, job)
        if found is not None:
            key, rates = found
            for name, value in asdict(rates).items():
                print(f"{name}: {value if isinstance(value, str) else format(value, '.4g')}")
            kept = rates.source == read(path).get(key, {}).get("source")
            print(f"kept in {path}" if kept else f"not kept: {path} cannot be written")


@dataclass(frozen=True)
class Job:
    """What one run of the command was asked to do."""

    vae: Path
    height: int
    width: int
    frames: int | None
    repeats: int
    dtype: str


def _work(seat: Seat, job: Job) -> tuple[str, Rates] | None:
    import torch

    from halotile.cli.vaes import ratio_of
    from halotile.decode.calibrate import calibrate as measure
    from halotile.decode.folder import load_vae
    from halotile.decode.rates import rates_key

    vae = load_vae(job.vae, seat.device, getattr(torch, job.dtype))
    shape = ratio_of(vae).latent_shape(job.height, job.width, job.frames)
    with torch.no_grad():
        rates = measure(vae, shape, seat.group, repeats=job.repeats)
    return (rates_key(vae, seat.device), rates) if seat.is_driver else None

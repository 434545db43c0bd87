"""`halotile bench`: how long the windows that `halotile plan` proposes take on these ranks."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halotile.cli.launch import Seat, on_ranks
from halotile.cli.options import DeviceOption, DType, DTypeOption, RanksOption, VaeOption
from halotile.cli.plan import FramesOption, HeightOption, WidthOption, table_of, title_of

if TYPE_CHECKING:
    from halotile.planning import TilePlan


def bench(
    vae: VaeOption,
    height: HeightOption,
    width: WidthOption,
    *,
    frames: FramesOption = None,
    ranks: RanksOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Decodes of each plan; the median counts.")] = 3,
    dtype: DTypeOption = DType.float32,
    device: DeviceOption = None,
) -> None:
    """Measure all plans that are proposed for a picture or clip of noise, beside what they were predicted to cost.

    Every round decodes once with each plan, in turn, after one round that warms up; times are those of the slowest
    rank.
    """
    job = Job(vae, height, width, frames, rounds, dtype.value)
    found = on_ranks(_work, ranks, device and device.value, job)
    if found is not None:
        _print(found)


@dataclass(frozen=True)
class Job:
    """What one run of the command was asked to do."""

    vae: Path
    height: int
    width: int
    frames: int | None
    rounds: int
    dtype: str


@dataclass(frozen=True)
class Measured:
    """A plan and the seconds of its decodes."""

    plan: TilePlan
    seconds: list[float]


def _work(seat: Seat, job: Job) -> list[Measured] | None:
    import torch

    import halotile
    from halotile.cli.options import Spread
    from halotile.cli.spread import decode, gathered
    from halotile.cli.vaes import ratio_of
    from halotile.decode.folder import load_vae

    vae = load_vae(job.vae, seat.device, getattr(torch, job.dtype))
    shape = ratio_of(vae).latent_shape(job.height, job.width, job.frames)
    torch.manual_seed(0)
    latents = torch.randn(shape).to(seat.device, vae.dtype)
    plans = halotile.plan(vae, shape, seat.ranks)
    seconds: list[list[float]] = [[] for _ in plans]
    for number in range(job.rounds + 1):
        turn = number % len(plans)
        for index in [*range(turn, len(plans)), *range(turn)]:
            halotile.apply_tile_plan(vae, plans[index])
            gathered(seat, "")
            started = time.perf_counter()
            decode(vae, latents, seat, Spread("tile"), f"decode, {plans[index].name}")
            if seat.device.type == "cuda":
                torch.cuda.synchronize(seat.device)
            taken = max(map(float, gathered(seat, str(time.perf_counter() - started))))
            if number:
                seconds[index].append(taken)
    if not seat.is_driver:
        return None
    return [Measured(plan, taken) for plan, taken in zip(plans, seconds, strict=True)]


def _print(measured: list[Measured]) -> None:
    from rich.console import Console

    plans = [each.plan for each in measured]
    cells = [
        f"{statistics.median(each.seconds):.2f} ({min(each.seconds):.2f} to {max(each.seconds):.2f})"
        for each in measured
    ]
    Console().print(table_of(title_of("measured", plans), plans, {"seconds, measured": cells}))

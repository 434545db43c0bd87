"""`halotile plan`: which tile windows a VAE can have for a picture, and what they cost."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halotile.cli.files import check_writable, write_text
from halotile.cli.options import DType, DTypeOption, OverlapOption, VaeOption, WindowOption, pixels_of
from halotile.errors import PlanError
from halotile.planning import SCHEDULERS, Scheduler

if TYPE_CHECKING:
    from rich.table import Table

    from halotile.planning import TilePlan

HeightOption = Annotated[int, typer.Option("--height", min=1, metavar="PX", help="Height of the picture.")]
WidthOption = Annotated[int, typer.Option("--width", min=1, metavar="PX", help="Width of the picture.")]
FramesOption = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a clip. (default: 1)")]
PlanRanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Ranks that share the tiles.")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Most that the activations of a tile may take: 12GiB, 800MB."),
]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def plan(
    vae: VaeOption,
    height: HeightOption,
    width: WidthOption,
    *,
    frames: FramesOption = None,
    ranks: PlanRanksOption = 2,
    memory: MemoryOption = None,
    window: WindowOption = None,
    overlap: OverlapOption = None,
    scheduler: Annotated[str, typer.Option(help=f"How tiles are dealt: {', '.join(SCHEDULERS)}.")] = "balanced",
    dtype: DTypeOption = DType.float32,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the grids.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="A page to try windows in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of plans as JSON instead of the table.")] = False,
) -> None:
    """Propose tile windows for decoding a picture or clip, or price exactly one with --window.

    The names coarse, balanced and fine describe geometry and promise no speed: `halotile bench` measures them. Memory
    is that of one tile's activations, without weights and without the pictures of finished tiles.
    """
    import torch

    from halotile.cli.vaes import ratio_of
    from halotile.decode.folder import load_vae

    dealt = _scheduler(scheduler)
    if overlap is not None and window is None:
        raise PlanError(f"--overlap {overlap} needs --window")
    budget = None if memory is None else bytes_of(memory)
    for path in (svg, html):
        if path is not None:
            check_writable(path)
    loaded = load_vae(vae, torch.device("cpu"), getattr(torch, dtype.value))
    shape = ratio_of(loaded).latent_shape(height, width, frames)
    plans = plans_for(loaded, shape, ranks, budget, window, overlap, dealt)
    title = type(loaded).__name__
    if svg is not None:
        from halotile.cli.figure import figure_of

        write_text(svg, figure_of(plans, title))
    if html is not None:
        from halotile.cli.page import page_of
        from halotile.families import family_of

        family = family_of(loaded)
        assert family is not None
        loop = family.layout.axes(loaded, "decode", shape[-2], shape[-1], family.ratio(loaded))[0]
        least = family.min_tile_lat(loaded, "decode") * plans[0].ratio
        page = page_of(plans, title, least_window_px=(least, least), last=loop.last, scheduler=dealt)
        write_text(html, page)
    if as_json:
        print(json.dumps([each.to_dict() for each in plans], indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(table_of(title_of(title, plans), plans))
        for tiling in (False, True):
            console.print(*strategies_of(loaded, shape, ranks, budget, dealt, None if not tiling else plans[0]))


def plans_for(
    vae: Any,
    shape: tuple[int, ...],
    ranks: int,
    budget: int | None,
    window: str | None,
    overlap: str | None,
    scheduler: Scheduler,
) -> list[TilePlan]:
    """The plans that are asked for: those that are proposed, or with `window` that one alone."""
    import halotile
    from halotile.cli.spread import default_overlap
    from halotile.decode.propose import price_window

    if window is None:
        return halotile.plan(vae, shape, ranks, budget, scheduler=scheduler)
    window_px = pixels_of("--window", window)
    overlap_px = default_overlap(vae, window_px, shape) if overlap is None else pixels_of("--overlap", overlap)
    asked = price_window(vae, shape, ranks, window_px, overlap_px, scheduler=scheduler)
    if budget is not None and asked.predicted_bytes is not None and asked.predicted_bytes > budget:
        raise PlanError(
            f"a tile of {window_px[0]} x {window_px[1]} px is predicted to take {size_of(asked.predicted_bytes)}, more "
            f"than --memory {size_of(budget)}"
        )
    return [asked]


def strategies_of(
    vae: Any, shape: tuple[int, ...], ranks: int, budget: int | None, scheduler: Scheduler, plan: TilePlan | None
) -> tuple[str, Table]:
    """What `--strategy auto` would do with tiling off, or on with `plan`: a line that says why, and its numbers."""
    from rich.table import Table

    import halotile
    from halotile.decode.patch import patched

    with patched(vae, use_tiling=False):
        if plan is not None:
            halotile.apply_tile_plan(vae, plan)
        found = halotile.explain(vae, shape, ranks, memory_budget_bytes=budget, scheduler=scheduler)
    title = "tiling off" if plan is None else f"tiling on, {plan.name}"
    table = Table("strategy", "predicted, s", "a rank's activations", "may not run, since", title=title)
    for each in found.predictions:
        held = "unknown" if each.peak_bytes is None else size_of(each.peak_bytes)
        table.add_row(each.name, f"{each.seconds:.3g}", held, each.refused)
    return f"{found.reason}\n", table


def _scheduler(name: str) -> Scheduler:
    for known in SCHEDULERS:
        if name == known:
            return known
    raise PlanError(f"--scheduler {name!r} is not known; choose one of {', '.join(SCHEDULERS)}")


def bytes_of(text: str) -> int:
    """Bytes of a size such as 12GiB, 1.5GB or 4096; raises `PlanError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2] or ""])):
        raise PlanError(f"--memory {text!r} is no size; write one as 12GiB, 800MB or a number of bytes")
    return size


def size_of(size: int) -> str:
    """Bytes in words."""
    for unit, each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= each:
            return f"{size / each:.1f} {unit}"
    return f"{size} bytes"


def table_of(title: str, plans: Sequence[TilePlan], more: Mapping[str, Sequence[str]] | None = None) -> Table:
    """The costs of plans, a column each, and below them the rows of `more`, with a cell for each plan."""
    from rich.table import Table

    table = Table("", *(plan.name for plan in plans), title=title)
    costs = [costs_of(plan) for plan in plans]
    for name in costs[0]:
        table.add_row(name, *(cost[name] for cost in costs))
    for name, cells in (more or {}).items():
        table.add_row(name, *cells)
    return table


def costs_of(plan: TilePlan) -> dict[str, str]:
    """What a plan costs, in words."""
    loads = f"{min(plan.loads)} to {max(plan.loads)}" if len(set(plan.loads)) > 1 else str(plan.loads[0])
    chunks = f", in {plan.chunks} chunks of frames" if plan.chunks > 1 else ""
    return {
        "window, px": f"{plan.window_px[0]} x {plan.window_px[1]}",
        "overlap, px": f"{plan.overlap_px[0]} x {plan.overlap_px[1]}",
        "tiles, rows x columns": f"{plan.rows} x {plan.columns}{chunks}",
        "decoded, times the latent": f"{float(plan.decoded_ratio):.2f}",
        "held by a tile": f"{100 * float(plan.window_share):.0f} %",
        "seams": str(plan.seams),
        "latent cells a rank": loads,
        "heaviest rank above even": f"{100 * float(plan.imbalance):.1f} %",
        "idle ranks": str(plan.idle_ranks),
        "a tile's activations, predicted": "unknown" if plan.predicted_bytes is None else size_of(plan.predicted_bytes),
    }


def title_of(what: str, plans: Sequence[TilePlan]) -> str:
    """What was planned for."""
    first = plans[0]
    height, width = first.picture_px
    frames = f", {first.frames} latent frames" if first.frames > 1 else ""
    return f"{what}: {height} x {width} px{frames}, {first.ranks} ranks"

"""`halotile demo`: the photograph and the clip that halotile ships, through the two VAEs that it ships."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halotile.cli.encode import read_pixels
from halotile.cli.files import FileError, check_writable
from halotile.cli.launch import Seat, on_ranks, torchrun_world
from halotile.cli.options import DemoRanksOption, DeviceOption, Spread, sigmas_of
from halotile.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from halotile.cli.panels import Panel
    from halotile.decode.report import DecodeReport

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Exhibit:
    """One thing to show: a source and a VAE of the package's data, the tiles to cut, and the file to write."""

    name: str
    source: str
    vae: str
    spread: Spread
    output: str


EXHIBITS = (
    Exhibit("photograph", "photo.jpg", "photo_vae", Spread("tile", 448, 384), "photo.png"),
    Exhibit("clip", "clip.mp4", "video_vae", Spread("tile", 160, 128), "clip.mp4"),
)


@dataclass(frozen=True)
class Outcome:
    """One column of the demo's table. Seconds are of the decode alone."""

    name: str
    strategy: str
    size: str
    tiles: int
    loads: tuple[int, ...]
    messages: int
    bytes_sent: int
    bitwise: bool
    psnr_db: float
    threads: int
    seconds: float
    alone_s: float


def demo(
    ranks: DemoRanksOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the results, made if need be.")] = Path(
        "out"
    ),
    device: DeviceOption = None,
    denoise: Annotated[
        bool, typer.Option("--denoise", help="Show tiled denoising instead: upscale the photograph's latent in tiles.")
    ] = False,
    sigmas: Annotated[
        str | None, typer.Option("--sigmas", metavar="S,...", help="With --denoise: first sigmas. (default: 0.5,0.9)")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="With --denoise: steps from there to no noise. (default: 3)")
    ] = None,
    side: Annotated[
        int | None, typer.Option("--side", min=1, metavar="PX", help="With --denoise: picture's side. (default: 512)")
    ] = None,
) -> None:
    """Encode and decode a photograph and a clip on several ranks, and check them against one rank.

    Writes photo.png, clip.mp4 and side_by_side.png (the original beside what was decoded, with each tile's border in
    the colour of its rank). Exit code 1 when a result is not bitwise equal to one rank's.

    With --denoise a small diffusion transformer upscales the photograph's latent, whole and in tiles. Writes
    denoise.png, whole.png and tiled.png.
    """
    given = [f"{name} {value}" for name, value in (("--sigmas", sigmas), ("--steps", steps), ("--side", side)) if value]
    if given and not denoise:
        raise PlanError(f"{given[0]} would be ignored: it is about --denoise")
    transformers = ("photo_dit/rotary", "photo_dit/absolute") if denoise else ()
    for folder in (*transformers, *(exhibit.vae for exhibit in EXHIBITS)):
        if not (DATA / folder / "config.json").is_file():
            raise FileError(f"{DATA / folder}: the demonstration model is not installed")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{out}: cannot be made a folder: {error.strerror}") from error
    check_writable(out / "side_by_side.png")
    if denoise:
        _demo_denoising(out, ranks, device and device.value, sigmas, steps, side)
        return
    outcomes = on_ranks(_work, ranks or torchrun_world() or 2, device and device.value, out)
    if outcomes is None:  # a rank of torchrun that is not the driver
        return
    _print(outcomes, out)
    if not all(outcome.bitwise for outcome in outcomes):
        raise typer.Exit(1)


def _demo_denoising(
    out: Path, ranks: int | None, device: str | None, sigmas: str | None, steps: int | None, side: int | None
) -> None:
    from halotile.cli.denoising import Settings, denoise_work, print_findings

    settings = Settings(sigmas_of(sigmas or "0.5,0.9"), steps or 3, side or 512)
    findings = on_ranks(denoise_work, ranks or torchrun_world() or 2, device, out, settings)
    if findings is None:  # a rank of torchrun that is not the driver
        return
    print_findings(findings, out)
    if not findings.agree:
        raise typer.Exit(1)


@dataclass
class _Shown:
    """What the driver keeps of an exhibit until the other ranks have left."""

    exhibit: Exhibit
    vae: Any
    pixels: Tensor
    latents: Tensor
    decoded: Tensor | None
    report: DecodeReport
    totals: tuple[int, ...]
    fps: Any


def _work(seat: Seat, out: Path) -> list[Outcome] | None:
    from halotile.cli.panels import write_side_by_side

    # all shared work first: while the driver decodes alone, nobody should wait for it
    shown = [_share(seat, exhibit) for exhibit in EXHIBITS]
    if not seat.is_driver:
        return None
    outcomes, panels = [], []
    for each in shown:
        outcome, panel = _check_and_write(seat, each, out)
        outcomes.append(outcome)
        panels.append(panel)
    write_side_by_side(out / "side_by_side.png", panels)
    return outcomes


def _share(seat: Seat, exhibit: Exhibit) -> _Shown:
    """Encode and decode over the ranks."""
    from halotile.cli.latents import pad_to_ratio
    from halotile.cli.spread import decode, encode, set_tiling, total
    from halotile.cli.vaes import fit_dims, ratio_of
    from halotile.decode.folder import load_vae

    pixels, fps = read_pixels(DATA / exhibit.source)
    vae = load_vae(DATA / exhibit.vae, seat.device)
    padded = pad_to_ratio(fit_dims(vae, pixels), ratio_of(vae))
    set_tiling(vae, exhibit.spread, seat.ranks, "encode", padded)
    latents = encode(vae, padded, seat, exhibit.spread, f"encode {exhibit.source}")
    decoded, report = decode(vae, latents, seat, exhibit.spread, f"decode {exhibit.source}")
    totals = total(seat, report.messages, report.bytes_sent)
    return _Shown(exhibit, vae, pixels, latents, decoded, report, totals, fps)


def _check_and_write(seat: Seat, shown: _Shown, out: Path) -> tuple[Outcome, Panel]:
    import torch

    from halotile.cli.latents import DEFAULT_FPS, Source, crop_to_source
    from halotile.cli.media import write_media
    from halotile.cli.spread import decode_alone
    from halotile.verify import compare, psnr_db

    assert shown.decoded is not None
    started = time.perf_counter()
    alone = decode_alone(shown.vae, shown.latents, seat)
    alone_s = time.perf_counter() - started
    pixels, report = shown.pixels, shown.report
    source = Source.of("clip" if pixels.dim() == 5 else "picture", pixels, shown.fps or DEFAULT_FPS)
    decoded = crop_to_source(shown.decoded, source).cpu()
    write_media(out / shown.exhibit.output, decoded, source.fps)
    outcome = Outcome(
        name=shown.exhibit.name,
        strategy=report.strategy,
        size=" x ".join(map(str, decoded.shape[2:])),
        tiles=report.tiles,
        loads=report.loads,
        messages=shown.totals[0],
        bytes_sent=shown.totals[1],
        bitwise=compare(shown.decoded, alone).bitwise,
        psnr_db=psnr_db(decoded.clamp(-1, 1), pixels),
        threads=torch.get_num_threads(),
        seconds=report.seconds,
        alone_s=alone_s,
    )
    return outcome, _panel(shown, decoded, outcome)


def _panel(shown: _Shown, decoded: Tensor, outcome: Outcome) -> Panel:
    from halotile.cli.panels import Panel, picture_of, tiles_of

    frame = f", frame {decoded.shape[2] // 2} of {decoded.shape[2]}" if decoded.dim() == 5 else ""
    equality = "bitwise equal to" if outcome.bitwise else "NOT EQUAL to"
    ranks = len(outcome.loads)
    return Panel(
        picture_of(shown.pixels),
        picture_of(decoded),
        tiles_of(shown.vae, shown.latents, ranks),
        (
            f"{outcome.name}{frame}: original",
            f"decoded by {_ranks(ranks)}, {outcome.tiles} tiles, {equality} one rank, {outcome.psnr_db:.1f} dB",
        ),
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _print(outcomes: list[Outcome], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    started = _ranks(len(outcomes[0].loads))
    table = Table("", *(outcome.name for outcome in outcomes), title=f"halotile demo on {started}")
    rows: dict[str, Callable[[Outcome], object]] = {
        "strategy": lambda o: o.strategy,
        "decoded size": lambda o: o.size,
        "tiles": lambda o: o.tiles,
        "load a rank (latent cells)": lambda o: " ".join(map(str, o.loads)),
        "messages": lambda o: o.messages,
        "bytes sent": lambda o: f"{o.bytes_sent:,}",
        "against one rank": lambda o: "bitwise equal" if o.bitwise else "NOT EQUAL",
        "PSNR against the original": lambda o: f"{o.psnr_db:.2f} dB",
        "threads a rank": lambda o: o.threads,
        f"seconds, {started}": lambda o: f"{o.seconds:.2f}",
        "seconds, the VAE alone": lambda o: f"{o.alone_s:.2f}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(str(cell(outcome)) for outcome in outcomes))
    console = Console()
    console.print(table)
    console.print(f"{out}: photo.png clip.mp4 side_by_side.png", soft_wrap=True)

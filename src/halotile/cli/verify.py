"""`halotile verify`: the distributed decode against one rank's own."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from halotile.cli.decode import LatentArgument, load
from halotile.cli.files import check_readable
from halotile.cli.launch import Seat, on_ranks
from halotile.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    OverlapOption,
    ProfileOption,
    RanksOption,
    ShardsOption,
    Spread,
    Strategy,
    StrategyOption,
    StrictOption,
    StrideOption,
    TileOption,
    VaeOption,
    WindowOption,
)

if TYPE_CHECKING:
    from halotile.decode.report import DecodeReport
    from halotile.verify import Comparison


@dataclass(frozen=True)
class Verdict:
    """What the ranks did, how it compares with one rank, and whether that is what the strategy promises."""

    report: DecodeReport
    bytes_sent: int
    comparison: Comparison
    kept: bool


def verify(
    latent: LatentArgument,
    vae: VaeOption,
    *,
    ranks: RanksOption = None,
    strategy: StrategyOption = Strategy.auto,
    tile: TileOption = None,
    stride: StrideOption = None,
    window: WindowOption = None,
    overlap: OverlapOption = None,
    profile: ProfileOption = None,
    strict: StrictOption = False,
    shards_per_tile: ShardsOption = None,
    dtype: DTypeOption = DType.float32,
    device: DeviceOption = None,
) -> None:
    """Decode on all ranks, then on one rank with the VAE alone, and compare.

    The one rank runs the VAE's own tile loop where tiles were decoded, else the untiled decode. Exit code 1 when the
    two differ by more than the strategy promises: serial and tile the same bits, shard and hybrid the same values to
    rounding.
    """
    spread = Spread.of(strategy, tile, stride, strict, window, overlap, profile, shards_per_tile)
    check_readable(latent)
    verdict = on_ranks(_work, ranks, device and device.value, latent, vae, spread, dtype.value)
    if verdict is None:  # a rank of torchrun that is not the driver
        return
    _print(verdict)
    if not verdict.kept:
        raise typer.Exit(1)


def _work(seat: Seat, path: Path, folder: Path, spread: Spread, dtype: str) -> Verdict | None:
    from halotile.cli.spread import decode, decode_alone, set_tiling, total
    from halotile.verify import compare, keeps_promise

    vae, latents, _ = load(seat, path, folder, dtype)
    set_tiling(vae, spread, seat.ranks, "decode", latents)
    pixels, report = decode(vae, latents, seat, spread, f"decode {path.name}")
    (bytes_sent,) = total(seat, report.bytes_sent)
    if pixels is None:
        return None
    if report.strategy == "shard" and hasattr(vae, "use_tiling"):
        vae.use_tiling = False
    comparison = compare(pixels, decode_alone(vae, latents, seat))
    return Verdict(report, bytes_sent, comparison, keeps_promise(comparison, report.strategy))


def _print(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    report, comparison = verdict.report, verdict.comparison
    rows: dict[str, Any] = {
        "strategy": f"{report.strategy} ({report.reason})",
        "promise": report.exactness,
        "ranks": report.ranks,
        "tiles": report.tiles,
        "load a rank (latent cells)": " ".join(map(str, report.loads)),
        "bytes sent, all ranks": verdict.bytes_sent,
        **_of_shard(report),
        "seconds": f"{report.seconds:.2f}",
        "shape": " x ".join(map(str, comparison.shape)),
        "max error": f"{comparison.max_error:.3g}",
        "PSNR against one rank": f"{comparison.psnr_db:.2f} dB",
        "first differing row": "none" if comparison.first_differing_row is None else comparison.first_differing_row,
        "differing values": comparison.differing,
        "bitwise equal": "yes" if comparison.bitwise else "no",
        "promise kept": "yes" if verdict.kept else "NO",
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console().print(table)


def _of_shard(report: DecodeReport) -> dict[str, Any]:
    if report.strategy != "shard":
        return {}
    return {
        "gathered operations": ", ".join(f"{name}: {count}" for name, count in report.gathers.items()) or "none",
        "keys and values gathered": report.attention_gathers,
        "peak of activations, this rank": f"{(report.peak_activation_bytes or 0) / 1e6:.1f} MB",
    }

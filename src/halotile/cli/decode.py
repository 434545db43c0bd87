"""`halotile decode`: a latent file to a picture or a clip."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halotile.cli.files import CLIP_SUFFIXES, PICTURE_SUFFIXES, check_readable, check_writable, kind_of_output
from halotile.cli.launch import Seat, on_ranks, torchrun_world
from halotile.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    GridOption,
    GridOverlapOption,
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
    grid_of,
)
from halotile.errors import MismatchError, PlanError
from halotile.planning.tilings import TileCountConfig

if TYPE_CHECKING:
    from torch import Tensor

    from halotile.cli.latents import Source

LatentArgument = Annotated[Path, typer.Argument(metavar="LATENT", help="Latent file made by `halotile encode`.")]


def decode(
    latent: LatentArgument,
    vae: VaeOption,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Picture or clip, by its suffix.")],
    *,
    ranks: RanksOption = None,
    strategy: StrategyOption = Strategy.auto,
    tile: TileOption = None,
    stride: StrideOption = None,
    window: WindowOption = None,
    overlap: OverlapOption = None,
    profile: ProfileOption = None,
    grid: GridOption = None,
    grid_overlap: GridOverlapOption = None,
    strict: StrictOption = False,
    shards_per_tile: ShardsOption = None,
    fps: Annotated[float | None, typer.Option(min=0.01, help="Frames per second. (default: the source's)")] = None,
    dtype: DTypeOption = DType.float32,
    device: DeviceOption = None,
) -> None:
    """Decode a latent file to a picture or a clip, cropped to the size of what was encoded.

    A clip becomes H.264 without sound. Only the first rank writes, and the file appears when it is complete. With
    --grid frames are written as they are finished, and memory stays that of a few batches; --tile, --window or
    --profile then cut each tile of the grid once more.
    """
    from halotile.cli.latents import read_source

    spread = Spread.of(strategy, tile, stride, strict, window, overlap, profile, shards_per_tile)
    check_readable(latent)
    if kind_of_output(output) != (kind := read_source(latent).kind):
        known = " ".join(PICTURE_SUFFIXES if kind == "picture" else CLIP_SUFFIXES)
        raise PlanError(f"{output}: {latent.name} holds a {kind}, whose suffix is one of {known}")
    check_writable(output)
    tiling = grid_of(grid, grid_overlap)
    if tiling is not None and strategy not in (Strategy.auto, Strategy.tile):
        raise PlanError(f"--grid {grid} would be ignored: it is about --strategy tile, not {strategy.value}")
    job = Job(latent, vae, output, spread, fps, dtype.value, tiling)
    if tiling is None:
        on_ranks(_work, ranks, device and device.value, job)
        return
    from halotile.cli.streaming import stream_with_a_fleet, stream_with_the_group

    if torchrun_world() is None and ranks not in (None, 1):
        stream_with_a_fleet(job, ranks, device and device.value)
    else:
        on_ranks(stream_with_the_group, ranks, device and device.value, job)


@dataclass(frozen=True)
class Job:
    """What one run of the command was asked to do."""

    latent: Path
    vae: Path
    output: Path
    spread: Spread
    fps: float | None
    dtype: str
    tiling: TileCountConfig | None = None

    def rate(self, source: Source) -> Fraction:
        """Frames per second of what is written."""
        return source.fps if self.fps is None else Fraction(self.fps).limit_denominator(1001)


def _work(seat: Seat, job: Job) -> None:
    from halotile.cli.latents import crop_to_source
    from halotile.cli.media import write_media
    from halotile.cli.spread import decode as decode_on_ranks
    from halotile.cli.spread import set_tiling

    vae, latents, source = load(seat, job.latent, job.vae, job.dtype)
    set_tiling(vae, job.spread, seat.ranks, "decode", latents)
    pixels, _ = decode_on_ranks(vae, latents, seat, job.spread, f"decode {job.latent.name}")
    if pixels is not None:
        write_media(job.output, crop_to_source(pixels, source), job.rate(source))


def read_for(path: Path, folder: Path) -> tuple[Tensor, Source]:
    """The latents `B C [F] H W` and what they were made from; `folder` must hold a VAE of the class that made them."""
    from halotile.cli.latents import read_latents
    from halotile.decode.folder import class_of

    latents, source = read_latents(path)
    name = class_of(folder)
    if source.vae_class not in (None, name):
        raise MismatchError(f"{path} was encoded by {source.vae_class}, but {folder} holds {name}")
    return latents, source


def load(seat: Seat, path: Path, folder: Path, dtype: str) -> tuple[Any, Tensor, Source]:
    """The VAE on this rank's device, the latents `B C [F] H W` and what they were made from."""
    import torch

    from halotile.cli.vaes import check_latents
    from halotile.decode.folder import load_vae

    latents, source = read_for(path, folder)
    vae = load_vae(folder, seat.device, getattr(torch, dtype))
    check_latents(vae, latents)
    return vae, latents, source

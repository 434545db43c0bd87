"""`halotile encode`: a picture or a clip to a latent file."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halotile.cli.files import (
    PICTURE_SUFFIXES,
    READABLE_CLIP_SUFFIXES,
    FileError,
    check_readable,
    check_writable,
    kind_of_input,
)
from halotile.cli.launch import Seat, on_ranks
from halotile.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    RanksOption,
    ShardsOption,
    Spread,
    Strategy,
    StrategyOption,
    StrictOption,
    StrideOption,
    TileOption,
    VaeOption,
)

if TYPE_CHECKING:
    from torch import Tensor


def encode(
    source: Annotated[Path, typer.Argument(metavar="IMAGE_OR_VIDEO", help="What to encode.")],
    vae: VaeOption,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The latent file (safetensors).")],
    *,
    ranks: RanksOption = None,
    strategy: StrategyOption = Strategy.auto,
    tile: TileOption = None,
    stride: StrideOption = None,
    strict: StrictOption = False,
    shards_per_tile: ShardsOption = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Read at most so many frames of a clip.")] = None,
    dtype: DTypeOption = DType.float32,
    device: DeviceOption = None,
) -> None:
    """Encode a picture or a clip to a latent file.

    Sizes that the VAE's ratio does not divide are padded by repeating the last row, column or frame; decode crops them
    off again. The latents are the posterior's mode, not scaled by the VAE's scaling factor.
    """
    spread = Spread.of(strategy, tile, stride, strict, shards_per_tile=shards_per_tile)
    kind_of_input(source)
    check_readable(source)
    if output.suffix.lower() in (*PICTURE_SUFFIXES, *READABLE_CLIP_SUFFIXES):
        raise FileError(f"{output}: encode writes latents, not a picture or clip; name it {output.stem}.safetensors")
    check_writable(output)
    on_ranks(_work, ranks, device and device.value, Job(source, vae, output, spread, frames, dtype.value))


@dataclass(frozen=True)
class Job:
    """What one run of the command was asked to do."""

    source: Path
    vae: Path
    output: Path
    spread: Spread
    frames: int | None
    dtype: str


def _work(seat: Seat, job: Job) -> None:
    import torch

    from halotile.cli.latents import DEFAULT_FPS, Source, pad_to_ratio, write_latents
    from halotile.cli.spread import encode as encode_on_ranks
    from halotile.cli.spread import set_tiling
    from halotile.cli.vaes import fit_dims, ratio_of
    from halotile.decode.folder import load_vae

    pixels, fps = read_pixels(job.source, job.frames)
    vae = load_vae(job.vae, seat.device, getattr(torch, job.dtype))
    pixels = fit_dims(vae, pixels)
    padded = pad_to_ratio(pixels, ratio_of(vae))
    set_tiling(vae, job.spread, seat.ranks, "encode", padded)
    latents = encode_on_ranks(vae, padded, seat, job.spread, f"encode {job.source.name}")
    if seat.is_driver:
        source = Source.of(kind_of_input(job.source), pixels, fps or DEFAULT_FPS, type(vae).__name__)
        write_latents(job.output, latents, source)


def read_pixels(path: Path, max_frames: int | None = None) -> tuple[Tensor, Fraction | None]:
    """A picture as `1 3 H W` and None, a clip as `1 3 F H W` and its frames per second."""
    from halotile.cli.media import read_image, read_video

    return (read_image(path), None) if kind_of_input(path) == "picture" else read_video(path, max_frames)

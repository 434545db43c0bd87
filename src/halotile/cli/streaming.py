"""A decode on halotile's own grid, whose frames are written while later ones are still being decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halotile
from halotile.cli.decode import Job, load, read_for
from halotile.cli.latents import Source, crop_to_source
from halotile.cli.launch import Seat
from halotile.cli.media import clip_writer, write_image
from halotile.cli.options import Spread
from halotile.cli.spread import NOISE_SEED, progress_bar, set_tiling
from halotile.cli.vaes import check_latents, decode_arguments
from halotile.decode.folder import load_vae, without_weights


def stream_with_the_group(seat: Seat, job: Job) -> None:
    """On a rank of torchrun, or alone: decode with the group; the driver writes."""
    assert job.tiling is not None
    vae, latents, source = load(seat, job.latent, job.vae, job.dtype)
    latents = latents.to(seat.device, vae.dtype)
    _tile_inside(vae, job.spread, latents)
    own: dict[str, Any] = decode_arguments(vae, latents)
    torch.manual_seed(NOISE_SEED)
    with (
        torch.inference_mode(),
        halotile.stream(vae, latents, seat.group, tiling=job.tiling, **own) as batches,
    ):
        if seat.is_driver:
            _write(job, source, batches, seat)
        else:
            next(batches, None)


def stream_with_a_fleet(job: Job, ranks: int, device: str | None) -> None:
    """Decode with ranks that are started here; this process writes."""
    assert job.tiling is not None
    latents, source = read_for(job.latent, job.vae)
    devices = None if device is None else [f"cuda:{rank}" if device == "cuda" else device for rank in range(ranks)]
    # refused here, in one voice, before any rank is started
    vae = without_weights(job.vae)
    check_latents(vae, latents)
    latents = latents.to(getattr(torch, job.dtype))
    own: dict[str, Any] = decode_arguments(vae, latents)
    torch.manual_seed(NOISE_SEED)
    model = partial(_model, job.vae, job.dtype, job.spread, tuple(latents.shape))
    with (
        halotile.Fleet(model, ranks, devices) as fleet,
        fleet.stream(latents, tiling=job.tiling, **own) as batches,
    ):
        _write(job, source, batches, Seat(0, 1, None, torch.device("cpu")))


def _model(folder: Path, dtype: str, spread: Spread, shape: tuple[int, ...]) -> Any:
    """The VAE in a worker of a fleet."""
    vae = load_vae(folder, torch.device("cpu"), getattr(torch, dtype))
    _tile_inside(vae, spread, torch.empty(shape, device="meta"))
    return vae


def _tile_inside(vae: Any, spread: Spread, latents: Tensor) -> None:
    """Switch the VAE's own tiling on where its window was asked for: each tile of the grid is then cut by it."""
    if spread.tile_px is not None or spread.window_px is not None or spread.profile is not None:
        set_tiling(vae, spread, 1, "decode", latents)


def _write(job: Job, source: Source, batches: Iterable[Tensor], seat: Seat) -> None:
    """Write what comes, cropped to what was encoded."""
    if source.kind == "picture":
        write_image(job.output, crop_to_source(torch.cat([*batches], -3), source))
        return
    written = 0
    with clip_writer(job.output, job.rate(source)) as write, _frames_bar(job, source, seat) as show:
        for batch in batches:
            left = batch.shape[2] if source.frames is None else source.frames - written
            frames = crop_to_source(batch[:, :, :left], replace(source, frames=None))
            if frames.shape[2]:
                write(frames)
            written += frames.shape[2]
            show(written)
    if source.frames is not None and written < source.frames:
        raise halotile.PlanError(f"decoded to {written} frames, fewer than the source's {source.frames}")


@contextmanager
def _frames_bar(job: Job, source: Source, seat: Seat) -> Iterator[Callable[[int], None]]:
    """A function that shows how many frames are written."""
    total = source.frames
    if total is None:
        yield lambda done: None
        return
    with progress_bar(f"write {job.output.name}", seat) as bar:
        yield lambda done: None if bar is None else bar(done, total)

"""A VAE's encode and decode over the ranks, as the commands ask for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import Tensor

import halotile
from halotile.cli.launch import Seat
from halotile.cli.options import Spread
from halotile.cli.vaes import decode_arguments, ratio_of
from halotile.comm import Call, Ranks
from halotile.decode.patch import patched
from halotile.decode.propose import price_window
from halotile.decode.report import DecodeReport
from halotile.decode.stitch import stand_ins
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Half, check_loop, family_of, set_window
from halotile.planning import TilePlan

NOISE_SEED = 0  # some decoders draw noise: equal latents shall make equal files
Progress = Callable[[int, int], None]


def set_tiling(vae: Any, spread: Spread, ranks: int, half: Half, given: Tensor) -> None:
    """Switch the VAE's own tiling on where `half` of `given` is to be cut, with the window and stride asked for.

    `auto` cuts for several ranks, unless the VAE's own loop cannot do that with what is given. Raises `PlanError` for a
    window that the class cannot have and `UnsupportedError` for a class that cannot be cut.
    """
    if spread.window_px is not None or spread.profile is not None:
        halotile.apply_tile_plan(vae, _planned(vae, spread, ranks, tuple(given.shape)))
    elif spread.tile_px is not None:
        set_window(vae, spread.tile_px, spread.stride_px or _default_stride(vae, spread.tile_px))
    elif spread.strategy in ("tile", "hybrid"):
        if not hasattr(vae, "enable_tiling"):
            raise UnsupportedError(f"{type(vae).__name__} has no tile loop of its own to share")
        vae.enable_tiling()
    elif spread.strategy == "auto" and ranks > 1 and _can_be_cut(vae, half, given):
        vae.enable_tiling()


def _planned(vae: Any, spread: Spread, ranks: int, latent_shape: tuple[int, ...]) -> TilePlan:
    if spread.window_px is not None:
        overlap_px = spread.overlap_px or default_overlap(vae, spread.window_px, latent_shape)
        return price_window(vae, latent_shape, ranks, spread.window_px, overlap_px)
    plans = {plan.name: plan for plan in halotile.plan(vae, latent_shape, ranks)}
    assert spread.profile is not None
    if spread.profile not in plans:
        raise PlanError(f"--profile {spread.profile}: here is only {' and '.join(plans)}; see `halotile plan`")
    return plans[spread.profile]


def default_overlap(vae: Any, window_px: tuple[int, int], latent_shape: tuple[int, ...]) -> tuple[int, int]:
    """A quarter of the window, in whole latents; 0 along an axis that the window clears."""
    ratio = ratio_of(vae).spatial
    height, width = (
        window // 4 // ratio * ratio if window < length * ratio else 0
        for window, length in zip(window_px, latent_shape[-2:], strict=True)
    )
    return height, width


def _default_stride(vae: Any, tile_px: int) -> int:
    """Three quarters of the window, in whole latents."""
    ratio = ratio_of(vae).spatial
    return max(ratio, tile_px * 3 // 4 // ratio * ratio)


def _can_be_cut(vae: Any, half: Half, given: Tensor) -> bool:
    try:
        check_loop(vae, half, tuple(given.shape))
    except (PlanError, UnsupportedError):
        return False
    return hasattr(vae, "enable_tiling")


@torch.inference_mode()
def decode(vae: Any, latents: Tensor, seat: Seat, spread: Spread, label: str) -> tuple[Tensor | None, DecodeReport]:
    """The pixels `B C [F] H W` on the driver, None on other ranks; and the `DecodeReport`."""
    latents = latents.to(seat.device, vae.dtype)
    with (
        progress_bar(label, seat) as progress,
        halotile.parallelize(
            vae,
            group=seat.group,
            strategy=spread.strategy,
            deliver="driver",
            halves=("decode",),
            strict=spread.strict,
            shards_per_tile=spread.shards_per_tile,
            progress=progress,
        ) as handle,
    ):
        pixels = _decode(vae, latents)
        assert handle.report is not None
        return pixels, handle.report


def total(seat: Seat, *counts: int) -> tuple[int, ...]:
    """Each count summed over the ranks; every rank must call it."""
    return tuple(map(sum, zip(*(json.loads(told) for told in gathered(seat, json.dumps(counts))), strict=True)))


def gathered(seat: Seat, told: str) -> list[str]:
    """What every rank tells, in rank order, once all have come; every rank must call it.

    As notes on the group's board: gloo's thread may still hold a collective's tensors when a program ends right after
    it, and then aborts the process.
    """
    with Call(Ranks.of(seat.group)) as call:
        call.note(told.encode())
        call.meet({})
        return [note.decode() for note in call.notes("start")]


@torch.inference_mode()
def decode_alone(vae: Any, latents: Tensor, seat: Seat) -> Tensor:
    """The VAE's own decode on this rank, its own tile loop where tiling is on.

    All that halotile does is to keep a loop from crashing on a tile that is too thin, as it does for several ranks.
    """
    latents = latents.to(seat.device, vae.dtype)
    tiled = getattr(vae, "use_tiling", False)
    mended = check_loop(vae, "decode", tuple(latents.shape)) if tiled else {}
    # windows that the class's own loop does not know
    own = stand_ins(vae, "decode") if tiled and family_of(vae) is not None else {}
    with patched(vae, **mended, **own):
        pixels = _decode(vae, latents)
    assert pixels is not None
    return pixels


def _decode(vae: Any, latents: Tensor) -> Tensor | None:
    torch.manual_seed(NOISE_SEED)
    pixels: Tensor | None = vae.decode(latents, **decode_arguments(vae, latents)).sample
    return pixels


@torch.inference_mode()
def encode(vae: Any, pixels: Tensor, seat: Seat, spread: Spread, label: str) -> Tensor:
    """The latents `B C [F] H W` (a distribution's mode) on every rank."""
    if pixels.numel() == 0:
        raise PlanError(f"nothing to encode: the pixels are {tuple(pixels.shape)}")
    with progress_bar(label, seat) as progress:
        latents = halotile.encode(
            vae,
            pixels.to(seat.device, vae.dtype),
            group=seat.group,
            strategy=spread.strategy,
            strict=spread.strict,
            shards_per_tile=spread.shards_per_tile,
            progress=progress,
        )
    assert latents is not None
    return latents


@contextmanager
def progress_bar(label: str, seat: Seat) -> Iterator[Progress | None]:
    """A bar on the driver's standard error, one step a tile; None for other ranks and where no person is watching."""
    if not seat.is_driver or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

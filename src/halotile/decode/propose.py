"""Tile windows for an autoencoder: a few good ones, and the price of exactly one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halotile.decode.footprint import footprint_of
from halotile.errors import PlanError, UnsupportedError
from halotile.families import family_of, loop_tilings, possible
from halotile.families.cuts import cut_of, temporal_chunks
from halotile.geometry import DimTiling, TileGrid
from halotile.planning import Scheduler, TilePlan, candidates, price

_Pixels = tuple[int, int]


def plan(
    vae: Any,
    latent_shape: Sequence[int],
    ranks: int,
    memory_budget_bytes: int | None = None,
    *,
    scheduler: Scheduler = "balanced",
    least_lat: int = 16,
    least_overlap: Fraction = Fraction(1, 4),
) -> list[TilePlan]:
    """Up to three tile windows for decoding latents of `latent_shape` (`B C H W`, `B C F H W`) on `ranks` ranks.

    *coarse* has the largest window, *fine* the smallest, and *balanced* is the least bad of the rest in window area,
    decoded area and imbalance. The names describe geometry and promise no speed: `halotile bench` measures. Each is
    a window that the VAE can have exactly; `halotile.apply_tile_plan(vae, plan)` sets it. See
    `halotile.planning.candidates` for the search, and for `least_lat` and `least_overlap`: conservative limits, and
    not measures of quality.

    `predicted_bytes` is the peak of the activations of one tile (`halotile.decode.footprint`), without weights,
    kernels' workspaces and the pictures of finished tiles, which the VAE's loop keeps until it blends them: those take
    the picture's bytes times `decoded_ratio`, and twice the picture's while rows are put together. With
    `memory_budget_bytes`, windows that are predicted to take more are out.

    Raises PlanError when no window is possible or none is within the budget (the message says what the least is), and
    UnsupportedError for a class whose tiling attributes are not known.
    """
    shape = _checked(vae, latent_shape)
    footprint = footprint_of(vae, shape)
    ratio, sample = _ratio(vae), _sample(vae, shape)
    frames, time = _time(vae, shape)
    return candidates(
        (shape[-2], shape[-1]),
        ratio,
        ranks,
        lambda window_px, overlap_px: possible(vae, window_px, overlap_px, sample),
        lambda window_lat: footprint.peak_bytes(window_lat[0] * window_lat[1]),
        memory_budget_bytes,
        least_lat=least_lat,
        least_overlap=least_overlap,
        scheduler=scheduler,
        cut=cut_of(vae),
        frames=frames,
        time=time,
    )


def price_window(
    vae: Any,
    latent_shape: Sequence[int],
    ranks: int,
    window_px: _Pixels,
    overlap_px: _Pixels,
    *,
    scheduler: Scheduler = "balanced",
) -> TilePlan:
    """What exactly this window and overlap (height, width, in pixels) cost; for the rest see `plan`.

    Raises PlanError, with the reason, when the VAE cannot have them.
    """
    shape = _checked(vae, latent_shape)
    sample = _sample(vae, shape)
    tilings = loop_tilings(vae, window_px, overlap_px, sample)
    cells = 1
    for tiling in tilings:
        cells *= max(len(tile) for tile in tiling.tiles)
    frames, time = _time(vae, shape)
    return price(
        TileGrid(tilings),
        _ratio(vae),
        ranks,
        window_px=(window_px[0], window_px[1]),
        overlap_px=(overlap_px[0], overlap_px[1]),
        scheduler=scheduler,
        frames=frames,
        time=time,
        predicted_bytes=footprint_of(vae, shape).peak_bytes(cells),
    )


def _checked(vae: Any, latent_shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(latent_shape) if isinstance(latent_shape, (tuple, list)) else ()
    if len(shape) not in (4, 5) or any(type(size) is not int or size < 1 for size in shape):
        given = tuple(latent_shape) if shape else type(latent_shape).__name__
        raise PlanError(f"latent_shape is {given}; it must be B C H W or B C F H W, all at least 1")
    if family_of(vae) is None:
        raise UnsupportedError(
            f"{type(vae).__name__} has no row in halotile.families, so its windows are not known; set them yourself"
        )
    return shape


def _ratio(vae: Any) -> int:
    family = family_of(vae)
    assert family is not None
    return family.ratio(vae)


def _sample(vae: Any, shape: tuple[int, ...]) -> _Pixels:
    ratio = _ratio(vae)
    return shape[-2] * ratio, shape[-1] * ratio


def _time(vae: Any, shape: tuple[int, ...]) -> tuple[int, DimTiling | None]:
    """Latent frames, and the chunks of them where the class's own loop over frames runs."""
    return (shape[2] if len(shape) == 5 else 1), temporal_chunks(vae, shape)

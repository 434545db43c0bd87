"""Why a strategy is chosen for a decode or encode: every number that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from halotile.decode.choose import no_tile_loop
from halotile.decode.footprint import footprint_of
from halotile.decode.patch import patched
from halotile.decode.rates import budget_of, rates_of
from halotile.decode.workload import workload_of
from halotile.errors import HalotileError, PlanError, UnsupportedError
from halotile.families import Half, check_loop, family_of
from halotile.families.cuts import temporal_chunks
from halotile.geometry.whole import require_whole
from halotile.planning import Scheduler
from halotile.planning.situation import Decision, Pair, Situation, Term, tiles_of
from halotile.planning.strategy import decide

# latent frames that are followed of a clip whose network has state from frame to frame: from the third on all are alike
_STEPS = 4


def explain(
    vae: Any,
    latent_shape: Sequence[int],
    ranks: int,
    *,
    half: Half = "decode",
    memory_budget_bytes: int | None = None,
    scheduler: Scheduler = "balanced",
) -> Decision:
    """What `strategy="auto"` does with latents of `latent_shape` (`B C H W`, `B C F H W`) on ranks like this one.

    Nothing of the result is computed, and no other rank is asked. `memory_budget_bytes`: what the activations of a rank
    may take; None is what is free on the VAE's GPU, or this machine's memory over `ranks`. With `half="encode"`,
    `latent_shape` is that of the pixels.

        decision = halotile.explain(pipe.vae, (1, 16, 21, 90, 160), 4)
        decision.strategy, decision.reason  # what runs, and why
        decision.predictions  # seconds and bytes of each way, and why it may not run
        decision.situation, decision.rates  # what they follow from

    Raises PlanError for a shape that cannot be, and UnsupportedError for a class without a row in `halotile.families`,
    or one that cannot be followed without data: `auto` then deals tiles where the VAE's tiling is on, and else runs it
    as it is.
    """
    shape = tuple(latent_shape) if isinstance(latent_shape, (tuple, list)) else ()
    if half not in get_args(Half):
        raise PlanError(f"half={half!r} is not known; choose one of {', '.join(get_args(Half))}")
    require_whole("ranks", ranks, least=1)
    if len(shape) not in (4, 5) or any(type(size) is not int or size < 1 for size in shape):
        given = shape or type(latent_shape).__name__
        raise PlanError(f"latent_shape is {given}; it must be B C H W or B C F H W, all at least 1")
    if family_of(vae) is None:
        raise UnsupportedError(f"{type(vae).__name__} has no row in halotile.families")
    device = next(iter(vae.parameters())).device
    budget = budget_of(device, ranks) if memory_budget_bytes is None else memory_budget_bytes
    situation = situation_of(vae, half, shape, ranks, scheduler, budget)
    return decide(situation, rates_of(vae, device))


def situation_of(
    vae: Any, half: Half, shape: tuple[int, ...], ranks: int, scheduler: Scheduler, budget: int | None
) -> Situation:
    """All that the choice depends on. `shape`: latents to decode, pixels to encode. Raises UnsupportedError."""
    family = family_of(vae)
    if family is None:
        raise UnsupportedError(f"{type(vae).__name__} has no row in halotile.families")
    ratio = family.ratio(vae)
    unit = ratio if half == "encode" else 1
    size = (max(1, shape[-2] // unit), max(1, shape[-1] // unit))
    short, times, steps = _shortened(vae, half, shape)
    # one of the chunks of a loop over frames is followed without the loop
    alone = {family.temporal.decode_flag: False} if half == "decode" and family.temporal and short != shape else {}
    with patched(vae, **alone):
        workload = workload_of(vae, half, short)
        peak = _peak(vae, half, short, 2 * workload.result * (times - 1))
    result = workload.result * times * size[0] * size[1]
    tiles, no_tile = _tiles(vae, half, shape, size, ratio)
    chunks = temporal_chunks(vae, shape) if half == "decode" else None
    return Situation(
        ranks=ranks,
        shape_lat=size,
        flops=(0.0, workload.flops[1] * times, workload.flops[2] * times),
        peak=peak,
        exchanges=round(workload.exchanges * steps),
        result_bytes=round(result),
        min_rows=family.min_tile_lat(vae, half),
        tiling=bool(getattr(vae, "use_tiling", False)),
        tiles=tiles,
        chunks=1 if chunks is None else chunks.count,
        no_tile=no_tile,
        budget_bytes=budget,
        scheduler=scheduler,
    )


def _shortened(vae: Any, half: Half, shape: tuple[int, ...]) -> tuple[tuple[int, ...], float, float]:
    """A clip of few frames to follow in place of a long one, which has so many times its work, and its steps.

    Only for classes that go through a clip in steps of equal work: a network with state from frame to frame, or a loop
    over frames. To follow all steps of 21 latent frames of Wan takes some ten seconds.
    """
    family = family_of(vae)
    if family is None or len(shape) != 5:
        return shape, 1.0, 1.0
    chunks = temporal_chunks(vae, shape) if half == "decode" else None
    if chunks is not None:
        lengths = [len(chunk) for chunk in chunks.tiles]
        return (*shape[:2], lengths[0], *shape[3:]), sum(lengths) / lengths[0], len(lengths)
    if family.causal is None or family.frames is None:
        return shape, 1.0, 1.0
    ratio = family.frames.ratio(vae)
    frames = 1 + (shape[2] - 1) * ratio if half == "decode" else shape[2]
    few = 1 + (_STEPS - 1) * ratio
    if frames <= few:
        return shape, 1.0, 1.0
    steps = 1 + (frames - 1) // ratio
    return (*shape[:2], _STEPS if half == "decode" else few, *shape[3:]), frames / few, steps / _STEPS


def _peak(vae: Any, half: Half, shape: tuple[int, ...], more: float) -> tuple[Term, ...]:
    """Terms of the peak; `more` bytes a latent cell are those of the frames that are not followed, held twice."""
    if half == "encode":
        return ()
    try:
        return tuple((fixed, each + more, pair) for fixed, each, pair in footprint_of(vae, shape).terms)
    except UnsupportedError:
        return ()


def _tiles(vae: Any, half: Half, shape: tuple[int, ...], size: Pair, ratio: int) -> tuple[tuple[Pair, ...], str]:
    """The tiles that the class's loop cuts, or would, in latents; and why they cannot be dealt."""
    missing = no_tile_loop(vae, [half])
    if missing is not None:
        return (), missing
    family = family_of(vae)
    assert family is not None
    if not family.layout.enters(vae, "decode", *size, ratio):
        return (), ""
    try:
        check_loop(vae, half, shape)
        tall, wide = family.layout.axes(vae, "decode", *size, ratio)
        return tiles_of(*([len(tile) for tile in axis.tiling.tiles] for axis in (tall, wide))), ""
    except HalotileError as error:
        if getattr(vae, "use_tiling", False):
            # whatever runs, the window that is set cannot be what is meant
            raise
        return (), str(error)

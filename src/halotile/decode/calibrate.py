"""Measure the rates that strategies are chosen by, on the ranks of a group and with the VAE itself."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Group, Ranks
from halotile.decode.functions import decode
from halotile.decode.options import Strategy
from halotile.decode.patch import patched
from halotile.decode.rates import keep_rates, rates_of_type, rates_path
from halotile.decode.workload import Workload, workload_of
from halotile.errors import PlanError, UnsupportedError
from halotile.families import family_of, takes_timestep
from halotile.geometry.whole import require_whole
from halotile.planning.situation import Rates, grown

STRATEGIES: tuple[Strategy, ...] = ("serial", "shard")
_MESSAGE_BYTES = 1 << 24


def calibrate(
    vae: Any,
    latent_shape: Sequence[int],
    group: Group | None = None,
    *,
    repeats: int = 3,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Rates:
    """Time whole and sharded decodes of `latent_shape` (`B C H W`, `B C F H W`) and of an eighth its height and width.

    Every rank of the group calls it. Of `repeats` the fastest counts, and of the ranks the slowest. What grows from the
    small decode to the large one is the rate, what does not is the fixed cost of a call, or of the places where a
    sharded call looks across rows. The first rank keeps the result for `strategy="auto"` (`rates.json`,
    `halotile.decode.known`). Raises PlanError for latents too small for that, and UnsupportedError for
    a class without a row in `halotile.families`.
    """
    ranks, shape = Ranks.of(group, timeout_s), tuple(latent_shape)
    with Call(ranks) as call:
        small = _checked(vae, shape, ranks.size, repeats)
        workload = workload_of(vae, "decode", shape)
        call.meet({"call": "calibrate", "class": type(vae).__name__, "shape": str(shape), "repeats": str(repeats)})
    weight = next(iter(vae.parameters()))
    seconds: dict[str, float] = {}
    tiling = {"use_tiling": False} if hasattr(vae, "use_tiling") else {}
    with patched(vae, **tiling):
        for name, size in (("small", small), ("large", shape)):
            latents = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
            own: dict[str, Any] = {"temb": latents.new_zeros(size[0])} if takes_timestep(vae) else {}
            for strategy in STRATEGIES if ranks.size > 1 else STRATEGIES[:1]:
                work = partial(decode, vae, latents, ranks, strategy, **own)
                seconds[f"{strategy} {name}"] = _slowest(work, ranks, weight.device, repeats)
    pass_on = partial(_pass_on, ranks, weight.device)
    carried = _slowest(pass_on, ranks, weight.device, repeats) if ranks.size > 1 else 0.0
    day = time.strftime("%Y-%m-%d", time.gmtime())
    source = f"calibrated {day} with {ranks.size} ranks and latents of {' x '.join(map(str, shape))}"
    default = rates_of_type(weight.device)
    rates = rates_from(workload, ranks.size, small[-2:], shape[-2:], seconds, carried, source, default)
    if ranks.rank == 0 and not keep_rates(vae, weight.device, rates):
        warnings.warn(f"the rates could not be kept: {rates_path()} cannot be written", stacklevel=2)
    return rates


def _checked(vae: Any, shape: tuple[int, ...], ranks: int, repeats: int) -> tuple[int, ...]:
    """The shape of the small decode. Raises PlanError and UnsupportedError."""
    require_whole("repeats", repeats, least=1)
    if len(shape) not in (4, 5) or any(type(size) is not int or size < 1 for size in shape):
        raise PlanError(f"latent_shape is {shape}; it must be B C H W or B C F H W, all at least 1")
    family = family_of(vae)
    if family is None:
        raise UnsupportedError(f"{type(vae).__name__} has no row in halotile.families")
    # as small as can be: its time is that which does not grow
    least = family.min_tile_lat(vae, "decode")
    rows, columns = max(ranks * least, shape[-2] // 8), max(least, shape[-1] // 8)
    if 2 * rows > shape[-2] or 2 * columns > shape[-1]:
        raise PlanError(
            f"latents of {shape} are too small: give at least {2 * rows} x {2 * columns}, twice what {ranks} ranks need"
        )
    return (*shape[:-2], rows, columns)


def rates_from(
    workload: Workload,
    ranks: int,
    small: Sequence[int],
    large: Sequence[int],
    seconds: dict[str, float],
    carried_s: float,
    source: str,
    default: Rates,
) -> Rates:
    """The rates that explain the seconds; see `calibrate`. One rank says nothing of sharding: that is `default`'s.

    Example: 1e9 and 4e9 operations in 0.11 and 0.41 s are 1e10 a second and 0.01 s a call.
    """
    few, many = (grown(workload.flops, math.prod(size)) for size in (small, large))
    flops_per_s, call_s = _line(few, many, seconds["serial small"], seconds["serial large"])
    if ranks == 1:
        return replace(default, flops_per_s=flops_per_s, call_s=call_s, source=f"{source}; sharding by defaults")
    shares = [math.ceil(size[0] / ranks) / size[0] for size in (small, large)]
    own = [few * shares[0], many * shares[1]]
    per_s, fixed_s = _line(own[0], own[1], seconds["shard small"], seconds["shard large"])
    exchange_s = max(0.0, fixed_s - call_s) / max(1, workload.exchanges)
    bytes_per_s = _MESSAGE_BYTES / max(carried_s, 1e-9)
    return Rates(flops_per_s, call_s, max(1.0, flops_per_s / per_s), exchange_s, bytes_per_s, source)


def _line(few: float, many: float, short: float, long: float) -> tuple[float, float]:
    """Operations a second, and the seconds that do not grow; all of them grow where the times are out of order."""
    if long <= short:
        return many / long, 0.0
    per_s = (many - few) / (long - short)
    fixed = short - few / per_s
    return (per_s, fixed) if fixed >= 0 else (many / long, 0.0)


def _slowest(work: Callable[[], object], ranks: Ranks, device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of some repeats, one before them to warm up, on the slowest rank."""
    taken = []
    for _ in range(repeats + 1):
        with Call(ranks) as call:
            call.meet({"call": "calibrate, a repeat"})
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    with Call(ranks) as call:
        return max(map(float, call.meet({"call": "calibrate, a result"}, str(min(taken[1:])))))


def _pass_on(ranks: Ranks, device: torch.device) -> None:
    """A large message to the next rank, and one from the rank before."""
    sent, got = (torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    sent.zero_()
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    with Call(ranks) as call:
        call.meet({"call": "calibrate, a message"})
        with call.shared_fate():
            ranks.transport.exchange([(after, sent)], [(before, got)])

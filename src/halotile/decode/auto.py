"""`strategy="auto"`: each rank says what it has, and all choose alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from halotile.comm import Ranks
from halotile.decode.carried import Carried
from halotile.decode.explain import situation_of
from halotile.decode.options import Options
from halotile.decode.rates import budget_of, rates_of
from halotile.errors import UnsupportedError
from halotile.families import Half, family_of
from halotile.planning.situation import Decision, Rates, Situation
from halotile.planning.strategy import decide


@dataclass(frozen=True)
class Offer:
    """What one rank brings to the choice: `situation` is the same on all but for its budget, `rates` may differ."""

    situation: Situation
    rates: Rates

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must have alike, by what may differ."""
        situation, (height, width) = self.situation, self.situation.shape_lat
        digest = hashlib.sha256(repr(situation.tiles).encode()).hexdigest()[:8]
        return {
            "plan": f"{height} x {width} latents, {len(situation.tiles)} tiles, {digest}",
            "tiling": "on" if situation.tiling else "off",
            "tiles": situation.no_tile or "can be dealt",
            "counted work": f"{situation.flops}, {situation.exchanges} exchanges, {situation.result_bytes} bytes",
            "counted memory": hashlib.sha256(repr(situation.peak).encode()).hexdigest()[:8],
        }

    @property
    def aside(self) -> str:
        """What they may have of their own."""
        return json.dumps({"budget_bytes": self.situation.budget_bytes, "rates": asdict(self.rates)})

    def settle(self, asides: Sequence[str]) -> Decision:
        """The choice, from what all ranks said aside: the least budget counts, and the first rank's rates."""
        said = [json.loads(aside) for aside in asides]
        budgets = [each["budget_bytes"] for each in said if each["budget_bytes"] is not None]
        situation = replace(self.situation, budget_bytes=min(budgets, default=None))
        return decide(situation, Rates(**said[0]["rates"]))


def offer_of(
    vae: Any, half: Half, x: torch.Tensor, options: Options, ranks: Ranks, carried: Carried | None = None
) -> Offer | None:
    """What this rank has for the choice; None where there is none, or too little is known of the class to make it.

    carried: `x` is a chunk of a clip, for the whole of which the choice is made, without hybrid.
    """
    if options.strategy != "auto" or options.tiling is not None or ranks.size == 1 or family_of(vae) is None:
        return None
    frames = carried.frames if carried is not None else None
    shape = tuple(x.shape) if frames is None else (*x.shape[:2], frames, *x.shape[3:])
    try:
        budget = budget_of(x.device, ranks.size)
        situation = situation_of(vae, half, shape, ranks.size, options.scheduler, budget)
    except UnsupportedError:
        return None
    return Offer(replace(situation, hybrid=carried is None), rates_of(vae, x.device))

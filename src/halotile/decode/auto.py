"""`strategy="auto"`: each rank says what it has, and all choose alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from halotile.comm import Ranks
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
    def fact(self) -> str:
        """What all ranks must have alike."""
        situation = replace(self.situation, budget_bytes=None)
        digest = hashlib.sha256(repr(situation).encode()).hexdigest()[:16]
        on = f"{len(situation.tiles)} tiles" if situation.tiled else "no tiles"
        return f"{situation.shape_lat[0]} x {situation.shape_lat[1]} latents, {on}, {digest}"

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
    vae: Any, half: Half, x: torch.Tensor, options: Options, ranks: Ranks, hybrid: bool = True
) -> Offer | None:
    """What this rank has for the choice; None where there is none, or too little is known of the class to make it.

    hybrid: whether that is one of the ways.
    """
    if options.strategy != "auto" or options.tiling is not None or ranks.size == 1 or family_of(vae) is None:
        return None
    shape = tuple(x.shape)
    try:
        budget = budget_of(x.device, ranks.size)
        situation = situation_of(vae, half, shape, ranks.size, options.scheduler, budget)
    except UnsupportedError:
        return None
    return Offer(replace(situation, hybrid=hybrid), rates_of(vae, x.device))

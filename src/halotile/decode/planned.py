"""What a call comes to: the plan that all ranks agree on before any of them works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from halotile.comm import Call
from halotile.decode.auto import Offer, offer_of
from halotile.decode.carried import Carried
from halotile.decode.choose import choose, prepare
from halotile.decode.deferred import Dealt, deal_loop
from halotile.decode.grid import GridPlan, plan_grid
from halotile.decode.hybrid import deal_shared
from halotile.decode.noise import Generators
from halotile.decode.options import Options
from halotile.decode.report import Exactness
from halotile.decode.shard import deal_rows
from halotile.decode.streams import forget_streams, refuse_open_stream
from halotile.decode.tile_checks import refuse_spatial
from halotile.errors import UnsupportedError
from halotile.families import Half, family_of, temporal_note
from halotile.planning.situation import Prediction
from halotile.spatial import SpatialSpec


@dataclass(frozen=True)
class Job:
    """One decode or encode as its caller asks for it.

    x: latents or pixels as they were given; cast: in the dtype that the VAE is given. dim: whose rows are dealt, from
    the back. work: the VAE's own call, of an input. values: further arguments. arguments: what those are, for the ranks
    to compare. carried: the state of a clip that `x` continues.
    """

    vae: Any
    half: Half
    x: torch.Tensor
    cast: torch.Tensor
    dim: int
    work: Callable[[Any], Any]
    values: tuple[Any, ...]
    arguments: str
    options: Options
    carried: Carried | None


@dataclass(frozen=True)
class Plan:
    """What is to run: a recorded loop with its owners, or rows of the input, or the call as it is; and why."""

    strategy: str
    reason: str
    dealt: Dealt | None = None
    shards: int = 1
    """How many ranks share each of the dealt calls."""
    spec: SpatialSpec | None = None
    grid: GridPlan | None = None
    predicted: Prediction | None = None
    """What `auto` chose it by."""

    @property
    def exactness(self) -> Exactness:
        """How equal the result is to one rank's."""
        if self.sharded:
            return "allclose"
        return "bitwise" if self.grid is None else self.grid.exactness

    @property
    def owners(self) -> tuple[int, ...] | None:
        """The rank of each tile, where there are tiles."""
        return self.dealt.owners if self.dealt is not None else self.grid.owners if self.grid is not None else None

    @property
    def calls(self) -> int:
        """How many tiles, or calls of a recorded loop, there are to run."""
        if self.grid is not None:
            return self.grid.grid.count
        return 0 if self.dealt is None else len(self.dealt.recording.calls)

    @property
    def sharded(self) -> bool:
        """Whether ranks share the rows of what a network is given."""
        return self.spec is not None or self.shards > 1

    @property
    def draws(self) -> bool:
        """Whether noise may be drawn; sharded calls and grids are not looked into beforehand."""
        return self.spec is not None or self.grid is not None or (self.dealt is not None and self.dealt.draws)

    @property
    def digest(self) -> str:
        """What all ranks must have alike."""
        if self.spec is not None:
            return f"rows of dim {self.spec.dim}: {self.spec.extents.sizes}"
        if self.grid is not None:
            return self.grid.digest
        return "" if self.dealt is None else self.dealt.digest


def settle(job: Job, call: Call, stack: ExitStack) -> Plan:
    """The plan of `job`, once all ranks have come and are found to ask for the same; the VAE is set for it.

    What can be refused from what is asked is refused before. Where `auto` has a choice, the ranks say what they have
    when they meet, and all choose alike from that.
    """
    options, ranks = job.options, call.ranks
    offer = offer_of(job.vae, job.half, job.cast, options, ranks, job.carried)
    plan = None
    if offer is None:
        strategy, reason = choose(job.vae, job.half, options, ranks)
        plan = _plan(job, call, stack, strategy, reason, options.shards_per_tile or 1)
    if plan is None or plan.draws:
        call.note(Generators(job.x.device, job.values).note())
    refuse_open_stream(ranks.transport)
    said = call.meet(_facts(job, plan, offer), offer.aside if offer else "")
    forget_streams(ranks.transport)
    if plan is None:
        assert offer is not None
        decision = offer.settle(said)
        plan = _plan(job, call, stack, decision.strategy, decision.reason, decision.best.shards_per_tile)
        whole = job.carried is None or job.carried.frames is None
        if plan.strategy == decision.strategy and whole:
            plan = replace(plan, predicted=decision.best)
    return plan


def loads_of_plan(job: Job, plan: Plan, receivers: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Work a rank, in cells of the input."""
    if plan.dealt is not None:
        return plan.dealt.loads
    if plan.grid is not None:
        return plan.grid.loads
    cells = job.x.numel() // job.x.shape[1]
    if plan.spec is not None:
        return tuple(rows * (cells // job.x.shape[job.dim]) for rows in plan.spec.extents.sizes)
    return tuple(cells * (rank in receivers) for rank in range(ranks))


def _plan(job: Job, call: Call, stack: ExitStack, strategy: str, reason: str, shards: int) -> Plan:
    vae, half, options, x = job.vae, job.half, job.options, job.cast
    if options.tiling is not None:
        refuse_spatial(job.values)
        with call.shared_fate():
            grid = plan_grid(vae, half, x, options.tiling, call.ranks.size, options.scheduler, job.work)
        return Plan(strategy, f"{reason}; {grid.text}{grid.notes}", grid=grid)
    shape = tuple(x.shape)
    reason += prepare(vae, half, shape, strategy, stack) + temporal_note(vae, half, shape)
    if strategy == "shard":
        extents = deal_rows(vae, half, x.shape[job.dim], call.ranks.size)
        return Plan(strategy, reason, spec=SpatialSpec(x.dim() + job.dim, extents))
    if strategy in ("tile", "hybrid"):
        deal = partial(deal_shared, shards) if shards > 1 else partial(deal_loop, carried=job.carried)
        try:
            with call.shared_fate():
                dealt = deal(vae, half, family_of(vae), call.ranks, options.scheduler, shape[-2:], partial(job.work, x))
            shared = f"; each tile's rows are shared by {shards} ranks" if shards > 1 else ""
            return Plan(strategy, reason + shared, dealt, shards)
        except UnsupportedError as error:
            if options.strategy != "auto":
                raise
            return Plan("serial", f"auto: serial, since {error}")
    return Plan(strategy, reason)


def _facts(job: Job, plan: Plan | None, offer: Offer | None) -> dict[str, str]:
    options = job.options
    return {
        "half": job.half,
        "class": type(job.vae).__name__,
        "shape": str(tuple(job.x.shape)),
        "dtype": str(job.x.dtype),
        "strategy": plan.strategy if plan else "auto",
        "shards_per_tile": str(options.shards_per_tile),
        "deliver": f"{options.deliver} (driver {options.driver})",
        "strict": str(options.strict),
        "plan": plan.digest if plan else "",
        "arguments": job.arguments,
        **(offer.facts if offer else {}),
    }

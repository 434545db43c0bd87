"""Run one piece of work on whole tensors, and on sharded ones on every rank, and hold the results together."""

from dataclasses import dataclass, field

import torch

from halotile.comm import Counters, Ranks, run_virtual
from halotile.geometry import Extents
from halotile.spatial import Ledger, SpatialSpec, SpatialTensor

MODES = (torch.no_grad, torch.inference_mode)


@dataclass(frozen=True)
class Cut:
    """How a tensor is sharded: its dim, in how many blocks, with which extents (evenly when there are none)."""

    dim: int
    blocks: int = 1
    sizes: tuple[int, ...] | None = None

    def apply(self, tensor, ledger):
        ranks, dim = ledger.ranks, self.dim % tensor.dim()
        rows = tensor.shape[dim] // self.blocks
        extents = Extents.even(rows, ranks.size) if self.sizes is None else Extents(self.sizes)
        spec = SpatialSpec(dim, extents, self.blocks)
        return SpatialTensor(spec.take(tensor, dim, ranks.rank), spec, ledger)


@dataclass
class Outcome:
    """What the work returned (sharded results made whole), and what it cost each rank."""

    results: list[torch.Tensor]
    sharded: list[bool]
    gathers: dict[str, int]
    attention_gathers: int
    traffic: list[Counters] = field(default_factory=list)

    @property
    def collectives(self):
        return self.traffic[0].collectives


def on_each_rank(ranks, work, tensors, cuts, mode=torch.no_grad, strict=True):
    """The outcome on one rank of a group, whatever its transport."""
    ledger = Ledger(ranks, strict)
    with mode():
        sharded = [t if cut is None else cut.apply(t, ledger) for t, cut in zip(tensors, cuts, strict=True)]
        before = ranks.counters.snapshot()
        out = work(*sharded)
        traffic = ranks.counters.since(before)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        is_sharded = [isinstance(part, SpatialTensor) for part in out]
        results = [part.full().clone() if isinstance(part, SpatialTensor) else part.clone() for part in out]
    return Outcome(results, is_sharded, dict(ledger.gathers), ledger.attention_gathers, [traffic])


def on_virtual(n, work, tensors, cuts, mode=torch.no_grad, strict=True):
    """The outcome on n virtual ranks, which must agree on every bit of it and on the number of collectives."""

    def one(transport):
        return on_each_rank(Ranks(transport), work, tensors, cuts, mode, strict)

    return agreed(run_virtual(n, one, timeout_s=20))


def agreed(outcomes):
    """The one outcome of all ranks."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.sharded == first.sharded
        assert (other.gathers, other.attention_gathers) == (first.gathers, first.attention_gathers)
        assert other.traffic[0].collectives == first.collectives
        for a, b in zip(first.results, other.results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    first.traffic = [outcome.traffic[0] for outcome in outcomes]
    return first


def one_rank(work, tensors, mode=torch.no_grad):
    """What the work returns for whole tensors."""
    with mode():
        out = work(*tensors)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def filled(*shape, seed=0, mean=0.0, std=1.0):
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std + mean

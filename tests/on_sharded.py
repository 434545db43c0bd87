"""One function on a sharded tensor on every rank, virtual or gloo, for the tests of `spatial/`."""

from __future__ import annotations

import itertools

import torch
from ranks import run_ranks

from halotile.comm import Ranks, run_virtual
from halotile.geometry import Extents
from halotile.spatial import SpatialTensor

GUARDS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def filled(*shape, dtype=torch.float32, seed=0):
    """Random numbers that are the same on every rank, whatever the global generator did."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uneven(total, ranks):
    """Extents that grow with the rank; of three ranks and more, the first has no rows."""
    weights = [max(0, 2 * rank - 1) for rank in range(ranks)] if ranks > 2 else [1] * ranks
    seams = [total * sum(weights[:rank]) // sum(weights) for rank in range(ranks + 1)]
    return Extents(tuple(after - before for before, after in itertools.pairwise(seams)))


def on_sharded(kind, n, x, dim, work, extents=None, guard="no_grad"):
    """What `work(x)` is with `x` sharded over n ranks, whole, and the gathers by operation. All ranks must agree.

    `work` returns a tensor, or a tuple of tensors.
    """
    if kind == "virtual":
        results = run_virtual(n, lambda transport: _on_rank(Ranks(transport, 5.0), x, dim, work, extents, guard), 5.0)
    else:
        results = run_ranks(_on_group, n, x, dim, work, extents, guard, timeout=60.0)
    first, gathers = results[0]
    for out, counted in results:
        assert counted == gathers
        assert len(out) == len(first)
        assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True))
    return (first[0] if len(first) == 1 else first), gathers


def _on_group(group, *args):
    return _on_rank(Ranks.of(group, 20.0), *args)


def _on_rank(ranks, x, dim, work, extents, guard):
    with GUARDS[guard]():
        sharded = SpatialTensor.shard(x, ranks, dim, extents)
        out = work(sharded)
        parts = out if isinstance(out, tuple) else (out,)
        whole = tuple(part.full() if isinstance(part, SpatialTensor) else part for part in parts)
        return tuple(part.clone() for part in whole), dict(sharded.ledger.gathers)

"""Rows that change hands: the whole of a sharded tensor, another dealing of it, any rows of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halotile.comm import fetch_rows
from halotile.geometry import Extents, Interval
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor


def fetch(x: SpatialTensor, wanted: Sequence[Interval]) -> torch.Tensor:
    """This rank's wanted rows of `x`; with several blocks, of each block. See `comm.fetch_rows`."""
    spec = x.spec
    # by the global strides: the local ones of a band of one row say nothing, and ranks would part ways
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    if spec.blocks == 1:
        return fetch_rows(x.local, spec.dim, spec.extents, wanted, x.ranks, order)
    rows = spec.extents.sizes[x.ranks.rank]
    split = torch.unflatten(x.local, spec.dim, (spec.blocks, rows))
    order = [d + (d > spec.dim) for d in order]
    order.insert(order.index(spec.dim) + 1, spec.dim + 1)
    return fetch_rows(split, spec.dim + 1, spec.extents, wanted, x.ranks, order).flatten(spec.dim, spec.dim + 1)


def whole(x: SpatialTensor) -> torch.Tensor:
    """The whole tensor on every rank."""
    return fetch(x, [Interval(0, x.spec.extents.total)] * x.ranks.size)


def gather(x: SpatialTensor, operation: str) -> torch.Tensor:
    """The whole tensor on every rank, counted under `operation`, which has no rule."""
    x.ledger.gathered(operation)
    return whole(x)


def redistribute(x: SpatialTensor, extents: Extents) -> SpatialTensor:
    """`x` with other rows on each rank; only those that change hands travel."""
    if extents == x.spec.extents:
        return x
    return x.like(fetch(x, extents.intervals), x.spec.with_extents(extents))


def sole_owner(spec: SpatialSpec) -> int | None:
    """The rank that has all rows, if there is one."""
    having = [rank for rank, size in enumerate(spec.extents.sizes) if size]
    return having[0] if len(having) == 1 else None


def resharded(x: SpatialTensor, dim: int) -> SpatialTensor:
    """`x`, all of which one rank has, as sharded along another dim: nothing travels."""
    owner = sole_owner(x.spec)
    assert owner is not None
    sizes = [0] * x.ranks.size
    sizes[owner] = x.shape[dim]
    shape = list(x.shape)
    if x.ranks.rank != owner:
        shape[dim] = 0
    local = x.local if x.ranks.rank == owner else x.local.new_empty(shape)
    return x.like(local, SpatialSpec(dim, Extents(tuple(sizes))), x.stride())


def pick_rows(x: SpatialTensor, wanted: Sequence[Sequence[int]]) -> torch.Tensor:
    """For each rank, any rows in any order, also repeated: `wanted[rank]` names those of `rank`. For one block.

    The slow and general way, for flips, wraps and borders; what travels is exactly the rows that a rank lacks.
    """
    spec, me = x.spec, x.ranks.rank
    assert spec.blocks == 1
    local, dim, extents = x.local, spec.dim, spec.extents
    own = extents.interval(me)

    def rows_of(numbers: Sequence[int], first: int = 0) -> torch.Tensor:
        index = torch.tensor([number - first for number in numbers], dtype=torch.int64)
        return local.index_select(dim, index.to(local.device, non_blocking=True))

    def lacking(rank: int) -> list[list[int]]:
        """The rows that `rank` must be sent, by their owners."""
        by_owner: list[list[int]] = [[] for _ in range(x.ranks.size)]
        for row in sorted(set(wanted[rank])):
            if row not in extents.interval(rank):
                by_owner[extents.owner(row)].append(row)
        return by_owner

    sends = [(peer, rows_of(lacking(peer)[me], own.start).contiguous()) for peer in x.ranks.others]
    mine = lacking(me)
    receives, have = [], list(range(own.start, own.stop))
    for peer in x.ranks.others:
        shape = list(local.shape)
        shape[dim] = len(mine[peer])
        receives.append((peer, local.new_empty(shape)))
        have += mine[peer]
    x.ranks.transport.exchange(sends, receives)
    pool = torch.cat([local, *(part for _, part in receives if part.numel())], dim) if any(mine) else local
    where = {row: place for place, row in enumerate(have)}
    index = torch.tensor([where[row] for row in wanted[me]], dtype=torch.int64)
    return pool.index_select(dim, index.to(local.device, non_blocking=True))


def one_block(x: SpatialTensor) -> SpatialTensor:
    """`x` with its sharded dim dealt evenly in one piece, where it was a merge of blocks: rows of all blocks travel."""
    spec = x.spec
    if spec.blocks == 1:
        return x
    owned = spec.extents.sizes[x.ranks.rank]
    plain = SpatialSpec(spec.dim, spec.extents)
    blocks = [x.like(part, plain) for part in torch.unflatten(x.local, spec.dim, (spec.blocks, owned)).unbind(spec.dim)]
    even = even_spec(spec.dim, spec.size, x.ranks.size)
    return x.like(splice(blocks, spec.dim, even.extents), even)


def splice(parts: Sequence[SpatialTensor | torch.Tensor], dim: int, extents: Extents) -> torch.Tensor:
    """This rank's rows, by `extents`, of tensors put one after the other along `dim`.

    The sharded ones have one block, and are sharded along `dim`; plain ones are the same on every rank.
    """
    rank = next(part.ranks.rank for part in parts if isinstance(part, SpatialTensor))
    first, local = 0, []
    for part in parts:
        size = part.shape[dim]
        wanted = [Interval(0, size).intersect(rows.shift(-first)) for rows in extents.intervals]
        if isinstance(part, SpatialTensor):
            local.append(fetch(part, wanted))
        else:
            local.append(part.narrow(dim, wanted[rank].start, len(wanted[rank])))
        first += size
    return torch.cat(local, dim)


def even_spec(dim: int, total: int, ranks: int) -> SpatialSpec:
    """The even dealing of a fresh dim."""
    return SpatialSpec(dim, Extents.even(total, ranks))

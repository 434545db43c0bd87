"""Parts of a dim: slice, select, split, unbind. A part of a sharded tensor shares its local memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.geometry import Extents, Interval
from halotile.spatial.move import fetch, one_block
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.slice.Tensor)
def slice_(op: Op, x: SpatialTensor, dim: int, start: int | None, end: int | None, step: int) -> Any:
    """A part of a dim. Of the sharded one, each rank keeps those of its rows that are in it."""
    dim %= x.dim()
    strides = [stride * step if d == dim else stride for d, stride in enumerate(x.stride())]
    if dim != x.spec.dim:
        return x.like(run(op, x.local, dim, start, end, step), None, strides)
    first, stop, _ = slice(start, end).indices(x.spec.size)
    stop = max(first, stop)
    if x.spec.blocks > 1:
        blocks = _whole_blocks(x, first, stop, step)
        if blocks is not None:
            return blocks
        original, x = x.local, one_block(x)
        x.ledger.keep_view(x.local, original)
        strides = [stride * step if d == dim else stride for d, stride in enumerate(x.stride())]
    begin, rows = zip(*(_inside(own, first, stop, step) for own in x.spec.extents.intervals), strict=True)
    me = x.ranks.rank
    local = run(op, x.local, dim, begin[me], begin[me] + (rows[me] - 1) * step + 1, step) if rows[me] else None
    return x.like(x.local.narrow(dim, 0, 0) if local is None else local, SpatialSpec(dim, Extents(rows)), strides)


@rule(aten.select.int)
def select(op: Op, x: SpatialTensor, dim: int, index: int) -> Any:
    """One index of a dim. One row of the sharded dim goes to all ranks: a copy, which may not be written to."""
    dim %= x.dim()
    spec = x.spec
    if dim != spec.dim:
        return x.like(run(op, x.local, dim, index), spec.at(spec.dim - (dim < spec.dim)), _without(x, dim))
    if not -spec.size <= index < spec.size:
        raise IndexError(f"index {index} is out of range for a dim of size {spec.size}")
    block, row = divmod(index % spec.size, spec.extents.total)
    result = fetch(x, [Interval(row, row + 1)] * x.ranks.size).select(dim, block)
    x.ledger.keep_view(result, x.local)
    return result


@rule(aten.split.Tensor)
def split(op: Op, x: SpatialTensor, size: int, dim: int) -> Any:
    """Parts of equal size along a dim."""
    total = x.shape[dim]
    return _parts(x, [min(size, total - first) for first in range(0, total, size)], dim) if size else NotImplemented


@rule(aten.split_with_sizes.default)
def split_with_sizes(op: Op, x: SpatialTensor, sizes: Sequence[int], dim: int) -> Any:
    """Parts of given sizes along a dim."""
    return _parts(x, sizes, dim)


@rule(aten.unbind.int)
def unbind(op: Op, x: SpatialTensor, dim: int) -> Any:
    """All indices of a dim that is not sharded."""
    dim %= x.dim()
    if dim == x.spec.dim:
        return NotImplemented
    spec = x.spec.at(x.spec.dim - (dim < x.spec.dim))
    return [x.like(part, spec, _without(x, dim)) for part in x.local.unbind(dim)]


def _without(x: SpatialTensor, dim: int) -> list[int]:
    return [stride for d, stride in enumerate(x.stride()) if d != dim]


def _inside(own: Interval, first: int, stop: int, step: int) -> tuple[int, int]:
    """The first of a rank's own rows (counted from its first) that a slice takes, and how many it takes."""
    begin = first + -(-max(own.start - first, 0) // step) * step
    return begin - own.start, max(0, -(-(min(own.stop, stop) - begin) // step))


def _whole_blocks(x: SpatialTensor, first: int, stop: int, step: int) -> SpatialTensor | None:
    """Of a merged dim, blocks that are taken whole; None for a slice through blocks, which has another layout."""
    dim, rows = x.spec.dim, x.spec.extents
    if step != 1 or first % rows.total or stop % rows.total or first == stop:
        return None
    block, blocks = first // rows.total, (stop - first) // rows.total
    owned = rows.sizes[x.ranks.rank]
    return x.like(x.local.narrow(dim, block * owned, blocks * owned), SpatialSpec(dim, rows, blocks), x.stride())


def _parts(x: SpatialTensor, sizes: Sequence[int], dim: int) -> Any:
    dim %= x.dim()
    if dim != x.spec.dim:
        return [x.like(part, None, x.stride()) for part in x.local.split_with_sizes(list(sizes), dim)]
    parts, first = [], 0
    for size in sizes:
        parts.append(slice_(aten.slice.Tensor, x, dim, first, first + size, 1))
        first += size
    return parts

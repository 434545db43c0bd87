"""Largest and smallest values, and where they are: local, or each rank's best and one collective."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch

from halotile.comm import Ranks
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.reductions import all_parts, along_others, combined, reduced_dims, stand_in
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(op: Op, x: SpatialTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Largest or smallest value; NaN if there is one."""
    if not x.numel():
        return NotImplemented
    all_dims = reduced_dims(x, dims)
    if x.spec.dim not in all_dims:
        return along_others(op, x, all_dims, keepdim, (dims, keepdim))
    find = torch.amax if op in (aten.amax.default, aten.max.default) else torch.amin
    local = x.local if x.local.numel() else stand_in(x, _worst(x.dtype, find is torch.amax))
    return combined(find(local, all_dims, keepdim), x.ranks, lambda parts: find(parts, 0))


@rule(aten.aminmax.default)
def both_extremes(op: Op, x: SpatialTensor, dim: int | None, keepdim: bool) -> Any:
    """Smallest and largest value."""
    dims = None if dim is None else [dim]
    found = extreme(aten.amin.default, x, dims, keepdim), extreme(aten.amax.default, x, dims, keepdim)
    return NotImplemented if NotImplemented in [type(part) for part in found] or not x.numel() else found


@rule(aten.max.dim, aten.min.dim)
def extreme_and_index(op: Op, x: SpatialTensor, dim: int, keepdim: bool) -> Any:
    """Largest or smallest value along a dim, and the first row that has it."""
    if not x.numel():
        return NotImplemented
    dim %= max(x.dim(), 1)
    if x.spec.dim != dim:
        return along_others(op, x, (dim,), keepdim, (dim, keepdim))
    largest = op is aten.max.dim
    local = x.local if x.local.numel() else stand_in(x, _worst(x.dtype, largest))
    values, rows = run(op, local, dim, keepdim)
    return _first_of_best(values, _global_rows(rows, x.spec, x.ranks.rank, x.local.numel() == 0), x.ranks, largest)


@rule(aten.argmax.default, aten.argmin.default)
def index_of_extreme(op: Op, x: SpatialTensor, dim: int | None, keepdim: bool) -> Any:
    """The first row, or the first element of all, that has the largest or smallest value."""
    if not x.numel():
        return NotImplemented
    largest = op is aten.argmax.default
    find = aten.max.dim if largest else aten.min.dim
    if dim is not None:
        if x.spec.dim != dim % max(x.dim(), 1):
            return along_others(op, x, (dim % x.dim(),), keepdim, (dim, keepdim))
        return extreme_and_index(find, x, dim, keepdim)[1]
    empty = x.local.numel() == 0
    local = stand_in(x, _worst(x.dtype, largest)) if empty else x.local
    values, place = run(find, local.flatten(), 0, False)
    inner, rows = prod(local.shape[x.spec.dim + 1 :]), local.shape[x.spec.dim]
    outer, row, rest = place // (inner * rows), place // inner % rows, place % inner
    row = _global_rows(row, x.spec, x.ranks.rank, empty)
    found = _first_of_best(values, (outer * x.spec.size + row) * inner + rest, x.ranks, largest)[1]
    return found.view([1] * x.dim()) if keepdim else found


def _first_of_best(values: torch.Tensor, index: torch.Tensor, ranks: Ranks, largest: bool) -> Any:
    """Of each rank's best value and its global index, the best, and the lowest index that has it."""
    wire = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in (values, index)])
    parts = all_parts(wire, ranks)
    split = values.numel() * values.element_size()
    all_values, all_indices = (
        columns.clone(memory_format=torch.contiguous_format).view(part.dtype).view(-1, *part.shape)
        for columns, part in ((parts[:, :split], values), (parts[:, split:], index))
    )
    best = torch.amax(all_values, 0) if largest else torch.amin(all_values, 0)
    # NaN is the best value, and equal to nothing
    has_it = (all_values == best) | (all_values.isnan() & best.isnan())
    last = torch.iinfo(index.dtype).max
    found = all_indices.where(has_it, last).amin(0)
    result = torch.return_types.max if largest else torch.return_types.min
    return result((best, found))


def _global_rows(rows: torch.Tensor, spec: SpatialSpec, rank: int, empty: bool) -> torch.Tensor:
    """Global row numbers of `rank`'s local ones; of a stand-in for no rows, one behind all."""
    own = spec.extents.interval(rank)
    if empty:
        return torch.full_like(rows, spec.size)
    return rows // len(own) * spec.extents.total + rows % len(own) + own.start


def _worst(dtype: torch.dtype, largest: bool) -> Any:
    """What is never larger (smaller) than anything else."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -inf if largest else inf
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max

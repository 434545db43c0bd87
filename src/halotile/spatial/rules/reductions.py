"""Reductions: local over other dims than the sharded one; over it, each rank's part and one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch

from halotile.comm import Ranks
from halotile.spatial.pointwise import rows_for
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.channel_norm import norm_over
from halotile.spatial.rules.statistics import merged_moments
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten
Combine = Callable[[torch.Tensor], torch.Tensor]
"""how parts that are stacked along a new first dim become one"""


@rule(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def total(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    """Sum: partial sums in the accumulate dtype, rounded once."""
    dims, keepdim, dtype = rest if len(rest) == 3 else (None, False, rest[0])
    dims = reduced_dims(x, dims)
    if x.spec.dim not in dims:
        return along_others(op, x, dims, keepdim, rest)
    dtype = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    part = (torch.nansum if op is aten.nansum.default else torch.sum)(x.local, dims, keepdim, dtype=_wide(dtype))
    return _added(part, x.ranks).to(dtype)


@rule(aten.mean.default, aten.mean.dim)
def mean(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    """Mean: the sum over the global count."""
    dims, keepdim, dtype = rest if len(rest) == 3 else (None, False, rest[0])
    dims, dtype = reduced_dims(x, dims), dtype or x.dtype
    if x.spec.dim not in dims:
        return along_others(op, x, dims, keepdim, rest)
    if not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented
    part = torch.sum(x.local, dims, keepdim, dtype=_wide(dtype))
    return _added(part, x.ranks).div_(prod(x.shape[d] for d in dims)).to(dtype)


@rule(aten.prod.default, aten.prod.dim_int)
def product(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    """Product: partial products in the accumulate dtype, rounded once."""
    dim, keepdim, dtype = rest if len(rest) == 3 else (None, False, rest[0])
    if dim is not None and x.spec.dim != dim % x.dim():
        return along_others(op, x, (dim % x.dim(),), keepdim, rest)
    dtype = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    wide = _wide(dtype)
    part = torch.prod(x.local, dtype=wide) if dim is None else torch.prod(x.local, dim, keepdim, dtype=wide)
    return combined(part, x.ranks, lambda parts: parts.prod(0)).to(dtype)


@rule(aten.equal.default)
def equal(op: Op, x: Any, other: Any) -> Any:
    """Whether all elements are equal: torch tags it pointwise, but what it says must not differ by rank."""
    like = x if isinstance(x, SpatialTensor) else other
    if x.shape != other.shape:
        return False
    same = torch.tensor([torch.equal(*(rows_for(t, like.dim(), like.spec, str(op), like) for t in (x, other)))])
    return bool(like.ranks.transport.all_reduce(same.to(like.device, torch.int32), "min"))


@rule(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def logical(op: Op, x: SpatialTensor, dims: Any = None, keepdim: bool = False) -> Any:
    """Whether any, or all, are true."""
    all_dims = reduced_dims(x, [dims] if isinstance(dims, int) else dims)
    if x.spec.dim not in all_dims:
        return along_others(op, x, all_dims, keepdim, (dims, keepdim))
    ask = torch.any if "any" in str(op) else torch.all
    return combined(ask(x.local, all_dims, keepdim), x.ranks, lambda parts: ask(parts, 0).to(parts.dtype))


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(op: Op, x: SpatialTensor, dims: Any, correction: Any, keepdim: bool) -> Any:
    """Variance: means and squared deviations of all ranks, merged."""
    all_dims = reduced_dims(x, dims)
    if x.spec.dim not in all_dims:
        return along_others(op, x, all_dims, keepdim, (dims, correction, keepdim))
    if not x.numel() or not x.dtype.is_floating_point:
        return NotImplemented
    elements = prod(x.shape[d] for d in all_dims)
    counts = [elements // x.spec.size * x.spec.local_size(rank) for rank in range(x.ranks.size)]
    mean, m2 = merged_moments(x.local, all_dims, counts, x.ledger)
    spread = m2 / max(elements - (1 if correction is None else correction), 0)
    if "std" in str(op):
        spread = spread.sqrt()
    shape = [1 if d in all_dims else size for d, size in enumerate(x.shape) if keepdim or d not in all_dims]
    spread, mean = (part.view(shape).to(x.dtype) for part in (spread, mean))
    return (spread, mean) if "mean" in str(op) else spread


@rule(aten.linalg_vector_norm.default)
def vector_norm(op: Op, x: SpatialTensor, order: Any, dims: Any, keepdim: bool, dtype: Any) -> Any:
    """The norm of the ranks' norms, for any order; of order 0 their sum."""
    all_dims = reduced_dims(x, dims)
    if x.spec.dim not in all_dims:
        if len(all_dims) == 1 and order == 2 and dtype is None and x.local.numel():
            quick = norm_over(x.local, all_dims[0], keepdim)
            if quick is not None:
                return x.like(quick, x.spec.at(x.spec.dim - (not keepdim and all_dims[0] < x.spec.dim)))
        return along_others(op, x, all_dims, keepdim, (order, dims, keepdim, dtype))
    if not x.numel():
        return NotImplemented
    # no rows: what does not change the norm of the others
    local = x.local if x.local.numel() else stand_in(x, inf if order < 0 else 0)
    part = torch.linalg.vector_norm(local, order, all_dims, keepdim, dtype=_wide(dtype or x.dtype))
    result = combined(part, x.ranks, lambda p: p.sum(0) if order == 0 else torch.linalg.vector_norm(p, order, 0))
    return result.to((dtype or x.dtype).to_real())


@rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(op: Op, x: SpatialTensor, order: Any, *rest: Any) -> Any:
    """The older spellings of `linalg_vector_norm`."""
    dims, keepdim = rest[:2] if "dim" in op._overloadname else (None, False)
    dtype = rest[-1] if "dtype" in op._overloadname else None
    values = (2 if order is None else order, dims, keepdim, dtype)
    return vector_norm(aten.linalg_vector_norm.default, x, *values)


@rule(aten.logsumexp.default)
def logsumexp(op: Op, x: SpatialTensor, dims: Any, keepdim: bool) -> Any:
    """That of the ranks' results."""
    all_dims = reduced_dims(x, dims)
    if x.spec.dim not in all_dims:
        return along_others(op, x, all_dims, keepdim, (dims, keepdim))
    if not x.numel() or not x.dtype.is_floating_point:
        return NotImplemented
    part = torch.logsumexp(x.local.to(_wide(x.dtype)), all_dims, keepdim)
    return combined(part, x.ranks, lambda parts: torch.logsumexp(parts, 0)).to(x.dtype)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(op: Op, x: SpatialTensor, dims: Any) -> Any:
    """How many are not zero."""
    all_dims = reduced_dims(x, [dims] if isinstance(dims, int) else dims)
    if x.spec.dim not in all_dims:
        return along_others(op, x, all_dims, False, (dims,))
    return _added(torch.count_nonzero(x.local, all_dims), x.ranks)


def reduced_dims(x: SpatialTensor, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The dims that a reduction names, counted from the front; all for none."""
    return tuple(d % x.dim() for d in dims) if dims else tuple(range(x.dim()))


def along_others(op: Op, x: SpatialTensor, dims: Sequence[int], keepdim: bool, rest: Sequence[Any]) -> Any:
    """Run a reduction over other dims than the sharded one on this rank's rows."""
    gone = 0 if keepdim else sum(d < x.spec.dim for d in dims)
    spec = x.spec.at(x.spec.dim - gone)
    if x.local.numel() or not x.numel():
        result = run(op, x.local, *rest)
    else:
        # most reductions refuse tensors without elements: one row stands in
        result = run(op, stand_in(x, 0), *rest)
        result = (
            tuple(p.narrow(spec.dim, 0, 0) for p in result)
            if isinstance(result, tuple)
            else result.narrow(spec.dim, 0, 0)
        )
    if isinstance(result, tuple):
        return tuple(x.like(part, spec) for part in result)
    return x.like(result, spec)


def all_parts(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The parts of all ranks, stacked in rank order, with one collective for any dtype."""
    if ranks.size == 1:
        return part[None]
    # bytes: process groups do not carry every dtype
    wire = part.contiguous().flatten().view(torch.uint8)
    return torch.stack(ranks.transport.all_gather(wire)).view(part.dtype).view(ranks.size, *part.shape)


def combined(part: torch.Tensor, ranks: Ranks, combine: Combine) -> torch.Tensor:
    return combine(all_parts(part, ranks))


def _added(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    if ranks.size == 1:
        return part
    if part.dtype.is_floating_point or part.dtype in (torch.int32, torch.int64):
        return ranks.transport.all_reduce(part)
    # process groups do not add up every dtype
    return all_parts(part, ranks).sum(0, dtype=part.dtype)


def stand_in(x: SpatialTensor, value: Any) -> torch.Tensor:
    """One row of `value` where this rank has none."""
    shape = [1 if d == x.spec.dim else size for d, size in enumerate(x.shape)]
    return x.local.new_full(shape, value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

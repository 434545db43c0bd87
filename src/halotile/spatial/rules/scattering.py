"""Writes: where index tensors say, through masks, from other tensors, of one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.spatial.pointwise import pointwise, rows_for
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.indexing import indexed_spec, is_sharded, result_dims
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten

# elementwise, though torch does not tag them so
rule(
    aten.copy_.default,
    aten.copy.default,
    aten._prelu_kernel.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.zero_.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.masked_fill.Tensor,
)(pointwise)


@rule(aten.index_put_.default, aten.index_put.default)
def index_put(
    op: Op, x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool
) -> Any:
    """Written by index tensors on dims that are not sharded, or one value by a mask."""
    if not isinstance(x, SpatialTensor):
        return NotImplemented
    mask = _only_mask(indices)
    if mask is not None and not values.dim() and not is_sharded(values):
        first, bools = mask
        if first <= x.spec.dim < first + bools.dim():
            rows = rows_for(bools, bools.dim(), x.spec.at(x.spec.dim - first), str(op), x)
            return _written(op, x, [None] * first + [rows], values, accumulate)
    if any(is_sharded(item) for item in indices):
        return NotImplemented
    found = indexed_spec(x, indices)
    if found is None:
        return NotImplemented
    ndim = result_dims(x, indices)
    if values.dim() > ndim:
        return NotImplemented
    return _written(op, x, indices, rows_for(values, ndim, found, str(op), x), accumulate)


@rule(aten.index_copy_.default, aten.index_copy.default)
def index_copy(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """Slices of a dim that is not sharded, from a tensor."""
    return _along(op, x, dim, index, source)


@rule(aten.index_add_.default, aten.index_add.default)
def index_add(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: Any) -> Any:
    """Slices of a tensor added to those of a dim that is not sharded."""
    return _along(op, x, dim, index, source, alpha)


@rule(aten.index_fill_.int_Scalar, aten.index_fill.int_Scalar, aten.index_fill_.int_Tensor, aten.index_fill.int_Tensor)
def index_fill(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """One value in slices of a dim that is not sharded."""
    if not isinstance(x, SpatialTensor) or is_sharded(index) or is_sharded(value) or dim % x.dim() == x.spec.dim:
        return NotImplemented
    return _written(op, x, dim, index, value)


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_.reduce,
    aten.scatter_.value_reduce,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
)
def scatter(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *rest: Any) -> Any:
    """Elements written where an index tensor says, along another dim than the sharded one."""
    if not isinstance(x, SpatialTensor) or dim % x.dim() == x.spec.dim:
        return NotImplemented
    spec = x.spec
    tensors = [value for value in (index, source) if isinstance(value, torch.Tensor)]
    if any(value.dim() != x.dim() or value.shape[spec.dim] != spec.size for value in tensors):
        return NotImplemented
    rows = [rows_for(value, x.dim(), spec, str(op), x) for value in (index, source)]
    return _written(op, x, dim, *rows, *rest)


def _along(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *rest: Any) -> Any:
    if not isinstance(x, SpatialTensor) or is_sharded(index) or dim % x.dim() == x.spec.dim or source.dim() != x.dim():
        return NotImplemented
    if source.shape[x.spec.dim] != x.spec.size:
        return NotImplemented
    return _written(op, x, dim, index, rows_for(source, x.dim(), x.spec, str(op), x), *rest)


def _written(op: Op, x: SpatialTensor, *values: Any) -> SpatialTensor:
    """`x` itself where `op` writes to it."""
    result = run(op, x.local, *values)
    return x if result is x.local else x.like(result)


def _only_mask(indices: Sequence[torch.Tensor | None]) -> tuple[int, torch.Tensor] | None:
    """The one index that there is and its first dim, if it is a mask."""
    given = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    return given[0] if len(given) == 1 and given[0][1].dtype == torch.bool else None

"""Operations on each element by itself, with broadcasting: they run on the local rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.spatial.move import even_spec, gather, redistribute, resharded, sole_owner, whole
from halotile.spatial.registry import Op, run, written
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor


def pointwise(op: Op, *values: Any) -> Any:
    """Run an elementwise `op` on this rank's rows of all its arguments.

    The rows are those of what is written to, else of the first sharded argument that is not broadcast along them. An
    argument that is sharded otherwise is dealt anew, or gathered and counted when another of its dims is sharded.
    """
    targets = written(op)
    if targets:
        target = values[targets[0]]
        if len(targets) > 1 or not isinstance(target, SpatialTensor):
            return NotImplemented if len(targets) > 1 else _into_plain(op, values)
        ndim, spec = target.dim(), target.spec
    else:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        ndim = max(tensor.dim() for tensor in tensors)
        spec = leading_spec([value for value in values if isinstance(value, SpatialTensor)], ndim)
        spec = _broadcast(spec, tensors, ndim)
    like = next(value for value in values if isinstance(value, SpatialTensor))
    result = run(op, *(rows_for(value, ndim, spec, str(op), like) for value in values))
    if targets:
        return target
    if isinstance(result, tuple):
        return tuple(like.like(part, spec) for part in result)
    return like.like(result, spec)


def leading_spec(tensors: Sequence[SpatialTensor], ndim: int) -> SpatialSpec:
    """Where a result of `ndim` dims is sharded when `tensors` are broadcast together."""
    first = next((t for t in tensors if t.spec.size > 1), tensors[0])
    return first.spec.at(first.spec.dim + ndim - first.dim())


def _broadcast(spec: SpatialSpec, tensors: Sequence[torch.Tensor], ndim: int) -> SpatialSpec:
    """Where the result is sharded; a single row that plain tensors repeat is dealt evenly over what it becomes."""
    if spec.size != 1:
        return spec
    sizes = [t.shape[spec.dim - ndim + t.dim()] for t in tensors if t.dim() >= ndim - spec.dim]
    size = max(sizes) if 0 not in sizes else 0
    return spec if size == 1 else even_spec(spec.dim, size, spec.extents.ranks)


def rows_for(value: Any, ndim: int, spec: SpatialSpec, operation: str, like: SpatialTensor) -> Any:
    """This rank's rows of an argument that is broadcast to `ndim` dims, of which `spec` is sharded."""
    if not isinstance(value, torch.Tensor):
        return value
    dim = spec.dim - (ndim - value.dim())
    if isinstance(value, SpatialTensor):
        if value.spec.dim == dim and value.spec.blocks == spec.blocks and value.spec.size == spec.size:
            return redistribute(value, spec.extents).local
        if value.spec.dim == dim and value.spec.size == 1:
            # one row, which all ranks repeat
            return whole(value)
        if dim >= 0 and spec.blocks == 1 and spec.size == value.shape[dim] and sole_owner(value.spec) is not None:
            return redistribute(resharded(value, dim), spec.extents).local
        value = gather(value, operation)
    if dim < 0 or value.shape[dim] == 1 != spec.size or value.shape[dim] == 0 != spec.size:
        return value
    return spec.take(value, dim, like.ranks.rank)


def _into_plain(op: Op, values: tuple[Any, ...]) -> Any:
    """A plain tensor, the same on every rank, is written from sharded ones: they have to be whole."""
    return run(op, *(gather(value, str(op)) if isinstance(value, SpatialTensor) else value for value in values))

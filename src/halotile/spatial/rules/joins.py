"""Tensors put together or repeated: cat, stack, repeat, roll, flip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.geometry import Extents
from halotile.spatial.move import even_spec, one_block, pick_rows, splice
from halotile.spatial.pointwise import leading_spec, rows_for
from halotile.spatial.registry import Op, rule
from halotile.spatial.rules.band import Joined
from halotile.spatial.rules.kernel import simple
from halotile.spatial.rules.upsampled import joined_upsampled
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(op: Op, tensors: Sequence[torch.Tensor], dim: int) -> Any:
    """Along another dim: local. Along the sharded one: dealt evenly anew."""
    sharded = [t for t in tensors if isinstance(t, SpatialTensor)]
    first, spec = sharded[0], sharded[0].spec
    dim %= first.dim()
    # a one-dimensional empty tensor may stand for any shape
    parts = [t for t in tensors if t.dim() == first.dim()]
    if dim != spec.dim:
        for put_off in (joined_upsampled, _joined):
            if (waiting := put_off(parts, dim)) is not None:
                return waiting
        locals_ = [rows_for(t, first.dim(), spec, str(op), first) for t in parts]
        return first.like(torch.cat(locals_, dim), spec)
    if any(t.spec.dim != dim for t in sharded):
        return NotImplemented
    parts = [one_block(t) if isinstance(t, SpatialTensor) else t for t in parts]
    whole = even_spec(dim, sum(t.shape[dim] for t in parts), first.ranks.size)
    return first.like(splice(parts, dim, whole.extents), whole)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> SpatialTensor | None:
    """Spatial tensors put together along a spatial dim when somebody asks: a convolution takes the parts."""
    first = parts[0]
    if not isinstance(first, SpatialTensor) or dim < 2 or simple():
        return None
    alike = all(isinstance(t, SpatialTensor) and t.spec == first.spec and t.dtype == first.dtype for t in parts)
    if not alike or first.spec.blocks > 1 or first.spec.dim < 2 or not all(t.is_contiguous() for t in parts):
        return None
    shape = [sum(t.shape[dim] for t in parts) if d == dim else size for d, size in enumerate(first.shape)]
    strides = torch.empty(shape, device="meta").stride()
    rows = Joined(tuple(t.local for t in parts if isinstance(t, SpatialTensor)), dim)
    return SpatialTensor(rows, first.spec, first.ledger, shape, strides)


@rule(aten.stack.default)
def stack(op: Op, tensors: Sequence[torch.Tensor], dim: int) -> Any:
    """A new dim."""
    sharded = [t for t in tensors if isinstance(t, SpatialTensor)]
    first = sharded[0]
    spec = leading_spec(sharded, first.dim())
    dim %= first.dim() + 1
    locals_ = [rows_for(t, first.dim(), spec, str(op), first) for t in tensors]
    return first.like(torch.stack(locals_, dim), spec.at(spec.dim + (dim <= spec.dim)))


@rule(aten.repeat.default)
def repeat(op: Op, x: SpatialTensor, repeats: Sequence[int]) -> Any:
    """Copies along dims; along the sharded one they become blocks."""
    front = len(repeats) - x.dim()
    spec = x.spec.at(x.spec.dim + front)
    times = repeats[spec.dim]
    if not times:
        return NotImplemented
    if len(repeats) == x.dim() and set(repeats) == {1}:
        # models repeat borders as often as a kernel asks for: once is a copy, for which `repeat` takes many steps
        return x.like(x.local.clone(memory_format=torch.contiguous_format))
    return x.like(x.local.repeat(list(repeats)), SpatialSpec(spec.dim, spec.extents, spec.blocks * times))


@rule(aten.roll.default)
def roll(op: Op, x: SpatialTensor, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    """Rows that leave at one end come back at the other."""
    if not dims:
        return NotImplemented
    where = [d % x.dim() for d in dims]
    along = [s for s, d in zip(shifts, where, strict=True) if d == x.spec.dim]
    others = [(s, d) for s, d in zip(shifts, where, strict=True) if d != x.spec.dim]
    if along and x.spec.blocks > 1:
        return NotImplemented
    local = x.local
    if along and x.spec.size:
        local = pick_rows(x, _rows(x.spec.extents, lambda row: (row - sum(along)) % x.spec.size))
    if others:
        local = local.roll([s for s, _ in others], [d for _, d in others])
    return x.like(local if local is not x.local else local.clone())


@rule(aten.flip.default)
def flip(op: Op, x: SpatialTensor, dims: Sequence[int]) -> Any:
    """Reversed dims."""
    where = {d % x.dim() for d in dims}
    if x.spec.dim not in where:
        return x.like(x.local.flip(list(where)))
    if x.spec.blocks > 1:
        return NotImplemented
    local = pick_rows(x, _rows(x.spec.extents, lambda row: x.spec.size - 1 - row))
    return x.like(local.flip([d for d in where if d != x.spec.dim]))


def _rows(extents: Extents, source: Any) -> list[list[int]]:
    """For each rank, the source rows of those that it owns."""
    return [[source(row) for row in range(own.start, own.stop)] for own in extents.intervals]

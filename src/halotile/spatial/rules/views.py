"""Views: the sharded dim moves along, is merged or split. A view of a sharded tensor shares its local memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import torch

from halotile.geometry import Extents
from halotile.spatial.move import redistribute
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.upsampled import unsqueezed
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(op: Op, x: SpatialTensor, size: Sequence[int], *_: Any) -> Any:
    """Dims merged or split; rows that would be cut in two inside one rank's band change hands first."""
    shape = _filled(size, x.numel())
    found = viewed_spec(tuple(x.shape), x.spec, shape)
    if found is None:
        return NotImplemented
    spec, quantum = found
    strides = _viewed_strides(tuple(x.shape), x.stride(), tuple(shape)) if quantum == 1 else None
    dealt = redistribute(x, x.spec.extents.in_multiples_of(quantum))
    local = dealt.local.reshape(_local_shape(shape, spec, x))
    if strides is None and local.untyped_storage() is x.local.untyped_storage():
        # the band can be viewed like that, the whole cannot: then torch makes a copy
        local = local.clone()
    result = x.like(local, spec, strides)
    if quantum > 1 and op is aten.view.default:
        x.ledger.keep_view(result.local, x.local)
    return result


def viewed_spec(shape: Sequence[int], spec: SpatialSpec, new: Sequence[int]) -> tuple[SpatialSpec, int] | None:
    """Where the rows are after a view from `shape` to `new`, and the multiple that every rank's rows must be first.

    In memory order the elements are A blocks of T rows of I elements, A and I being the products of all sizes before
    and behind the sharded rows. A dim of the new shape with P elements before it and Q behind holds them if P divides
    A and Q divides T x I: it has A / P blocks, and T x I / Q rows a block. None when no dim does.

    Example: (2, 3, 4, 5) sharded along dim 2 as (2, 8, 15): A = 6, T = 4, I = 5. Dim 1 has P = 2 and Q = 15, but 15
    does not divide 20. (2, 60): dim 1 has P = 2, Q = 1: 3 blocks of 20 rows.
    """
    before = prod(shape[: spec.dim]) * spec.blocks
    rows, behind = spec.extents.total, prod(shape[spec.dim + 1 :])
    if not prod(shape):
        return None
    fitting = []
    for dim, size in enumerate(new):
        outer, inner = prod(new[:dim]), prod(new[dim + 1 :])
        if before % outer or (rows * behind) % inner or before // outer * (rows * behind // inner) != size:
            continue
        quantum = inner // gcd(behind, inner)
        moves = any(owned % quantum for owned in spec.extents.sizes)
        # of those that move nothing, one that would suit any extents: what one rank owns whole could be cut anywhere
        fitting.append((moves, quantum, before // outer, inner != behind, dim))
    if not fitting:
        return None
    moves, quantum, blocks, _, dim = min(fitting)
    quantum = quantum if moves else 1
    inner = prod(new[dim + 1 :])
    extents = spec.extents.in_multiples_of(quantum)
    return SpatialSpec(dim, Extents(tuple(owned * behind // inner for owned in extents.sizes)), blocks), quantum


@rule(aten.permute.default)
def permute(op: Op, x: SpatialTensor, dims: Sequence[int]) -> Any:
    """The sharded dim goes where its number goes."""
    order = [d % x.dim() for d in dims]
    return x.like(x.local.permute(order), x.spec.at(order.index(x.spec.dim)), [x.stride(d) for d in order])


@rule(aten.transpose.int, aten.transpose_.default)
def transpose(op: Op, x: SpatialTensor, first: int, second: int) -> Any:
    """Two dims change places."""
    if op is not aten.transpose.int:
        return NotImplemented
    first, second = first % x.dim(), second % x.dim()
    moved = {first: second, second: first}.get(x.spec.dim, x.spec.dim)
    strides = list(x.stride())
    strides[first], strides[second] = strides[second], strides[first]
    return x.like(x.local.transpose(first, second), x.spec.at(moved), strides)


@rule(aten.t.default)
def t(op: Op, x: SpatialTensor) -> Any:
    """The transpose of a matrix."""
    return transpose(aten.transpose.int, x, 0, x.dim() - 1)


@rule(aten.unsqueeze.default)
def unsqueeze(op: Op, x: SpatialTensor, dim: int) -> Any:
    """A new dim before or behind the sharded one."""
    dim %= x.dim() + 1
    strides = list(x.stride())
    strides.insert(dim, x.shape[dim] * strides[dim] if dim < x.dim() else 1)
    if (waiting := unsqueezed(x, dim, strides)) is not None:
        return waiting
    return x.like(x.local.unsqueeze(dim), x.spec.at(x.spec.dim + (dim <= x.spec.dim)), strides)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Op, x: SpatialTensor, dims: int | Sequence[int] | None = None) -> Any:
    """Dims of size 1 go; a sharded dim of one row stays, unless it is asked to go: then all ranks get the row."""
    asked = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted(d % x.dim() for d in asked if x.shape[d] == 1)
    if x.spec.dim in gone:
        return NotImplemented
    strides = [stride for d, stride in enumerate(x.stride()) if d not in gone]
    return x.like(x.local.squeeze(gone), x.spec.at(x.spec.dim - sum(d < x.spec.dim for d in gone)), strides)


@rule(aten.expand.default)
def expand(op: Op, x: SpatialTensor, size: Sequence[int], implicit: bool) -> Any:
    """Dims of size 1 are repeated, new ones come in front."""
    spec = x.spec.at(x.spec.dim + len(size) - x.dim())
    if size[spec.dim] not in (-1, x.spec.size):
        return NotImplemented
    shape = list(size)
    shape[spec.dim] = spec.local_size(x.ranks.rank)
    front = len(size) - x.dim()
    strides = [0] * front + [
        stride if size[d + front] in (-1, x.shape[d]) else 0 for d, stride in enumerate(x.stride())
    ]
    return x.like(x.local.expand(shape), spec, strides)


@rule(aten.unfold.default)
def unfold(op: Op, x: SpatialTensor, dim: int, size: int, step: int) -> Any:
    """Sliding windows along a dim that is not sharded."""
    if dim % x.dim() == x.spec.dim:
        return NotImplemented
    dim %= x.dim()
    strides = [stride * step if d == dim else stride for d, stride in enumerate(x.stride())]
    return x.like(run(op, x.local, dim, size, step), None, [*strides, x.stride(dim)])


@lru_cache(maxsize=8192)
def _viewed_strides(shape: tuple[int, ...], stride: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """The global strides of a view; None where there is none, and the result is a copy."""
    try:
        return torch.empty_strided(shape, stride, device="meta").view(new).stride()
    except RuntimeError:
        return None


def _filled(size: Sequence[int], numel: int) -> list[int]:
    """`size` with its -1 worked out."""
    known = prod(n for n in size if n != -1)
    return [numel // known if n == -1 else n for n in size]


def _local_shape(shape: Sequence[int], spec: SpatialSpec, x: SpatialTensor) -> list[int]:
    local = list(shape)
    local[spec.dim] = spec.local_size(x.ranks.rank)
    return local

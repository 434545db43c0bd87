"""Views: the sharded dim moves along, is merged or split. A view of a sharded tensor shares its local memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod
from typing import Any

import torch

from halotile.geometry import Extents
from halotile.spatial.move import redistribute
from halotile.spatial.registry import Op, rule, run
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
    x = redistribute(x, _multiples(x.spec.extents, quantum))
    return x.like(x.local.reshape(_local_shape(shape, spec, x)), spec)


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
        if all(owned % quantum == 0 for owned in spec.extents.sizes):
            quantum = 1
        fitting.append((quantum, before // outer, dim))
    if not fitting:
        return None
    quantum, blocks, dim = min(fitting)
    inner = prod(new[dim + 1 :])
    extents = _multiples(spec.extents, quantum)
    return SpatialSpec(dim, Extents(tuple(owned * behind // inner for owned in extents.sizes)), blocks), quantum


@rule(aten.permute.default)
def permute(op: Op, x: SpatialTensor, dims: Sequence[int]) -> Any:
    """The sharded dim goes where its number goes."""
    order = [d % x.dim() for d in dims]
    return x.like(x.local.permute(order), x.spec.at(order.index(x.spec.dim)))


@rule(aten.transpose.int, aten.transpose_.default)
def transpose(op: Op, x: SpatialTensor, first: int, second: int) -> Any:
    """Two dims change places."""
    if op is not aten.transpose.int:
        return NotImplemented
    first, second = first % x.dim(), second % x.dim()
    moved = {first: second, second: first}.get(x.spec.dim, x.spec.dim)
    return x.like(x.local.transpose(first, second), x.spec.at(moved))


@rule(aten.t.default)
def t(op: Op, x: SpatialTensor) -> Any:
    """The transpose of a matrix."""
    return transpose(aten.transpose.int, x, 0, x.dim() - 1)


@rule(aten.unsqueeze.default)
def unsqueeze(op: Op, x: SpatialTensor, dim: int) -> Any:
    """A new dim before or behind the sharded one."""
    dim %= x.dim() + 1
    return x.like(x.local.unsqueeze(dim), x.spec.at(x.spec.dim + (dim <= x.spec.dim)))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Op, x: SpatialTensor, dims: int | Sequence[int] | None = None) -> Any:
    """Dims of size 1 go; a sharded dim of one row stays, unless it is asked to go: then all ranks get the row."""
    asked = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted(d % x.dim() for d in asked if x.shape[d] == 1)
    if x.spec.dim in gone:
        return NotImplemented
    local = x.local
    for d in reversed(gone):
        local = local.squeeze(d)
    return x.like(local, x.spec.at(x.spec.dim - sum(d < x.spec.dim for d in gone)))


@rule(aten.expand.default)
def expand(op: Op, x: SpatialTensor, size: Sequence[int], implicit: bool) -> Any:
    """Dims of size 1 are repeated, new ones come in front."""
    spec = x.spec.at(x.spec.dim + len(size) - x.dim())
    if size[spec.dim] not in (-1, x.spec.size):
        return NotImplemented
    shape = list(size)
    shape[spec.dim] = spec.local_size(x.ranks.rank)
    return x.like(x.local.expand(shape), spec)


@rule(aten.unfold.default)
def unfold(op: Op, x: SpatialTensor, dim: int, size: int, step: int) -> Any:
    """Sliding windows along a dim that is not sharded."""
    if dim % x.dim() == x.spec.dim:
        return NotImplemented
    return x.like(run(op, x.local, dim, size, step))


def _filled(size: Sequence[int], numel: int) -> list[int]:
    """`size` with its -1 worked out."""
    known = prod(n for n in size if n != -1)
    return [numel // known if n == -1 else n for n in size]


def _multiples(extents: Extents, quantum: int) -> Extents:
    """About the same extents, each a multiple of `quantum`; the total is one."""
    if quantum == 1:
        return extents
    seams = [*(round(start / quantum) * quantum for start in extents.starts), extents.total]
    return Extents(tuple(after - before for before, after in pairwise(seams)))


def _local_shape(shape: Sequence[int], spec: SpatialSpec, x: SpatialTensor) -> list[int]:
    local = list(shape)
    local[spec.dim] = spec.local_size(x.ranks.rank)
    return local

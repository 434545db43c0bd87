"""Operations along one dim that keep its size or pick from it: local unless that dim is the sharded one."""

from __future__ import annotations

from typing import Any

import torch

from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.reductions import along_others
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.argsort.default,
)
def scan(op: Op, x: SpatialTensor, dim: int, *rest: Any) -> Any:
    """Along another dim: local. Along the sharded one it is gathered, since every row needs all before it."""
    return NotImplemented if dim % x.dim() == x.spec.dim else _local(op, x, dim, *rest)


@rule(aten.sort.stable, aten.argsort.stable)
def stable_sort(op: Op, x: SpatialTensor, stable: bool, dim: int, *rest: Any) -> Any:
    """Like `scan`."""
    return NotImplemented if dim % x.dim() == x.spec.dim else _local(op, x, stable, dim, *rest)


@rule(aten.topk.default)
def topk(op: Op, x: SpatialTensor, k: int, dim: int, *rest: Any) -> Any:
    """Like `scan`."""
    return NotImplemented if dim % x.dim() == x.spec.dim else _local(op, x, k, dim, *rest)


@rule(aten.median.dim, aten.mode.default)
def middle(op: Op, x: SpatialTensor, dim: int, keepdim: bool) -> Any:
    """Along another dim: local."""
    dim %= x.dim()
    return NotImplemented if dim == x.spec.dim else along_others(op, x, (dim,), keepdim, (dim, keepdim))


def _local(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    result = run(op, x.local, *rest)
    return tuple(x.like(part) for part in result) if isinstance(result, tuple) else x.like(result)

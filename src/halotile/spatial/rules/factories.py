"""Tensors made like a sharded one: unfilled, filled, drawn at random, copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.spatial.move import even_spec
from halotile.spatial.registry import Op, is_view, rule, run
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor, copied_strides

aten = torch.ops.aten


@rule(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift.default,
    aten.lift_fresh_copy.default,
)
def like(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    """Sharded as `x` is."""
    memory_format = next((value for value in rest if isinstance(value, torch.memory_format)), None)
    strides = x.stride() if is_view(op) else copied_strides(x, memory_format)
    return x.like(run(op, x.local, *rest), None, strides)


@rule(aten.contiguous.default)
def contiguous(op: Op, x: SpatialTensor, memory_format: Any) -> Any:
    """`x` itself, or a copy."""
    memory_format = memory_format or torch.contiguous_format
    if x.is_contiguous(memory_format=memory_format):
        return x
    # not `contiguous`: that leaves rows of which there are none, or one, in the old order of dims
    return x.like(x.local.clone(memory_format=memory_format), None, copied_strides(x, memory_format))


@rule(aten.lift_fresh.default, aten.detach_.default)
def same(op: Op, x: SpatialTensor) -> Any:
    """`x` itself."""
    return x


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def new(op: Op, x: SpatialTensor, size: Sequence[int], *rest: Any) -> Any:
    """Sharded as the last tensor of that size was; of an unknown size but as many dims, dealt evenly; else plain."""
    spec = x.ledger.spec_for(size)
    if spec is None and len(size) == x.dim() and x.spec.blocks == 1:
        spec = even_spec(x.spec.dim, size[x.spec.dim], x.ranks.size)
    if spec is None:
        return run(op, _plain(x), list(size), *rest)
    return x.like(run(op, _plain(x), local_size(size, spec, x.ranks.rank), *rest), spec)


@rule(aten.new_empty_strided.default)
def new_empty_strided(op: Op, x: SpatialTensor, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Any:
    """As `new`, with an order of dims in memory."""
    spec = x.ledger.spec_for(size)
    order = dense_order(size, stride)
    if spec is None or order is None:
        return run(op, _plain(x), list(size), list(stride), *rest)
    local = local_size(size, spec, x.ranks.rank)
    return x.like(run(op, _plain(x), local, dense_strides(local, order), *rest), spec, dense_strides(size, order))


@rule(
    aten.rand_like.default,
    aten.rand_like.generator,
    aten.randn_like.default,
    aten.randn_like.generator,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
)
def random_like(op: Op, x: SpatialTensor, *rest: Any) -> Any:
    """Every rank draws the whole, as one rank would, and keeps its rows; ranks' generators are in step."""
    *values, memory_format = rest
    device = op._schema.arguments[-3].name, values[-2]
    assert device[0] == "device", op._schema
    values[-2] = x.device if device[1] is None else device[1]
    # only its size, and its order in memory, by which the kernel fills: no whole of it is made
    stand_in = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    whole = run(op, stand_in, *values, memory_format)
    return x.like(x.spec.take(whole, x.spec.dim, x.ranks.rank).clone(), None, whole.stride())


@rule(
    aten.normal_.default,
    aten.uniform_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
)
def random_fill(op: Op, x: SpatialTensor, *rest: Any) -> SpatialTensor:
    """As `random_like`, into `x`."""
    whole = run(op, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device), *rest)
    x.local.copy_(x.spec.take(whole, x.spec.dim, x.ranks.rank))
    return x


@rule(aten.bernoulli.p)
def bernoulli(op: Op, x: SpatialTensor, p: float, generator: torch.Generator | None) -> Any:
    """Ones with probability `p`."""
    # in contiguous memory whatever `x` is
    unfilled = torch.empty_like(x.local, memory_format=torch.contiguous_format)
    return random_fill(aten.bernoulli_.float, x.like(unfilled), p, generator)


@rule(aten.dropout.default)
def dropout(op: Op, x: SpatialTensor, p: float, train: bool) -> Any:
    """Off, as ever in inference: `x` itself. On: the CPU's kernel, step by step, so that the draws are its draws."""
    if not train or p == 0:
        return x
    if p == 1 or x.device.type != "cpu":
        return NotImplemented
    kept = random_fill(aten.bernoulli_.float, x.like(torch.empty_like(x.local), None, copied_strides(x)), 1 - p, None)
    return x.like(x.local * kept.local.div_(1 - p))


def local_size(size: Sequence[int], spec: SpatialSpec, rank: int) -> list[int]:
    """What `rank` has of a tensor of `size`."""
    local = list(size)
    local[spec.dim] = spec.local_size(rank)
    return local


def dense_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims from outer to inner, if `stride` leaves no gaps."""
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    return order if dense_strides(size, order) == list(stride) else None


def dense_strides(size: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides without gaps for dims from outer to inner."""
    strides, reached = [0] * len(size), 1
    for d in reversed(order):
        strides[d] = reached
        reached *= max(size[d], 1)
    return strides


def _plain(x: SpatialTensor) -> torch.Tensor:
    """Something of `x`'s dtype and device to call `new_*` on; the rows of a lazy `x` need not be made for it."""
    return torch.empty(0, dtype=x.dtype, device=x.device)

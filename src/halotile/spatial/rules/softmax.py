"""Softmax and what is like it: local along another dim than the sharded one, else one collective."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.reductions import all_parts
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(op: Op, x: SpatialTensor, dim: int, how: Any) -> Any:
    """Each rank's largest value and sum of exponentials travel together; float32 at least, rounded once.

    `how` is `half_to_float`, and of the safe softmax, which makes zeros of rows that are -inf throughout, the dtype.
    """
    if x.spec.dim != dim % x.dim():
        return x.like(run(op, x.local, dim, how)) if x.local.numel() else x.like(_empty(op, x, how))
    safe = op is aten._safe_softmax.default
    if not x.numel() or not x.dtype.is_floating_point:
        return NotImplemented
    dtype = (how or x.dtype) if safe else torch.float32 if how else x.dtype
    local = x.local.to(torch.promote_types(dtype, torch.float32))
    if local.numel():
        largest = local.amax(dim, keepdim=True)
    else:
        shape = [1 if d == x.spec.dim else size for d, size in enumerate(x.shape)]
        largest = local.new_full(shape, -inf)
    # rows that are -inf throughout: their exponentials are zeros, not NaN
    shifted = local - largest.masked_fill(largest == -inf, 0)
    exponentials = shifted.exp_() if op is not aten._log_softmax.default else shifted.exp()
    parts = all_parts(torch.stack((largest, exponentials.sum(dim, keepdim=True))), x.ranks)
    top = parts[:, 0].amax(0)
    denominator = (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0)
    if op is aten._log_softmax.default:
        return x.like((local - top).sub_(denominator.log()).to(dtype))
    factor = (largest - top).exp_().div_(denominator)
    if safe:
        factor = factor.masked_fill(top == -inf, 0)
    return x.like(exponentials.mul_(factor).to(dtype))


def _empty(op: Op, x: SpatialTensor, how: Any) -> torch.Tensor:
    if op is aten._safe_softmax.default:
        return torch.empty_like(x.local, dtype=how)
    return torch.empty_like(x.local, dtype=torch.float32 if how else None)


@rule(aten.glu.default)
def gated(op: Op, x: SpatialTensor, dim: int) -> Any:
    """One half of a dim that is not sharded, gated by the other."""
    return NotImplemented if dim % x.dim() == x.spec.dim else x.like(op(x.local, dim))

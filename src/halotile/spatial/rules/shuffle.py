"""Channels made into rows and columns and back, channels dealt anew, elements repeated."""

from __future__ import annotations

from typing import Any

import torch

from halotile.spatial.move import redistribute
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(op: Op, x: SpatialTensor, factor: int) -> Any:
    """`factor` rows and columns of each."""
    spec = x.spec
    if spec.dim == x.dim() - 3:
        return NotImplemented
    if spec.dim > x.dim() - 3:
        spec = spec.with_extents(spec.extents.scaled(factor))
    return x.like(run(op, x.local, factor), spec)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(op: Op, x: SpatialTensor, factor: int) -> Any:
    """Each of `factor` rows and columns; rows that belong together come together first."""
    spec = x.spec
    if spec.dim == x.dim() - 3:
        return NotImplemented
    if spec.dim > x.dim() - 3:
        if spec.extents.total % factor:
            return NotImplemented
        x = redistribute(x, spec.extents.in_multiples_of(factor))
        spec = x.spec.with_extents(x.spec.extents.scaled(1, factor))
    *front, channels, height, width = x.local.shape
    if not spec.local_size(x.ranks.rank):
        # the kernel gives an empty tensor back as it is
        return x.like(x.local.new_empty(*front, channels * factor**2, height // factor, width // factor), spec)
    return x.like(run(op, x.local, factor), spec)


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(op: Op, x: SpatialTensor, groups: int) -> Any:
    """Channels in another order."""
    return NotImplemented if x.spec.dim == 1 else x.like(run(op, x.local, groups))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(op: Op, x: SpatialTensor, repeats: int, dim: int | None, output_size: int | None) -> Any:
    """Each element of a dim several times."""
    if dim is None or repeats < 1:
        return NotImplemented
    if dim % x.dim() != x.spec.dim:
        return x.like(run(op, x.local, repeats, dim, output_size))
    spec = x.spec.with_extents(x.spec.extents.scaled(repeats))
    return x.like(run(op, x.local, repeats, dim, None), spec)

"""Pooling: windows that slide along the sharded dim, or stay beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from halotile.geometry import Interval, field_rows
from halotile.spatial.move import fetch, redistribute
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    op: Op,
    x: SpatialTensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    """Means of windows."""
    window = _Window.of(3 if op is aten.avg_pool3d.default else 2, kernel, stride, padding, (1,), ceil_mode)
    band = _band(x, window)
    if band is NotImplemented:
        return NotImplemented
    if band.rows is None:
        return x.like(x.local.new_empty(band.shape), band.spec)
    means = run(op, band.rows, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    return x.like(band.cut(means), band.spec)


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(
    op: Op,
    x: SpatialTensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Any:
    """Largest values of windows, and where in the whole plane they are."""
    window = _Window.of(
        3 if op is aten.max_pool3d_with_indices.default else 2, kernel, stride, padding, dilation, ceil_mode
    )
    band = _band(x, window)
    if band is NotImplemented:
        return NotImplemented
    if band.rows is None:
        empty = x.local.new_empty(band.shape)
        return x.like(empty, band.spec), x.like(empty.to(torch.int64), band.spec)
    values, indices = run(op, band.rows, kernel, stride, padding, dilation, ceil_mode)
    dim = x.spec.dim
    if dim >= x.dim() - window.dims:
        # the kernel counts within the band
        behind = prod(x.shape[dim + 1 :])
        plane = band.rows.shape[dim] * behind
        missing = (x.shape[dim] - band.rows.shape[dim]) * behind
        indices = indices + indices.div(plane, rounding_mode="floor") * missing + band.first_row * behind
    return x.like(band.cut(values), band.spec), x.like(band.cut(indices), band.spec)


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(op: Op, x: SpatialTensor, size: Sequence[int]) -> Any:
    """Means of the parts that a dim is divided into, when they are of equal size or there is one."""
    at, spec = x.spec.dim - (x.dim() - len(size)), x.spec
    if at < 0:
        if not spec.local_size(x.ranks.rank):
            return x.like(x.local.new_empty((*x.local.shape[: -len(size)], *size)))
        return x.like(run(op, x.local, list(size)))
    if size[at] == 1:
        return run(op, x.mean(spec.dim, keepdim=True), list(size))
    if spec.blocks > 1 or spec.size % size[at]:
        return NotImplemented
    rows = spec.size // size[at]
    x = redistribute(x, spec.extents.in_multiples_of(rows))
    means = x.spec.with_extents(x.spec.extents.scaled(1, rows))
    local = list(size)
    local[at] = means.local_size(x.ranks.rank)
    if not local[at]:
        return x.like(x.local.new_empty((*x.local.shape[: -len(size)], *local)), means)
    return x.like(run(op, x.local, local), means)


@dataclass(frozen=True)
class _Window:
    """The arguments of a pooling operation, one number a dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(cls, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> _Window:
        def each(value: int | Sequence[int]) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * dims if len(values) == 1 else values

        return cls(each(kernel), each(stride or kernel), each(padding), each(dilation), ceil_mode)

    @property
    def dims(self) -> int:
        return len(self.kernel)

    def outputs(self, at: int, size: int) -> int:
        """How many windows there are along a dim, as ATen counts them (`pooling_output_shape`)."""
        stride, padding = self.stride[at], self.padding[at]
        room = size + 2 * padding - self.dilation[at] * (self.kernel[at] - 1) - 1
        count = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # with ceil_mode, a window that starts in the padding behind the last row does not count
        return count - 1 if self.ceil_mode and (count - 1) * stride >= size + padding else count


@dataclass(frozen=True)
class _Band:
    """Input rows for a kernel to pool with its own padding, and which of the rows that come out are this rank's."""

    spec: SpatialSpec
    rows: torch.Tensor | None
    shape: tuple[int, ...]
    """of this rank's result"""
    skipped: int
    first_row: int

    def cut(self, pooled: torch.Tensor) -> torch.Tensor:
        dim, count = self.spec.dim, self.shape[self.spec.dim]
        whole = not self.skipped and pooled.shape[dim] == count
        # a copy, so that what is cut off is not kept alive
        return pooled if whole else pooled.narrow(dim, self.skipped, count).clone()


def _band(x: SpatialTensor, window: _Window) -> Any:
    """What this rank pools.

    The kernel pads the band on both sides as it would pad the whole. That keeps all of its conventions (what counts in
    a mean, ceil_mode, indices); rows whose windows reach into padding that the whole has not are cut off: the band
    starts that much earlier, at a multiple of the stride, so that windows fall where they fall in the whole.
    """
    front = x.dim() - window.dims
    out = [window.outputs(d, size) for d, size in enumerate(x.shape[front:])]
    spec, rank, at = x.spec, x.ranks.rank, x.spec.dim - front
    if min(out) < 1:
        # the kernel says what is wrong
        return _Band(spec, torch.empty(x.shape, dtype=x.dtype, device="meta"), tuple(x.shape), 0, 0)
    if at < 0:
        shape = (*x.local.shape[:front], *out)
        return _Band(spec, x.local if spec.local_size(rank) else None, shape, 0, 0)
    if spec.blocks > 1:
        return NotImplemented
    kernel, stride, padding, dilation = (
        values[at] for values in (window.kernel, window.stride, window.padding, window.dilation)
    )
    reach = dilation * (kernel - 1)
    after = (out[at] - 1) * stride + reach + 1 - spec.size - padding
    extents, fields = field_rows(spec.extents, kernel, stride, padding, after, dilation)
    # a kernel may refuse a band that is smaller than its window
    latest = max(0, (spec.size - kernel) // stride)
    firsts = [min(max(0, start - -(-padding // stride)), latest) for start in extents.starts]
    wanted = [
        Interval(stride * first, min(spec.size, max(field.stop, stride * first + kernel))) if size else field
        for first, field, size in zip(firsts, fields, extents.sizes, strict=True)
    ]
    rows = x.local if tuple(wanted) == spec.extents.intervals else fetch(x, wanted)
    out[at] = extents.sizes[rank]
    shape = (*x.shape[:front], *out)
    return _Band(
        SpatialSpec(spec.dim, extents),
        rows if extents.sizes[rank] else None,
        shape,
        extents.starts[rank] - firsts[rank],
        stride * firsts[rank],
    )

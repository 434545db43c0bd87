"""Interpolation to another size: nearest, linear, cubic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Any

import torch

from halotile.geometry import Interval, rows_by_source
from halotile.spatial.move import fetch
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.upsampled import put_off
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten

NEAREST = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)
SMOOTH = {
    aten.upsample_linear1d: 2,
    aten.upsample_bilinear2d: 2,
    aten.upsample_trilinear3d: 2,
    aten.upsample_bicubic2d: 4,
}
"""-> how many rows make one"""


@rule(*(packet.default for packet in NEAREST))
def nearest(op: Op, x: SpatialTensor, size: Sequence[int], *scales: float | None) -> Any:
    """Rows repeated or left out."""
    resize = _Resize(op, tuple(size), scales)
    at = x.spec.dim - 2
    if at < 0:
        return _beside(x, resize)
    exact = op in (packet.default for packet in NEAREST[3:])
    sources = _nearest_sources(exact, x.spec.size, size[at], scales[at], x.dtype == torch.float64)
    factor = size[at] // x.spec.size
    if factor and sources == tuple(row // factor for row in range(x.spec.size * factor)):
        if (waiting := put_off(x, size, scales)) is not None:
            return waiting
        return _local(x, x.spec.with_extents(x.spec.extents.scaled(factor)), resize)
    if x.spec.blocks > 1:
        return NotImplemented
    extents = rows_by_source(x.spec.extents, sources)
    wanted = [
        Interval(sources[own.start], sources[own.stop - 1] + 1) if len(own) else Interval(0, 0)
        for own in extents.intervals
    ]
    band, own = fetch(x, wanted), extents.interval(x.ranks.rank)
    if not len(own):
        return x.like(band.new_empty(resize.shape(band, 0, at)), x.spec.with_extents(extents))
    first = wanted[x.ranks.rank].start
    picked = torch.tensor([sources[row] - first for row in range(own.start, own.stop)], dtype=torch.int64)
    rows = band.index_select(x.spec.dim, picked.to(band.device, non_blocking=True))
    return x.like(resize.others(rows, at), x.spec.with_extents(extents))


@rule(*(packet.default for packet in SMOOTH))
def smooth(op: Op, x: SpatialTensor, size: Sequence[int], align_corners: bool, *scales: float | None) -> Any:
    """Rows weighted with their neighbours."""
    resize = _Resize(op, tuple(size), scales, align_corners)
    at = x.spec.dim - 2
    if at < 0:
        return _beside(x, resize)
    rows, outputs, scale = x.spec.size, size[at], scales[at]
    if outputs == rows and scale in (None, 1.0):
        return _local(x, x.spec, resize)
    if x.spec.blocks > 1 or not x.is_floating_point():
        return NotImplemented
    taps = SMOOTH[op.overloadpacket]
    factor = outputs // rows
    # with a power of two, places are exact in float32 and the same wherever a band begins
    if not align_corners and outputs == rows * factor and not factor & (factor - 1) and scale in (None, factor):
        return _enlarged(x, resize, factor, taps // 2)
    return _weighted(x, resize, taps)


@rule(*(packet.vec for packet in NEAREST))
def nearest_by(op: Op, x: SpatialTensor, size: Sequence[int] | None, factors: Sequence[float] | None) -> Any:
    """To a size or by factors, as they come under inference_mode."""
    return nearest(op.overloadpacket.default, x, *_size_and_scales(x, size, factors))


@rule(*(packet.vec for packet in SMOOTH))
def smooth_by(
    op: Op, x: SpatialTensor, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
) -> Any:
    """To a size or by factors, as they come under inference_mode."""
    outputs, *scales = _size_and_scales(x, size, factors)
    return smooth(op.overloadpacket.default, x, outputs, align_corners, *scales)


@dataclass(frozen=True)
class _Resize:
    """An interpolation of all spatial dims."""

    op: Op
    size: tuple[int, ...]
    scales: tuple[float | None, ...]
    align_corners: bool | None = None

    def __call__(self, rows: torch.Tensor, at: int, outputs: int) -> torch.Tensor:
        """Of a band, to `outputs` rows in spatial dim `at`."""
        size = list(self.size)
        size[at] = outputs
        return self._run(rows, size, self.scales)

    def others(self, rows: torch.Tensor, at: int) -> torch.Tensor:
        """Of all spatial dims but `at`."""
        size, scales = list(self.size), list(self.scales)
        size[at], scales[at] = rows.shape[2 + at], None
        same = size == list(rows.shape[2:]) and all(scale in (None, 1.0) for scale in scales)
        return rows if same else self._run(rows, size, scales)

    def shape(self, rows: torch.Tensor, outputs: int, at: int) -> list[int]:
        """Of the result."""
        shape = [*rows.shape[:2], *self.size]
        shape[2 + at] = outputs
        return shape

    def _run(self, rows: torch.Tensor, size: Sequence[int], scales: Sequence[float | None]) -> torch.Tensor:
        corners = () if self.align_corners is None else (self.align_corners,)
        result: torch.Tensor = run(self.op, rows, size, *corners, *scales)
        return result


def _beside(x: SpatialTensor, resize: _Resize) -> Any:
    """Batches or channels are sharded."""
    if not x.spec.local_size(x.ranks.rank):
        return x.like(x.local.new_empty([*x.local.shape[:2], *resize.size]))
    return x.like(resize._run(x.local, resize.size, resize.scales))


def _local(x: SpatialTensor, spec: SpatialSpec, resize: _Resize) -> Any:
    """Each rank's rows by themselves."""
    outputs, at = spec.local_size(x.ranks.rank), spec.dim - 2
    if not outputs:
        return x.like(x.local.new_empty(resize.shape(x.local, 0, at)), spec)
    return x.like(resize(x.local, at, outputs), spec)


def _enlarged(x: SpatialTensor, resize: _Resize, factor: int, reach: int) -> Any:
    """By a whole factor: each rank enlarges its rows with `reach` rows of its neighbours, and cuts theirs off."""
    spec, rank, at = x.spec, x.ranks.rank, x.spec.dim - 2
    whole = Interval(0, spec.size)
    wanted = [
        Interval(own.start - reach, own.stop + reach).intersect(whole) if len(own) else own
        for own in spec.extents.intervals
    ]
    band, own = fetch(x, wanted), spec.extents.interval(rank)
    enlarged = spec.with_extents(spec.extents.scaled(factor))
    if not len(own):
        return x.like(band.new_empty(resize.shape(band, 0, at)), enlarged)
    result = resize(band, at, band.shape[spec.dim] * factor)
    first = (own.start - wanted[rank].start) * factor
    # a copy, so that the neighbours' rows are not kept alive
    return x.like(result.narrow(spec.dim, first, len(own) * factor).clone(), enlarged)


def _weighted(x: SpatialTensor, resize: _Resize, taps: int) -> Any:
    """By any factor: the other dims by the kernel, then rows by their weights, in float32 as the kernel does."""
    spec, rank, at = x.spec, x.ranks.rank, x.spec.dim - 2
    accumulated = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    sources, firsts, weights = _mixture(
        taps, spec.size, resize.size[at], resize.scales[at], bool(resize.align_corners), accumulated
    )
    taps = weights.shape[1]
    extents = rows_by_source(spec.extents, sources)
    wanted = [
        Interval(firsts[own.start], firsts[own.stop - 1] + taps) if len(own) else Interval(0, 0)
        for own in extents.intervals
    ]
    band, own = fetch(x, wanted), extents.interval(rank)
    if not len(own):
        return x.like(band.new_empty(resize.shape(band, 0, at)), spec.with_extents(extents))
    band = resize.others(band.to(accumulated), at)
    starts = torch.tensor(firsts[own.start : own.stop], dtype=torch.int64)
    offsets = (starts - wanted[rank].start).to(band.device, non_blocking=True)
    residues = [((starts + tap) % taps).unsqueeze(1) for tap in range(taps)]
    shape = [-1 if d == spec.dim else 1 for d in range(x.dim())]
    result = band.new_zeros(resize.shape(band, len(own), at))
    for tap, residue in enumerate(residues):
        weight = weights[own.start : own.stop].gather(1, residue).view(shape).to(band.device, non_blocking=True)
        result.addcmul_(band.index_select(spec.dim, offsets + tap), weight)
    return x.like(result.to(x.dtype), spec.with_extents(extents))


@lru_cache(maxsize=256)
def _mixture(
    taps: int, rows: int, outputs: int, scale: float | None, align_corners: bool, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """For each output row: the nearest input row, the first of those that it is made from, and their weights.

    The kernel rounds places in float32 in a way of its own, so it says the weights itself: it is run on a row of ones
    and zeros, where one in `taps` rows is a one, for each remainder. `weights[row, r]` is that of the input row
    whose number leaves r.
    """
    if align_corners:
        step = (rows - 1) / (outputs - 1) if outputs > 1 else 0.0
        places = [step * row for row in range(outputs)]
    else:
        step = 1.0 / scale if scale else rows / outputs
        places = [step * (row + 0.5) - 0.5 for row in range(outputs)]
    count = min(taps, rows)
    firsts = tuple(min(max(floor(place) - (taps // 2 - 1), 0), rows - count) for place in places)
    sources = tuple(min(max(floor(place + 0.5), 0), rows - 1) for place in places)
    probes = (torch.arange(rows) % count == torch.arange(count).unsqueeze(1)).to(dtype)
    if taps == 2:
        weights = aten.upsample_linear1d(probes.unsqueeze(0), [outputs], align_corners, scale)
    else:
        weights = aten.upsample_bicubic2d(probes.view(1, count, rows, 1), [outputs, 1], align_corners, scale)
    return sources, firsts, weights.view(count, outputs).t().contiguous()


@lru_cache(maxsize=256)
def _nearest_sources(exact: bool, rows: int, outputs: int, scale: float | None, double: bool) -> tuple[int, ...]:
    """The input row of each output row: the kernel itself says it, since it rounds in float32 in a way of its own.

    Of places that are whole numbers but for their rounding, torch's kernels for one and for more dims say different
    things (2 rows to 121, exact: row 60); there the result may be the neighbouring row.
    """
    op = aten._upsample_nearest_exact1d.default if exact else aten.upsample_nearest1d.default
    numbers = torch.arange(rows, dtype=torch.float64 if double else torch.float32).view(1, 1, rows)
    return tuple(int(row) for row in op(numbers, [outputs], scale).flatten().tolist())


def _size_and_scales(x: SpatialTensor, size: Sequence[int] | None, factors: Sequence[float] | None) -> tuple[Any, ...]:
    if size is not None:
        return (list(size), *[None] * len(size))
    assert factors is not None
    return ([int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True)], *factors)

"""Nearest upsampling by two that waits for its convolution: of repeated elements, fewer products do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from halotile.geometry import field_rows
from halotile.spatial.rules.band import Mode, banded
from halotile.spatial.rules.kernel import Convolve, simple
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten
_UPSAMPLE = {1: aten.upsample_nearest1d, 2: aten.upsample_nearest2d, 3: aten.upsample_nearest3d}

# below them, what it costs to add up weights and to put the phases together is more than is saved (64 channels:
# 16 x 16 positions of a band 0.60 ms against 0.54, 16 x 32 0.61 against 0.95; 16 channels gain nothing at 32 x 32)
_FEWEST_POSITIONS = 512
_FEWEST_CHANNELS = 32


@dataclass(frozen=True)
class Upsampled:
    """A tensor with its elements repeated, which nobody has asked for yet (`Lazy`): a 3 x 3 convolution never does.

    Of an upsampled row, a kernel of three sees two different rows: output 2 i sees rows i - 1, i, i with the weights
    (w0, w1 + w2), output 2 i + 1 sees rows i, i, i + 1 with (w0 + w1, w2). So in two dims four convolutions of 2 x 2
    over the smaller tensor do what one of 3 x 3 does over the larger, with 4/9 of its products. Adding up the weights
    first rounds otherwise, so it is done only where the bits are no longer those of one rank, anyway.
    """

    base: SpatialTensor
    factors: tuple[int, ...]
    """for each spatial dim 1 or 2"""
    crop: tuple[int, ...]
    """for each spatial dim how many elements are cut off at both ends of what is repeated; none of the sharded one"""
    source: tuple[SpatialTensor, int] | None = None
    """of which tensor this is a view, with a new dim where"""

    @property
    def like(self) -> torch.Tensor:
        return self.base.local

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return [self.base.local]

    def from_copy(self) -> Upsampled:
        return replace(self, base=self.base.like(self.base.local.clone()))

    def make(self) -> torch.Tensor:
        """The repeated rows."""
        if self.source is not None:
            source, dim = self.source
            return source.local.unsqueeze(dim)
        local = self.base.local
        size = [n * factor for n, factor in zip(local.shape[2:], self.factors, strict=True)]
        if not local.numel():
            return local.new_empty([*local.shape[:2], *self._cropped(size)])
        made: torch.Tensor = _UPSAMPLE[len(size)].default(local, size)
        for d, crop in enumerate(self.crop):
            made = made.narrow(2 + d, crop, made.shape[2 + d] - 2 * crop)
        # as the whole: of a thin band torch may take the order of dims for another
        return made.contiguous(memory_format=_layout(self.base) or torch.contiguous_format)

    def tensor(self, strides: Sequence[int] | None = None) -> SpatialTensor:
        """The tensor whose rows these are; a view's strides follow from those of what it shows."""
        along = self.base.spec.dim - 2
        assert not self.crop[along]
        size = self._cropped([n * factor for n, factor in zip(self.base.shape[2:], self.factors, strict=True)])
        extents = self.base.spec.extents.scaled(self.factors[along])
        shape = [*self.base.shape[:2], *size]
        if strides is None:
            layout = _layout(self.base) or torch.contiguous_format
            strides = torch.empty(shape, device="meta", memory_format=layout).stride()
        return SpatialTensor(self, self.base.spec.with_extents(extents), self.base.ledger, shape, strides)

    def _cropped(self, size: Sequence[int]) -> list[int]:
        return [n - 2 * crop for n, crop in zip(size, self.crop, strict=True)]


def upsampled(x: Any) -> Upsampled | None:
    """What `x` repeats, if it does and nobody has asked for its elements yet."""
    lazy = x.lazy if isinstance(x, SpatialTensor) else None
    if not isinstance(lazy, Upsampled):
        return None
    # whoever has the elements of the tensor that this is a view of may have written to them
    return lazy if lazy.source is None or lazy.source[0].lazy is not None else None


def untouched(x: SpatialTensor) -> SpatialTensor:
    """`x` for a lazy tensor to be made from: nobody writes to it, also where its own rows are yet to be made."""
    if isinstance(x.lazy, Upsampled) and x.lazy.source is not None:
        up = upsampled(x)
        if up is None:
            return x.like(x.local, None, x.stride())
        return replace(up, source=None).tensor(x.stride())
    return x if x.lazy is None else SpatialTensor(x.lazy, x.spec, x.ledger, x.shape, x.stride())


def put_off(x: SpatialTensor, size: Sequence[int], scales: Sequence[float | None]) -> SpatialTensor | None:
    """`x` upsampled to `size` by whole factors, its elements not made; None where they have to be.

    The answer is the same on every rank. Only on CPU in float32: there it is measured, and of sums of weights nothing
    is rounded off that counts.
    """
    factors = tuple(n // m if m and n % m == 0 else 0 for n, m in zip(size, x.shape[2:], strict=True))
    # a scale that was rounded down to this size repeats some elements more often than others
    whole = set(factors) <= {1, 2} and all(scale in (None, n) for scale, n in zip(scales, factors, strict=True))
    fits = whole and x.spec.dim >= 2 and factors[x.spec.dim - 2] == 2 and x.spec.blocks == 1
    usual = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    if not (fits and usual and _layout(x) is not None and x.ledger.rounded) or simple():
        return None
    return Upsampled(x, factors, (0,) * len(factors)).tensor()


def _layout(x: torch.Tensor) -> torch.memory_format | None:
    """In which order an operation of its own would put the dims of `x` in memory; None where it may be another."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format if list(x.stride()) == sorted(x.stride(), reverse=True) else None


def unsqueezed(x: SpatialTensor, dim: int, strides: Sequence[int]) -> SpatialTensor | None:
    """`x` with a new spatial dim, if it is upsampled and its elements are not made."""
    up = upsampled(x)
    if up is None or dim < 2 or x.dim() > 4:
        return None
    spec = up.base.spec.at(up.base.spec.dim + (dim <= up.base.spec.dim))
    base = up.base.like(up.base.local.unsqueeze(dim), spec)
    factors, crop = list(up.factors), list(up.crop)
    factors.insert(dim - 2, 1)
    crop.insert(dim - 2, 0)
    return Upsampled(base, tuple(factors), tuple(crop), (x, dim)).tensor(strides)


def joined_upsampled(parts: Sequence[Any], dim: int) -> SpatialTensor | None:
    """Tensors put together along a dim that is not sharded, if all are upsampled alike and not made.

    Along `dim` itself they may differ: there the elements are repeated now.
    """
    ups = [up for part in parts if (up := upsampled(part)) is not None]
    alike = {(up.base.spec, up.factors[: dim - 2], up.factors[dim - 1 :], any(up.crop)) for up in ups}
    if len(ups) < len(parts) or dim < 2 or len(alike) > 1 or any(ups[0].crop):
        return None
    locals_ = [up.base.local.repeat_interleave(up.factors[dim - 2], dim) for up in ups]
    first = ups[0]
    factors = tuple(1 if d == dim - 2 else factor for d, factor in enumerate(first.factors))
    return Upsampled(first.base.like(torch.cat(locals_, dim)), factors, first.crop).tensor()


def with_border(x: SpatialTensor, pads: Sequence[tuple[int, int]]) -> SpatialTensor | None:
    """`x` with its border elements repeated, `pads` for each dim and none of the sharded one, if it is not made."""
    up = upsampled(x)
    if up is None or any(map(any, pads[:2])):
        return None
    before_up, crop = [], list(up.crop)
    for d, ((before, after), factor) in enumerate(zip(pads[2:], up.factors, strict=True)):
        if factor == 1:
            before_up.append((before, after))
        elif (before, after) in ((0, 0), (1, 1)) and not crop[d]:
            # one element is half of what a repeated one becomes
            before_up.append((before, after))
            crop[d] = before
        else:
            return None
    flat = [n for pair in reversed(before_up) for n in pair]
    local = up.base.local
    # torch takes no empty tensor here
    padded = F.pad(local, flat, mode="replicate") if local.numel() else F.pad(local, flat)
    return Upsampled(up.base.like(padded), up.factors, tuple(crop)).tensor()


def convolved(x: SpatialTensor, call: Convolve, before: int, after: int, mode: Mode) -> SpatialTensor | None:
    """`x` convolved, if it is upsampled and not made, and the convolution is of the usual kind; else None.

    `before` and `after` are the padding of the sharded dim. One row to reflect is the border row, as to replicate.
    """
    up = upsampled(x)
    if up is None or before != after:
        return None
    base, dim = up.base, up.base.spec.dim
    padding = [before if d == dim - 2 else n for d, n in enumerate(call.padding)]
    for d, factor in enumerate(up.factors):
        usual = call.weight.shape[2 + d] == 3 and call.stride[d] == call.dilation[d] == 1
        if factor == 2 and not (usual and padding[d] + up.crop[d] == 1):
            return None
    positions = base.numel() // (base.shape[0] * base.shape[1] * base.ranks.size)
    if positions < _FEWEST_POSITIONS or call.weight.shape[1] < _FEWEST_CHANNELS:
        return None
    wanted = field_rows(base.spec.extents, 3, before=1, after=1)[1]
    band = banded(base, wanted, "constant" if mode == "constant" else "replicate")
    if not band.shape[dim]:
        return base.like(call.empty(x.local, dim), x.spec)
    return base.like(_by_phase(band, call.padded(dim - 2, 0), up.factors), x.spec)


def _by_phase(band: torch.Tensor, call: Convolve, factors: Sequence[int]) -> torch.Tensor:
    """The convolution of a band that is to be upsampled: outputs of each phase by a convolution of their own."""
    twice = [2 + d for d, factor in enumerate(factors) if factor == 2]
    out = None
    for phases in product((0, 1), repeat=len(twice)):
        weight = call.weight
        for d, phase in zip(twice, phases, strict=True):
            first, middle, last = weight.unbind(d)
            weight = torch.stack([first + middle, last] if phase else [first, middle + last], d)
        part = replace(call, weight=weight)(band)
        if out is None:
            shape = [2 * (n - 1) if d in twice else n for d, n in enumerate(part.shape)]
            order = sorted(range(part.dim()), key=lambda d: (-part.stride()[d], d))
            out = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)
        places = out
        for d, phase in zip(twice, phases, strict=True):
            part = part.narrow(d, phase, part.shape[d] - 1)
            places = places[(slice(None),) * d + (slice(phase, None, 2),)]
        places.copy_(part)
    assert out is not None
    return out

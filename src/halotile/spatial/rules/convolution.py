"""Convolution, 1-D to 3-D, of the sharded dim: fetch the rows that a band misses, convolve the band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halotile.comm import begin_fetch, empty_rows
from halotile.geometry import Extents, Interval, field_rows
from halotile.spatial.move import resharded, sole_owner
from halotile.spatial.registry import Op, rule
from halotile.spatial.rules.band import Border, Joined, Mode, at_hand, banded, bordered, source_row
from halotile.spatial.rules.kernel import Convolve, simple, whole_gets_onednn
from halotile.spatial.rules.padding import Padding
from halotile.spatial.rules.transposed import transposed_convolution
from halotile.spatial.rules.upsampled import convolved
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten

# elements of a band for each weight, below which further calls for the seams cost more than a copy of the band:
# on a CPU each packs the weights again
_CPU_BAND_PER_WEIGHT = 32
_BAND_PER_WEIGHT = 2


@rule(aten.convolution.default)
def convolution(
    op: Op,
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Any kernel, stride, dilation, groups and padding; transposed convolutions in `transposed.py`."""
    if not isinstance(x, SpatialTensor) or isinstance(weight, SpatialTensor) or isinstance(bias, SpatialTensor):
        return NotImplemented
    dims = x.dim() - 2
    stride, padding, dilation, output_padding = (
        list(n) * dims if len(n) == 1 else list(n) for n in (stride, padding, dilation, output_padding)
    )
    as_whole = not transposed and not simple() and whole_gets_onednn(x, weight, stride, padding, dilation, groups)
    call = Convolve(op, weight, bias, stride, padding, dilation, transposed, output_padding, groups, as_whole)
    if min(call.sizes(x.shape)) < 1:
        return NotImplemented
    if x.spec.dim == 0:
        return x.like(call(x.local) if x.spec.local_size(x.ranks.rank) else call.empty(x.local, 0))
    if x.spec.dim == 1 or x.spec.blocks > 1:
        if sole_owner(x.spec) is None:
            return NotImplemented
        x = resharded(x, 2)
    if transposed:
        return transposed_convolution(x, call)
    window = _window(x, call)
    if not window.borders:
        by_phase = convolved(window.base, window.call, window.before, window.after, window.mode)
        if by_phase is not None:
            return by_phase
    return window.at_seams() if window.seams_pay() else window.at_once()


def _window(x: SpatialTensor, call: Convolve) -> _Window:
    """The convolution with pending padding folded into its own."""
    along = x.spec.dim - 2
    pending = x.lazy
    borders: tuple[Border, ...] = ()
    if isinstance(pending, Padding) and not simple() and _folds(pending, call, along):
        base = pending.base
        before, after = (call.padding[along] + n for n in pending.pads[base.spec.dim])
        borders, folded = pending.borders, list(call.padding)
        if pending.mode == "constant":
            even = [border for border in borders if border.before == border.after]
            for border in even:
                folded[border.dim - 2] += border.before
            borders = tuple(border for border in borders if border not in even)
        call = replace(call, padding=folded)
        mode = pending.mode
    else:
        base, before, after, mode = x, call.padding[along], call.padding[along], "constant"
    reach = call.dilation[along] * (call.weight.shape[2 + along] - 1)
    extents, wanted = field_rows(
        base.spec.extents, call.weight.shape[2 + along], call.stride[along], before, after, call.dilation[along]
    )
    return _Window(base, call, before, after, mode, borders, reach, extents, wanted)


def _folds(pending: Padding, call: Convolve, along: int) -> bool:
    """Whether padding, and then convolving, is one convolution with (more) padding."""
    if any(map(any, pending.pads[:2])):
        return False
    if pending.mode == "constant":
        return pending.value == 0
    return pending.mode != "circular" and call.padding[along] == 0


@dataclass(frozen=True)
class _Window:
    """A convolution over the rows of `base`, with `before` and `after` rows of padding at the true borders."""

    base: SpatialTensor
    call: Convolve
    before: int
    after: int
    mode: Mode
    borders: tuple[Border, ...]
    reach: int
    extents: Extents
    wanted: tuple[Interval, ...]

    def seams_pay(self) -> bool:
        """Whether to convolve the band by itself and then its seam rows again. The same on every rank."""
        base, call = self.base, self.call
        if base.device.type == "cpu" and (self.borders or isinstance(base.lazy, Joined)):
            # a copy is made, anyway, in which the halo has its place
            return False
        bands = base.spec.extents.sizes
        per_weight = _CPU_BAND_PER_WEIGHT if base.device.type == "cpu" else _BAND_PER_WEIGHT
        return (
            not simple()
            and self.before == self.after > 0
            and self.extents == base.spec.extents
            and call.stride[base.spec.dim - 2] == 1
            and min(bands) > self.reach
            and base.numel() // base.spec.size * max(bands) > per_weight * call.weight.numel()
        )

    def at_seams(self) -> SpatialTensor:
        """The band with the layer's own padding while the halo travels, then the few rows at its seams anew.

        No padded copy of the band is made, and the messages hide behind the work.
        """
        if self.borders:
            return self._bordered().at_seams()
        base, dim, halo, reach = self.base, self.base.spec.dim, self.before, self.reach
        local, rows = base.local, base.local.shape[dim]
        arrivals = begin_fetch(local, dim, base.spec.extents, self._existing(), base.ranks)
        out = self.call.padded(dim - 2, halo)(local)
        above, below = self._halo(arrivals.wait())
        seam = self.call.padded(dim - 2, 0)
        if above:
            strip = _joined([*above, local.narrow(dim, 0, reach)], dim, local)
            out.narrow(dim, 0, halo).copy_(seam(strip))
        if below:
            strip = _joined([local.narrow(dim, rows - reach, reach), *below], dim, local)
            out.narrow(dim, rows - halo, halo).copy_(seam(strip))
        return base.like(out)

    def at_once(self) -> SpatialTensor:
        """One buffer with the band, its halo and its padding, convolved once. Any stride, any band, however thin."""
        base, dim = self.base, self.base.spec.dim
        if not at_hand(base, self.wanted, self.mode):
            return self._with_rows().at_once()
        spec = base.spec.with_extents(self.extents)
        call = self.call.padded(dim - 2, 0)
        if all(rows == owned for rows, owned in zip(self.wanted, base.spec.extents.intervals, strict=True)):
            band = bordered(base, self.borders)
        else:
            band = banded(base, self.wanted, self.mode, self.borders)
        if not self.extents.sizes[base.ranks.rank]:
            return base.like(call.empty(bordered(base, self.borders), dim), spec)
        return base.like(call(band), spec)

    def _bordered(self) -> _Window:
        """The same with the padding of the other dims made."""
        return replace(self, base=self.base.like(bordered(self.base, self.borders)), borders=())

    def _with_rows(self) -> _Window:
        """The same with the padding of the rows made, where a rank would have to fetch what it is to repeat."""
        base = self._bordered().base
        pads = tuple((self.before, self.after) if d == base.spec.dim else (0, 0) for d in range(base.dim()))
        padding = Padding(base, pads, self.mode)
        extents, wanted = field_rows(
            padding.extents, self.reach // self._dilation + 1, self._stride, 0, 0, self._dilation
        )
        return replace(
            self,
            base=base.like(padding.make(), base.spec.with_extents(padding.extents)),
            before=0,
            after=0,
            mode="constant",
            borders=(),
            extents=extents,
            wanted=wanted,
        )

    @property
    def _stride(self) -> int:
        return self.call.stride[self.base.spec.dim - 2]

    @property
    def _dilation(self) -> int:
        return self.call.dilation[self.base.spec.dim - 2]

    def _existing(self) -> list[Interval]:
        """What every rank wants of the rows that there are."""
        return [Interval(0, self.base.spec.size).intersect(rows) for rows in self.wanted]

    def _halo(self, arrived: list[tuple[Interval, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The rows above and below the band, from other ranks or, at a true border, by the padding's mode."""
        base, dim = self.base, self.base.spec.dim
        own, total = base.spec.extents.interval(base.ranks.rank), base.spec.size
        above = [part for rows, part in arrived if rows.stop <= own.start]
        below = [part for rows, part in arrived if rows.start >= own.stop]

        def border(rows: range) -> list[torch.Tensor]:
            sources = [source_row(self.mode, row, total) - own.start for row in rows]
            return [base.local.narrow(dim, source, 1) for source in sources]

        if self.mode != "constant" and own.start == 0:
            above = border(range(-self.before, 0))
        if self.mode != "constant" and own.stop == total:
            below = border(range(total, total + self.after))
        return above, below


def _joined(parts: Sequence[torch.Tensor], dim: int, like: torch.Tensor) -> torch.Tensor:
    """Rows put together in the memory layout of the band: another layout may get another kernel."""
    return torch.cat(list(parts), dim, out=empty_rows(like, dim, sum(part.shape[dim] for part in parts)))

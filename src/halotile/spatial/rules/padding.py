"""Padding. Of the sharded dim it stays pending until something asks for the rows: a convolution never does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from halotile.geometry import Extents
from halotile.spatial.move import pick_rows
from halotile.spatial.registry import Op, rule
from halotile.spatial.rules.band import Border, Mode, bordered, source_row
from halotile.spatial.rules.slices import slice_
from halotile.spatial.rules.upsampled import untouched, with_border
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Padding:
    """Padding that nobody has asked for yet: the `Lazy` rows of a padded tensor.

    `pads` has (before, after) for each dim, none negative.
    """

    base: SpatialTensor
    pads: tuple[tuple[int, int], ...]
    mode: Mode = "constant"
    value: float = 0.0

    @property
    def like(self) -> torch.Tensor:
        return self.base.local if self.base.lazy is None else self.base.lazy.like

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return [self.base.local] if self.base.lazy is None else self.base.lazy.sources

    def from_copy(self) -> Padding:
        # rows that are yet to be made look after themselves
        return self if self.base.lazy is not None else replace(self, base=self.base.like(self.base.local.clone()))

    @property
    def extents(self) -> Extents:
        """The rows of the padded tensor: the first rank that has rows gets those before them, the last those after."""
        return _padded(self.base.spec.extents, *self.pads[self.base.spec.dim])

    @property
    def borders(self) -> tuple[Border, ...]:
        """The padding of the dims that are not sharded, in a mode other than constant."""
        return tuple(
            Border(d, *pair, self.mode) for d, pair in enumerate(self.pads) if any(pair) and d != self.base.spec.dim
        )

    def make(self) -> torch.Tensor:
        """The padded rows."""
        base, dim = self.base, self.base.spec.dim
        before, after = self.pads[dim]
        extents, me = base.spec.extents, base.ranks.rank
        first, last = _ends(extents)
        if self.mode == "constant":
            mine = list(self.pads)
            mine[dim] = (before * (me == first), after * (me == last))
            return F.pad(base.local, _flat(mine), value=self.value)
        base = base.like(bordered(base, self.borders))
        if not before and not after:
            return base.local
        total = extents.total
        wanted: list[list[int]] = [[] for _ in range(extents.ranks)]
        wanted[first] += [source_row(self.mode, row, total) for row in range(-before, 0)]
        wanted[last] += [source_row(self.mode, row, total) for row in range(total, total + after)]
        border = pick_rows(base, wanted)
        top = before * (me == first)
        return torch.cat(
            [border.narrow(dim, 0, top), base.local, border.narrow(dim, top, border.shape[dim] - top)], dim
        )


@rule(aten.constant_pad_nd.default)
def constant_pad(op: Op, x: SpatialTensor, pad: Sequence[int], value: float) -> Any:
    """Constant padding, negative pads (rows cut off) included."""
    pads = _by_dim(pad, x.dim())
    dim = x.spec.dim
    if any(pads[dim]) and x.spec.blocks > 1:
        return NotImplemented
    before, after = pads[dim]
    if before < 0 or after < 0:
        cut = slice_(aten.slice.Tensor, x, dim, max(0, -before), x.spec.size - max(0, -after), 1)
        rest = list(pads)
        rest[dim] = (max(0, before), max(0, after))
        # slicing alone gives a view, padding never does
        return (
            constant_pad(op, cut, _flat(rest), value) if any(map(any, rest)) else cut.like(cut.local.clone(), cut.spec)
        )
    if not (before or after) or any(n < 0 for pair in pads for n in pair):
        others = list(pads)
        others[dim] = (0, 0)
        inner = x.like(F.pad(x.local, _flat(others), value=value))
        return inner if not (before or after) else constant_pad(op, inner, _flat(_only(pads, dim)), value)
    return _lazy(Padding(x, tuple(pads), "constant", value))


@rule(
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
)
def border_pad(op: Op, x: SpatialTensor, pad: Sequence[int]) -> Any:
    """Padding with rows of the tensor itself; dims are independent of each other."""
    pads = _by_dim(pad, x.dim())
    dim = x.spec.dim
    mode: Mode = "replicate" if "replication" in op.name() else "reflect"
    before, after = pads[dim]
    reach = x.spec.size - (mode == "reflect")
    if (before or after) and (
        x.spec.blocks > 1 or min(before, after) < 0 or (max(before, after) > reach and mode != "replicate")
    ):
        return NotImplemented
    others = list(pad)
    behind = x.dim() - 1 - dim
    if 2 * behind < len(others):
        others[2 * behind : 2 * behind + 2] = [0, 0]
    inner = x
    waiting = with_border(x, _by_dim(others, x.dim())) if mode == "replicate" else None
    if waiting is not None:
        inner = waiting
    elif (before or after) and x.is_contiguous() and _fits(x, pads, mode):
        return _lazy(Padding(x, tuple(pads), mode))
    elif any(others):
        # torch takes no empty tensor here
        inner = x.like(op(x.local, others) if x.local.numel() else F.pad(x.local, others))
    elif not (before or after):
        return x.like(x.local.clone())
    return _lazy(Padding(inner, tuple(_only(pads, dim)), mode)) if before or after else inner


def _fits(x: SpatialTensor, pads: Sequence[tuple[int, int]], mode: Mode) -> bool:
    """Whether torch would pad the dims that are not sharded, by nothing less than zero."""
    others = [(size, *pair) for d, (size, pair) in enumerate(zip(x.shape, pads, strict=True)) if d != x.spec.dim]
    return all(
        min(before, after) >= 0 and (mode != "reflect" or max(before, after) < size) for size, before, after in others
    )


def _lazy(padding: Padding) -> SpatialTensor:
    padding = replace(padding, base=untouched(padding.base))
    base = padding.base
    shape = [size + sum(pair) for size, pair in zip(base.shape, padding.pads, strict=True)]
    # torch's padding is contiguous, or channels_last, whatever it is padding of
    strides = None
    if padding.mode == "constant":
        stand_in = torch.empty_strided(base.shape, base.stride(), device="meta")
        strides = F.pad(stand_in, _flat(padding.pads)).stride()
    return SpatialTensor(padding, base.spec.with_extents(padding.extents), base.ledger, shape, strides)


def _padded(extents: Extents, before: int, after: int) -> Extents:
    sizes = list(extents.sizes)
    first, last = _ends(extents)
    sizes[first] += before
    sizes[last] += after
    return Extents(tuple(sizes))


def _ends(extents: Extents) -> tuple[int, int]:
    """The first and the last rank that have rows."""
    having = [rank for rank, size in enumerate(extents.sizes) if size] or [0]
    return having[0], having[-1]


def _by_dim(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """torch's list, last dim first, as one pair a dim."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _only(pads: Sequence[tuple[int, int]], dim: int) -> list[tuple[int, int]]:
    return [pair if d == dim else (0, 0) for d, pair in enumerate(pads)]


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """One pair a dim as torch's list, without the pairs of leading dims that are zero."""
    flat = [n for pair in reversed(pads) for n in pair]
    while len(flat) > 2 and not (flat[-1] or flat[-2]):
        del flat[-2:]
    return flat

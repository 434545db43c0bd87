"""One buffer for what a convolution sees: a rank's band, its halo and all padding, each copied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from halotile.comm import begin_fetch, empty_rows, fetch_rows
from halotile.geometry import Interval
from halotile.spatial.tensor import SpatialTensor
from halotile.spatial.watching import unwatched

Mode = Literal["constant", "replicate", "reflect", "circular"]


@dataclass(frozen=True)
class Border:
    """Padding of a dim that is not sharded: zeros (`constant`), or elements of the tensor itself."""

    dim: int
    before: int
    after: int
    mode: Mode


@dataclass(frozen=True)
class Joined:
    """Rows put together along a dim that is not sharded, which nobody has asked for yet (`Lazy`)."""

    parts: tuple[torch.Tensor, ...]
    dim: int

    @property
    def like(self) -> torch.Tensor:
        return self.parts[0]

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return self.parts

    def from_copy(self) -> Joined:
        return replace(self, parts=tuple(part.clone() for part in self.parts))

    def make(self) -> torch.Tensor:
        """The rows in one piece."""
        return torch.cat(self.parts, self.dim)


def source_row(mode: Mode, row: int, total: int) -> int:
    """The row of `total` that padded row `row` (negative, or beyond the last) repeats."""
    if mode == "replicate":
        return min(max(row, 0), total - 1)
    if mode == "reflect":
        return -row if row < 0 else 2 * (total - 1) - row
    return row % total


def bordered(x: SpatialTensor, borders: Sequence[Border]) -> torch.Tensor:
    """This rank's rows of `x` with `borders`, of which there is at most one a dim."""
    if not borders:
        return x.local
    rows = _parts(x)
    out = rows.like.new_empty(_sizes(rows, borders))
    with unwatched():
        _put(_inside(out, borders), rows)
        for border in borders:
            _repeat(out, border.dim, border.before, border.after, border.mode)
    return out


def banded(
    x: SpatialTensor, wanted: Sequence[Interval], mode: Mode = "constant", borders: Sequence[Border] = ()
) -> torch.Tensor:
    """This rank's wanted rows of `x`, which has one block, with `borders` in the other dims.

    Rows that there are not are zeros (`constant`), or repeat others by `mode`: those must be `at_hand`.
    """
    rows, dim, extents, me = _parts(x), x.spec.dim, x.spec.extents, x.ranks.rank
    mine, existing = wanted[me], _existing(x, wanted)
    inside = existing[me]
    top = inside.start - mine.start if len(inside) else len(mine)
    bottom = len(mine) - top - len(inside)
    if borders or len(rows.parts) > 1:
        sizes = _sizes(rows, borders)
        sizes[dim] = len(mine)
        buffer = rows.like.new_empty(sizes)
    else:
        buffer = empty_rows(rows.like, dim, len(mine))
    body = buffer.narrow(dim, top, len(inside))
    _fetch(x, rows, existing, _inside(body, borders))
    with unwatched():
        for border in borders:
            _repeat(body, border.dim, border.before, border.after, border.mode)
        if mode == "constant":
            buffer.narrow(dim, 0, top).zero_()
            buffer.narrow(dim, top + len(inside), bottom).zero_()
        elif len(inside):
            for row in (*range(mine.start, inside.start), *range(inside.stop, mine.stop)):
                source = source_row(mode, row, extents.total)
                buffer.narrow(dim, row - mine.start, 1).copy_(buffer.narrow(dim, source - mine.start, 1))
    return buffer


def at_hand(x: SpatialTensor, wanted: Sequence[Interval], mode: Mode) -> bool:
    """Whether every rank has, among its wanted rows, those that the missing ones repeat. The same on all ranks."""
    return mode == "constant" or all(
        row in there or source_row(mode, row, x.spec.size) in there
        for rows, there in zip(wanted, _existing(x, wanted), strict=True)
        for row in range(rows.start, rows.stop)
    )


def _parts(x: SpatialTensor) -> Joined:
    """What a rank's rows of `x` are put together from, if they are yet to be; else the rows themselves."""
    return x.lazy if isinstance(x.lazy, Joined) else Joined((x.local,), 0)


def _put(out: torch.Tensor, rows: Joined, dim: int = 0, span: Interval | None = None) -> None:
    """Copy rows (or a `span` of them along `dim`) into `out`, part after part."""
    first = 0
    for part in rows.parts:
        size = part.shape[rows.dim]
        source = part if span is None else part.narrow(dim, span.start, len(span))
        out.narrow(rows.dim, first, size).copy_(source)
        first += size


def _fetch(x: SpatialTensor, rows: Joined, wanted: Sequence[Interval], into: torch.Tensor) -> None:
    """The wanted rows of `x`, into their places."""
    dim, extents, me = x.spec.dim, x.spec.extents, x.ranks.rank
    own, mine = extents.interval(me), wanted[me]
    # the same on all ranks, as both ways send other messages
    all_kept = all(o.start >= w.start and o.stop <= w.stop for o, w in zip(extents.intervals, wanted, strict=True))
    if len(rows.parts) == 1 or not all_kept:
        fetch_rows(x.local, dim, extents, wanted, x.ranks, into=into)
        return
    place = into.narrow(dim, own.start - mine.start, len(own))
    # what others want first: the rest is put together while it travels
    with unwatched():
        for peer in x.ranks.others:
            span = own.intersect(wanted[peer]).shift(-own.start)
            if len(span):
                _put(place.narrow(dim, span.start, len(span)), rows, dim, span)
    arrivals = begin_fetch(place, dim, extents, wanted, x.ranks)
    with unwatched():
        _put(place, rows)
        for there, landed in arrivals.wait():
            into.narrow(dim, there.start - mine.start, len(there)).copy_(landed)


def _sizes(rows: Joined, borders: Sequence[Border]) -> list[int]:
    """Of rows, put together, with their borders."""
    sizes = list(rows.like.shape)
    sizes[rows.dim] = sum(part.shape[rows.dim] for part in rows.parts)
    for border in borders:
        sizes[border.dim] += border.before + border.after
    return sizes


def _existing(x: SpatialTensor, wanted: Sequence[Interval]) -> list[Interval]:
    return [Interval(0, x.spec.size).intersect(rows) for rows in wanted]


def _inside(out: torch.Tensor, borders: Sequence[Border]) -> torch.Tensor:
    """The part of `out` that is within its borders."""
    for border in borders:
        out = out.narrow(border.dim, border.before, out.shape[border.dim] - border.before - border.after)
    return out


def _repeat(out: torch.Tensor, dim: int, before: int, after: int, mode: Mode) -> None:
    """Fill the border of one dim from what is inside of it."""
    total = out.shape[dim] - before - after
    if mode == "constant":
        out.narrow(dim, 0, before).zero_()
        out.narrow(dim, before + total, after).zero_()
        return
    for place in (*range(-before, 0), *range(total, total + after)):
        source = source_row(mode, place, total)
        out.narrow(dim, before + place, 1).copy_(out.narrow(dim, before + source, 1))

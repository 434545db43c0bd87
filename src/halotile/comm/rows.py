"""`fetch_rows`, the one data movement of halotile, and the delivery of uneven pieces that is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

import torch

from halotile.comm.memory_link import LARGE
from halotile.comm.ranks import Ranks
from halotile.comm.transport import Exchange
from halotile.errors import PlanError
from halotile.geometry import Extents, Interval

Deliver = Literal["all", "driver", "sharded"]

# bytes from which a message costs little more than its copy
_APART = 1 << 18


def fetch_rows(
    local: torch.Tensor,
    dim: int,
    extents: Extents,
    wanted: Sequence[Interval],
    ranks: Ranks,
    order: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of a sharded tensor that this rank wants, wherever they are.

    `local` holds this rank's rows of `dim`: those of `extents.interval(rank)`. `wanted` names, for each rank, the
    global rows that it wants, so that every rank knows every message: they match with no negotiation, have exactly
    their size, and none is sent for nothing. An interval may reach past the nearest neighbour, and may be empty. The
    result has its dims in memory in `order`, outermost first, or as `local` has them (channels_last stays
    channels_last); give it where it must be the same on all ranks, for a band of one row or none has no order. With
    `into`, the rows go there.

    Example: extents (3, 3) and wanted (Interval(0, 4), Interval(2, 6)) give each rank its rows and one row of halo.

    Raises PlanError when the plan and the tensor disagree.
    """
    _check(local, dim, extents, wanted, ranks)
    own = extents.interval(ranks.rank)
    mine = wanted[ranks.rank]
    out = empty_rows(local, dim, len(mine), order) if into is None else into
    exchange, parts = _begin(local, dim, extents, wanted, ranks, out)
    kept = own.intersect(mine)
    _rows(out, dim, kept, mine.start).copy_(_rows(local, dim, kept, own.start))
    exchange.wait()
    for part in parts:
        if part.place is not part.landed:
            part.place.copy_(part.landed)
    return out


@dataclass(frozen=True)
class Arrivals:
    """Rows on their way to this rank."""

    exchange: Exchange
    parts: list[tuple[Interval, torch.Tensor]]

    def wait(self) -> list[tuple[Interval, torch.Tensor]]:
        """The rows that came from other ranks, in row order, once all are here and all of this rank's are sent."""
        self.exchange.wait()
        return self.parts


def begin_fetch(local: torch.Tensor, dim: int, extents: Extents, wanted: Sequence[Interval], ranks: Ranks) -> Arrivals:
    """Start the messages of `fetch_rows` and return at once; what this rank has itself is not among the arrivals.

    `local` must not be written to before `wait`.
    """
    exchange, parts = _begin(local, dim, extents, wanted, ranks, None)
    return Arrivals(exchange, [(part.rows, part.landed) for part in parts])


@dataclass(frozen=True)
class _Part:
    """Rows of one message: where they land, and where they are to be."""

    rows: Interval
    landed: torch.Tensor
    place: torch.Tensor


def _begin(
    local: torch.Tensor,
    dim: int,
    extents: Extents,
    wanted: Sequence[Interval],
    ranks: Ranks,
    into: torch.Tensor | None,
) -> tuple[Exchange, list[_Part]]:
    """Rows land in `into` (this rank's wanted rows) where they are in one piece there, else in buffers of their own."""
    own, mine = extents.interval(ranks.rank), wanted[ranks.rank]
    sends, receives, parts = [], [], []
    for peer in ranks.others:
        theirs = own.intersect(wanted[peer])
        if len(theirs):
            apart = into is not None and _apart(local, dim, theirs, wanted[peer], extents.interval(peer))
            view = _rows(local, dim, theirs, own.start)
            sends += [(peer, piece.contiguous()) for piece in _pieces(view, dim, apart)]
        rows = extents.interval(peer).intersect(mine)
        if len(rows):
            apart = into is not None and _apart(local, dim, rows, mine, own)
            shape = list(local.shape)
            shape[dim] = len(rows)
            places = (
                [local.new_empty(shape)] if into is None else _pieces(_rows(into, dim, rows, mine.start), dim, apart)
            )
            for place in places:
                landed = place if place.is_contiguous() else place.new_empty(place.shape)
                receives.append((peer, landed))
                parts.append(_Part(rows, landed, place))
    return ranks.transport.begin(sends, receives, _large(local, dim, extents, wanted)), parts


def _large(local: torch.Tensor, dim: int, extents: Extents, wanted: Sequence[Interval]) -> bool:
    """Whether some rank sends another more than memory is kept for. All ranks answer alike."""
    row = prod(local.shape[:dim]) * prod(local.shape[dim:][1:]) * local.element_size()
    return row * extents.total > LARGE and any(
        row * len(own.intersect(wanted[peer])) > LARGE
        for rank, own in enumerate(extents.intervals)
        for peer in range(extents.ranks)
        if peer != rank
    )


def _apart(local: torch.Tensor, dim: int, rows: Interval, wanted: Interval, own: Interval) -> bool:
    """Whether `rows` of what a rank wants travel a message for each index of the dims before `dim`, into their places.

    They do where landing buffers would take more memory than half of the result, and the messages are large. Sender
    and receiver answer alike: from what all ranks know.
    """
    foreign = len(wanted) - len(own.intersect(wanted))
    return 2 * foreign > len(wanted) and len(rows) * prod(local.shape[dim:][1:]) * local.element_size() >= _APART


def _pieces(rows: torch.Tensor, dim: int, apart: bool) -> list[torch.Tensor]:
    """The messages for a view of some rows."""
    return [rows[index] for index in product(*map(range, rows.shape[:dim]))] if apart else [rows]


def empty_rows(like: torch.Tensor, dim: int, rows: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """An unfilled tensor shaped as `like` with another number of rows; dims in memory in `order`, or as in `like`."""
    shape = list(like.shape)
    shape[dim] = rows
    if order is None:
        if like.is_contiguous():
            return like.new_empty(shape)
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda d: -strides[d])
    return torch.empty_permuted(shape, list(order), dtype=like.dtype, device=like.device)


def deliver_rows(
    local: torch.Tensor, dim: int, extents: Extents, ranks: Ranks, deliver: Deliver = "all", driver: int = 0
) -> torch.Tensor | None:
    """Hand a sharded tensor to `all` ranks, to the `driver` alone (None elsewhere), or leave it `sharded`.

    Uneven and empty shards are fine; only what a rank is to have travels to it.
    """
    ranks.check(driver, "driver")
    if deliver == "sharded":
        return local
    out = fetch_rows(local, dim, extents, receiving(extents, deliver, driver), ranks)
    return out if deliver == "all" or ranks.rank == driver else None


def receiving(extents: Extents, deliver: Deliver, driver: int) -> list[Interval]:
    """What each rank wants of a result that goes whole to `all`, or to the `driver` alone."""
    whole, nothing = Interval(0, extents.total), Interval(0, 0)
    return [whole if deliver == "all" or rank == driver else nothing for rank in range(extents.ranks)]


def _rows(tensor: torch.Tensor, dim: int, rows: Interval, first: int) -> torch.Tensor:
    """The view of global `rows` in a tensor whose first row is global row `first`."""
    return tensor.narrow(dim, rows.start - first, len(rows)) if len(rows) else tensor.narrow(dim, 0, 0)


def _check(local: torch.Tensor, dim: int, extents: Extents, wanted: Sequence[Interval], ranks: Ranks) -> None:
    if len(extents.sizes) != ranks.size or len(wanted) != ranks.size:
        raise PlanError(
            f"a plan for {ranks.size} ranks needs as many extents and intervals, "
            f"got {len(extents.sizes)} and {len(wanted)}"
        )
    if not -local.dim() <= dim < local.dim():
        raise PlanError(f"dim {dim} is not one of a tensor of shape {tuple(local.shape)}")
    if local.shape[dim] != extents.sizes[ranks.rank]:
        raise PlanError(
            f"rank {ranks.rank} holds {local.shape[dim]} rows of dim {dim}, "
            f"the extents {extents.sizes} give it {extents.sizes[ranks.rank]}"
        )
    for rank, rows in enumerate(wanted):
        if len(rows) and not (rows.start >= 0 and rows.stop <= extents.total):
            raise PlanError(f"rank {rank} wants rows {rows.start} to {rows.stop} of a tensor of {extents.total}")

"""`fetch_rows`, the one data movement of halotile, and the delivery of uneven pieces that is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from halotile.comm.ranks import Ranks
from halotile.errors import PlanError
from halotile.geometry import Extents, Interval

Deliver = Literal["all", "driver", "sharded"]


def fetch_rows(
    local: torch.Tensor, dim: int, extents: Extents, wanted: Sequence[Interval], ranks: Ranks
) -> torch.Tensor:
    """The rows of a sharded tensor that this rank wants, wherever they are.

    `local` holds this rank's rows of `dim`: those of `extents.interval(rank)`. `wanted` names, for each rank, the
    global rows that it wants, so that every rank knows every message: they match with no negotiation, have exactly
    their size, and none is sent for nothing. An interval may reach past the nearest neighbour, and may be empty.

    Example: extents (3, 3) and wanted (Interval(0, 4), Interval(2, 6)) give each rank its rows and one row of halo.

    Raises PlanError when the plan and the tensor disagree.
    """
    _check(local, dim, extents, wanted, ranks)
    own = extents.interval(ranks.rank)
    mine = wanted[ranks.rank]
    sends = [(peer, _rows(local, dim, own.intersect(wanted[peer]), own.start).contiguous()) for peer in ranks.others]
    shape = list(local.shape)
    shape[dim] = len(mine)
    out = local.new_empty(shape)
    landing = []
    for peer in ranks.others:
        part = _rows(out, dim, extents.interval(peer).intersect(mine), mine.start)
        landing.append((peer, part, part if part.is_contiguous() else torch.empty_like(part).contiguous()))
    kept = own.intersect(mine)
    _rows(out, dim, kept, mine.start).copy_(_rows(local, dim, kept, own.start))
    ranks.transport.exchange(sends, [(peer, buffer) for peer, _, buffer in landing])
    for _, part, buffer in landing:
        if buffer is not part:
            part.copy_(buffer)
    return out


def deliver_rows(
    local: torch.Tensor, dim: int, extents: Extents, ranks: Ranks, deliver: Deliver = "all", driver: int = 0
) -> torch.Tensor | None:
    """Hand a sharded tensor to `all` ranks, to the `driver` alone (None elsewhere), or leave it `sharded`.

    Uneven and empty shards are fine; only what a rank is to have travels to it.
    """
    ranks.check(driver, "driver")
    if deliver == "sharded":
        return local
    whole, nothing = Interval(0, extents.total), Interval(0, 0)
    wanted = [whole if deliver == "all" or rank == driver else nothing for rank in range(ranks.size)]
    out = fetch_rows(local, dim, extents, wanted, ranks)
    return out if deliver == "all" or ranks.rank == driver else None


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

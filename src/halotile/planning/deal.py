"""Schedulers: which rank does which piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from halotile.errors import PlanError

Scheduler = Literal["balanced", "round_robin"]
SCHEDULERS: tuple[str, ...] = get_args(Scheduler)


def deal(costs: Sequence[int], ranks: int, scheduler: Scheduler = "balanced") -> tuple[int, ...]:
    """The rank of each piece of work, `costs` being what each piece takes (latent cells of a tile, say).

    `balanced`: longest processing time first (Graham 1969, at most 4/3 of the best heaviest load): the costliest piece
    that is left goes to the rank with the least so far; ties go to the lower index and the lower rank, so that every
    rank finds the same answer. `round_robin`: piece i to rank i modulo ranks. Surplus ranks get nothing.

    Example: costs (4, 4, 2, 1) over 2 ranks gives (0, 1, 0, 1): loads 6 and 5.
    """
    if ranks < 1:
        raise PlanError(f"work is dealt to at least 1 rank, got {ranks}")
    if scheduler not in SCHEDULERS:
        raise PlanError(f"scheduler={scheduler!r} is not known; choose one of {', '.join(SCHEDULERS)}")
    if scheduler == "round_robin":
        return tuple(index % ranks for index in range(len(costs)))
    owners = [0] * len(costs)
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        owners[index] = rank
        loads[rank] += costs[index]
    return tuple(owners)


def loads_of(costs: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The summed cost that each rank was dealt."""
    loads = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return tuple(loads)

"""Schedulers: which rank does which piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapreplace
from typing import Literal, get_args

from halotile.errors import PlanError
from halotile.planning.pack import least_heaviest, pack

Scheduler = Literal["balanced", "contiguous", "round_robin"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)


def deal(costs: Sequence[int], ranks: int, scheduler: Scheduler = "balanced") -> tuple[int, ...]:
    """The rank of each piece of work, `costs` being what each piece takes (latent cells of a tile, say).

    * `balanced`: the heaviest load as small as can be. Longest processing time first (Graham 1969, at most 4/3 of the
      best heaviest load), and where its load is above what no deal can be below, a search for the best one
      (`planning.pack`). The search takes a fixed number of steps at most, a few tens of milliseconds; up to a dozen
      pieces, and for most grids of tiles, it ends before that and the deal is optimal.
    * `contiguous`: runs of neighbouring pieces, rank after rank, cut where the heaviest run is least: optimal among
      runs, exactly.
    * `round_robin`: piece i to rank i modulo ranks.

    Ties go to the lower index and the lower rank, so that every rank finds the same answer. With at least as many
    ranks as pieces each piece has a rank of its own and surplus ranks get nothing.

    Example: costs (4, 4, 2, 1) over 2 ranks are (0, 1, 0, 1) when balanced, loads 6 and 5, and (0, 1, 1, 1) when
    contiguous, loads 4 and 7.
    """
    if ranks < 1:
        raise PlanError(f"work is dealt to at least 1 rank, got {ranks}")
    if scheduler not in SCHEDULERS:
        raise PlanError(f"scheduler={scheduler!r} is not known; choose one of {', '.join(SCHEDULERS)}")
    if any(cost < 0 for cost in costs):
        raise PlanError(f"a piece of work costs at least 0, got {min(costs)}")
    if scheduler == "round_robin":
        return tuple(index % ranks for index in range(len(costs)))
    if scheduler == "contiguous":
        return _contiguous(costs, ranks)
    return _balanced(tuple(costs), ranks)


def loads_of(costs: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The summed cost that each rank was dealt."""
    loads = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return tuple(loads)


# every call of a decode deals its tiles anew, and mostly the same ones
@lru_cache(maxsize=64)
def _balanced(costs: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    owners = longest_first(costs, ranks)
    heaviest = max(loads_of(costs, owners, ranks))
    work = [index for index, cost in enumerate(costs) if cost > 0]
    if heaviest <= least_heaviest(costs, ranks):
        return owners
    better = pack([costs[index] for index in work], ranks, heaviest)
    if better is None:
        return owners
    packed = [0] * len(costs)  # pieces without cost may be anywhere
    for index, owner in zip(work, better, strict=True):
        packed[index] = owner
    return tuple(packed)


def longest_first(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Longest processing time first: the costliest piece that is left goes to the rank with the least so far."""
    return _hand_out(costs, [(0, rank) for rank in range(ranks)])


def deal_early(rows: Sequence[Sequence[int]], ranks: int) -> tuple[int, ...]:
    """The rank of each tile, their costs given in rows (all tiles of the same frames), so that early rows end early.

    Row by row longest processing time first, on top of the rows before: the loads are even after every row, not only at
    the end. Rows (4, 2) (3, 3) over 2 ranks are (0, 1) (1, 0).
    """
    loads = [(0, rank) for rank in range(ranks)]
    return tuple(owner for row in rows for owner in _hand_out(row, loads))


def _hand_out(costs: Sequence[int], loads: list[tuple[int, int]]) -> tuple[int, ...]:
    """The costliest piece that is left to the first of the heap `loads`, (load, rank), which is kept up."""
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        owners[index] = rank
        heapreplace(loads, (load + costs[index], rank))
    return tuple(owners)


def _contiguous(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Bisect on the heaviest run: runs that are filled up to it from the left need the fewest ranks."""
    low, high = least_heaviest(costs, ranks), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if max(_runs(costs, ranks, middle), default=0) < ranks:
            high = middle
        else:
            low = middle + 1
    return _runs(costs, ranks, high)


def _runs(costs: Sequence[int], ranks: int, heaviest: int) -> tuple[int, ...]:
    """Owners of runs of at most `heaviest`, or, when that is too little, with owners beyond the ranks there are.

    A rank stops early when the pieces left are just one for each rank left, so that none idles for lack of a piece.
    """
    owners: list[int] = []
    rank = load = 0
    for index, cost in enumerate(costs):
        if index and (load + cost > heaviest or len(costs) - index < ranks - rank):
            rank += 1
            load = 0
        owners.append(rank)
        load += cost
    return tuple(owners)

"""Exact packing of work onto ranks, for as long as a fixed number of steps allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd

from halotile.errors import PlanError

STEPS = 20_000
"""Steps that `pack` may take, some 10 ms: counted and not timed, so that every rank stops at the same answer."""

BITS = 1 << 24
"""Bits of all sums of pieces that `pack` may write: a few milliseconds. Tiles stay far below."""


def least_heaviest(costs: Sequence[int], ranks: int) -> int:
    """A bound that no deal's heaviest load can be below.

    The mean, the costliest piece, and pigeonholes: of the k · ranks + 1 costliest pieces, k + 1 share a rank, so it
    carries at least the k + 1 least costly of these. Example: costs (5, 5, 5, 4) over 3 ranks: 9, as two must share.
    """
    ordered = sorted(costs, reverse=True)
    sums = list(accumulate(ordered, initial=0))
    crowded = (sums[k * ranks + 1] - sums[k * (ranks - 1)] for k in range((len(ordered) - 1) // ranks + 1))
    return max(-(-sums[-1] // ranks), *crowded) if ordered else 0


def pack(costs: Sequence[int], ranks: int, heaviest: int, steps: int = STEPS) -> tuple[int, ...] | None:
    """The rank of each piece such that the heaviest load is below `heaviest` and as small as can be, or None.

    Bisects on the heaviest load, and asks of each whether the pieces fit into ranks of that capacity: bin completion
    (Korf, IJCAI 2003; Schreiber and Korf, IJCAI 2013), rank by rank, the costliest piece left first. Tiles have few
    distinct areas, so pieces are counted by cost, a capacity is rounded down to a sum of some of them, and what did not
    fit is remembered by its counts. The answer is optimal when all questions were settled within `steps`; one that was
    not counts as a no. No rank is left empty while another has several pieces. Every piece costs at least 1.

    Example: costs (3, 3, 2, 2, 2) over 2 ranks below 7 are (0, 0, 1, 1, 1), loads 6 and 6.
    """
    if not costs or min(costs) < 1:
        raise PlanError(f"pieces to pack cost at least 1 each, got {tuple(costs)}")
    unit = gcd(*costs)
    pieces = [cost // unit for cost in costs]
    counted = sorted(Counter(pieces).items(), reverse=True)
    sizes, counts = tuple(size for size, _ in counted), tuple(count for _, count in counted)
    low, high = least_heaviest(pieces, ranks), -(-heaviest // unit)
    sums = _subset_sums(sizes, counts, high) if high * len(sizes) <= BITS else None
    best: list[tuple[int, ...]] | None = None
    while low < high:
        middle = (low + high) // 2
        capacity = middle if sums is None else (sums & ((1 << middle + 1) - 1)).bit_length() - 1
        found = None
        if low <= capacity and sum(pieces) <= capacity * ranks:
            # half of what is left: a hard question must not use up the steps of the easier ones after it
            budget = _Budget(steps // 2)
            found = _fit(sizes, counts, ranks, capacity, budget)
            steps -= budget.spent
        if found is None:
            low = middle + 1
        else:
            best = found
            high = max(_weight(sizes, taken) for taken in found)
    return None if best is None else _owners(pieces, sizes, _spread(sizes, best, ranks))


class _Budget:
    """Counts steps up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0

    def spend(self, steps: int) -> bool:
        """Count `steps` more; False when that is beyond the limit."""
        self.spent += steps
        return self.spent <= self.limit


def _subset_sums(sizes: tuple[int, ...], counts: tuple[int, ...], most: int) -> int:
    """Bit n is set when some of the pieces weigh n together, for n up to `most`: the loads that a rank can have."""
    mask = (1 << most + 1) - 1
    sums = 1
    for size, count in zip(sizes, counts, strict=True):
        # 1, 2, 4, ... and the rest at a time: any number up to count is a sum of some of these
        left, step = count, 1
        while left > 0:
            sums |= sums << size * min(step, left) & mask
            left -= step
            step *= 2
    return sums


def _fit(
    sizes: tuple[int, ...], counts: tuple[int, ...], ranks: int, capacity: int, budget: _Budget
) -> list[tuple[int, ...]] | None:
    """How many pieces of each size every rank takes, none above `capacity`; None when there is no way, or no budget."""
    failed: dict[tuple[int, ...], int] = {}  # counts left -> most ranks that did not suffice
    chosen: list[tuple[int, ...]] = []
    lefts = [counts]
    choices = [_choices(sizes, counts, ranks, capacity, budget)]
    # A stack of generators: one a rank would be recursion, and there may be more ranks than Python's limit.
    while choices:
        taken = next(choices[-1], None)
        if taken is None:
            choices.pop()
            left = lefts.pop()
            failed[left] = ranks - len(chosen)
            if chosen:
                chosen.pop()
            continue
        budget.spend(len(sizes))
        left = tuple(have - take for have, take in zip(lefts[-1], taken, strict=True))
        if not any(left):
            return [*chosen, taken]
        others = ranks - len(chosen) - 1
        if failed.get(left, 0) < others:
            chosen.append(taken)
            lefts.append(left)
            choices.append(_choices(sizes, left, others, capacity, budget))
    return None


def _choices(
    sizes: tuple[int, ...], left: tuple[int, ...], ranks: int, capacity: int, budget: _Budget
) -> Iterator[tuple[int, ...]]:
    """What one rank may take of what is `left`: the costliest piece, and so much that no other piece fits as well.

    Taking less cannot help, as a piece that fits here may leave any other rank. What the other `ranks` - 1 could not
    carry at `capacity` has to be taken. Larger pieces first, as in Gilmore and Gomory's list of cutting patterns.
    """
    first = next(i for i, have in enumerate(left) if have)
    budget.spend(len(sizes))
    least = _weight(sizes, left) - (ranks - 1) * capacity
    last = len(sizes) - 1
    taken = [0] * len(sizes)
    room = capacity
    position = first
    while True:
        if not budget.spend(len(sizes) - first):
            return
        for i in range(position, len(sizes)):
            taken[i] = min(left[i], room // sizes[i])
            room -= taken[i] * sizes[i]
        if taken[first] == 0:
            return
        full = all(have == take or size > room for size, have, take in zip(sizes, left, taken, strict=True))
        if full and capacity - room >= least:
            yield tuple(taken)
        # one piece fewer of the smallest size that has one; of the very last size that would leave room for it
        room += taken[last] * sizes[last]
        taken[last] = 0
        position = last
        while position >= first and taken[position] == 0:
            position -= 1
        if position < first:
            return
        taken[position] -= 1
        room += sizes[position]
        position += 1


def _weight(sizes: tuple[int, ...], taken: Sequence[int]) -> int:
    return sum(size * count for size, count in zip(sizes, taken, strict=True))


def _spread(sizes: tuple[int, ...], chosen: list[tuple[int, ...]], ranks: int) -> list[list[int]]:
    """Give each rank that was left empty the cheapest piece of the heaviest rank that has several."""
    spread = [*map(list, chosen), *([0] * len(sizes) for _ in range(ranks - len(chosen)))]
    for empty in spread[len(chosen) :]:
        several = [taken for taken in spread if sum(taken) > 1]
        if not several:
            break
        heaviest = max(several, key=lambda taken: _weight(sizes, taken))
        cheapest = max(i for i, count in enumerate(heaviest) if count)
        heaviest[cheapest] -= 1
        empty[cheapest] += 1
    return spread


def _owners(costs: Sequence[int], sizes: tuple[int, ...], ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Pieces of one cost in order of index, ranks in order of number."""
    waiting = {size: iter([i for i, cost in enumerate(costs) if cost == size]) for size in sizes}
    owners = [0] * len(costs)
    for rank, taken in enumerate(ranks):
        for size, count in zip(sizes, taken, strict=True):
            for _ in range(count):
                owners[next(waiting[size])] = rank
    return tuple(owners)

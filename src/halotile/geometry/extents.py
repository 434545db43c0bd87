"""How many rows of one dim each rank owns."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from halotile.errors import PlanError
from halotile.geometry.interval import Interval
from halotile.geometry.whole import require_whole


@dataclass(frozen=True, slots=True)
class Extents:
    """Rows of one dim that each rank owns, in rank order; a rank may own none.

    ``Extents((3, 0, 2))`` is five rows: rank 0 owns [0, 3), rank 1 nothing, rank 2 [3, 5).
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, tuple):
            raise PlanError(f"sizes must be a tuple with one whole number a rank, got {self.sizes!r}")
        if not self.sizes:
            raise PlanError("sizes is (): there must be at least 1 rank")
        for rank, size in enumerate(self.sizes):
            require_whole(f"the size of rank {rank} in {self.sizes}", size, least=0)

    @classmethod
    def even(cls, total: int, ranks: int) -> Extents:
        """Split ``total`` rows over ``ranks`` so that sizes differ by at most one, larger ones first.

        Five rows over three ranks are (2, 2, 1); three rows over five ranks are (1, 1, 1, 0, 0).
        """
        require_whole("total", total, least=0)
        require_whole("ranks", ranks, least=1)
        size, rest = divmod(total, ranks)
        return cls((size + 1,) * rest + (size,) * (ranks - rest))

    @property
    def ranks(self) -> int:
        """Number of ranks, those without rows included."""
        return len(self.sizes)

    @property
    def total(self) -> int:
        """Rows of all ranks together."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each rank; a rank without rows starts where the next one does."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The rows of each rank, in rank order."""
        return tuple(Interval(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def interval(self, rank: int) -> Interval:
        """The rows that ``rank`` owns."""
        require_whole("rank", rank)
        if rank not in range(self.ranks):
            raise PlanError(f"rank {rank} is not one of {self.ranks} ranks; ranks are 0 to {self.ranks - 1}")
        start = sum(self.sizes[:rank])
        return Interval(start, start + self.sizes[rank])

    def owner(self, row: int) -> int:
        """The rank that owns ``row``; never one without rows."""
        require_whole("row", row)
        if row not in range(self.total):
            raise PlanError(f"row {row} has no owner among {self.total} rows of sizes {self.sizes}")
        # The last rank that starts at or before the row: ranks without rows share their start with the next one.
        return bisect_right(self.starts, row) - 1

    def scaled(self, numerator: int, denominator: int = 1) -> Extents:
        """Extents after an operation that turns ``denominator`` rows into ``numerator``, every seam staying a seam.

        (4, 6) by 1/2 is (2, 3). (3, 5) by 1/2 is refused although its total, 8, halves: the seam at row 3 would lie
        at row 1.5. Every size is whole exactly when every start is.
        """
        require_whole("numerator", numerator, least=1)
        require_whole("denominator", denominator, least=1)
        multiple = denominator // gcd(numerator, denominator)
        for rank, size in enumerate(self.sizes):
            if size % multiple:
                raise PlanError(
                    f"rank {rank} owns {size} rows, which times {numerator}/{denominator} is not whole "
                    f"(sizes {self.sizes}); each size must be a multiple of {multiple}"
                )
        return Extents(tuple(size * numerator // denominator for size in self.sizes))

    def in_multiples_of(self, quantum: int) -> Extents:
        """Nearly the same extents with every seam at a multiple of ``quantum``, so that no group of rows is cut in two.

        The total stays, so the last rank that owns rows takes what is left over: (3, 3) in multiples of 4 is (4, 2).
        """
        require_whole("quantum", quantum, least=1)
        total = self.total
        seams = [min((start + quantum // 2) // quantum * quantum, total) for start in self.starts] + [total]
        return Extents(tuple(after - before for before, after in pairwise(seams)))

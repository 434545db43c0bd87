"""Half-open intervals of rows of one dim."""

from __future__ import annotations

from dataclasses import dataclass

from halotile.errors import PlanError
from halotile.geometry.whole import require_whole


@dataclass(frozen=True, slots=True)
class Interval:
    """The rows ``start, start + 1, ..., stop - 1`` of one dim, in whatever unit the caller counts.

    ``start == stop`` is empty, and then falsy. ``start`` may be negative: a halo that is wanted beyond the first
    row is named before it is clipped.

    >>> Interval(2, 6).intersect(Interval(4, 9))
    Interval(start=4, stop=6)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        require_whole("start", self.start)
        require_whole("stop", self.stop)
        if self.stop < self.start:
            raise PlanError(
                f"an interval from {self.start} to {self.stop} has {self.stop - self.start} rows; "
                f"stop must be at least {self.start}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and self.start <= row < self.stop

    @property
    def empty(self) -> bool:
        """True when there are no rows."""
        return self.start == self.stop

    def contains(self, other: Interval) -> bool:
        """True when every row of ``other`` is in this interval; an empty one always is."""
        return other.empty or (self.start <= other.start and other.stop <= self.stop)

    def intersect(self, other: Interval) -> Interval:
        """The rows of both.

        When there are none, the result is empty and lies at the end of *this* interval that is nearer to ``other``,
        so that ``local[r.start - self.start : r.stop - self.start]`` is a valid, empty slice of this interval's rows:
        ``Interval(4, 8).intersect(Interval(20, 30)) == Interval(8, 8)``.
        """
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def hull(self, other: Interval) -> Interval:
        """The smallest interval that contains both. An empty one has no rows to contain and is ignored."""
        if other.empty:
            return self
        if self.empty:
            return other
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def shift(self, rows: int) -> Interval:
        """The interval moved by ``rows`` (negative: towards the first row)."""
        require_whole("rows", rows)
        return Interval(self.start + rows, self.stop + rows)

    def scale(self, factor: int) -> Interval:
        """The same region in a unit ``factor`` times finer: latent rows [2, 5) at factor 8 are pixel rows [16, 40)."""
        require_whole("factor", factor, least=1)
        return Interval(self.start * factor, self.stop * factor)

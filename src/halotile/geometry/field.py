"""Which input rows the output rows of a sliding window look at, and which rank owns which output row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from halotile.errors import PlanError
from halotile.geometry.extents import Extents
from halotile.geometry.interval import Interval
from halotile.geometry.whole import require_whole


def field_rows(
    extents: Extents, kernel: int, stride: int = 1, before: int = 0, after: int = 0, dilation: int = 1
) -> tuple[Extents, tuple[Interval, ...]]:
    """Deal the output rows of a window over ``extents`` to ranks, and name the input rows that each rank needs.

    Output row ``j`` looks at rows ``stride * j - before`` to ``stride * j - before + dilation * (kernel - 1)``, and is
    owned by the owner of the row in the middle, clipped to a row that exists. With any other owner, an explicit pad
    followed by an unpadded window drifts a row a layer towards the first rank.

    The wanted intervals are not clipped: what lies outside of ``[0, extents.total)`` is padding. A rank without output
    rows wants the empty interval at its own first row. ``before`` and ``after`` may be negative: rows that are cut off.

    Three rows a rank, kernel 3, one row of padding on both sides:

    >>> field_rows(Extents((3, 3)), kernel=3, before=1, after=1)
    (Extents(sizes=(3, 3)), (Interval(start=-1, stop=4), Interval(start=2, stop=7)))

    Raises PlanError when there is no output row.
    """
    for name, value in (("kernel", kernel), ("stride", stride), ("dilation", dilation)):
        require_whole(name, value, least=1)
    require_whole("before", before)
    require_whole("after", after)
    total, reach = extents.total, dilation * (kernel - 1)
    outputs = (total + before + after - reach - 1) // stride + 1
    if outputs < 1:
        raise PlanError(
            f"a window of {reach + 1} rows (kernel {kernel}, dilation {dilation}) does not fit in "
            f"{total + before + after} rows ({total}, {before} before, {after} after)"
        )
    first_centre = reach // 2 - before
    stops = [_rows_centred_before(row.stop, total, first_centre, stride, outputs) for row in extents.intervals]
    starts = [0, *stops[:-1]]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    wanted = tuple(
        Interval(stride * start - before, stride * (stop - 1) - before + reach + 1)
        if stop > start
        else Interval(own.start, own.start)
        for start, stop, own in zip(starts, stops, extents.intervals, strict=True)
    )
    return Extents(sizes), wanted


def rows_by_source(extents: Extents, sources: Sequence[int]) -> Extents:
    """Deal output rows to the owners of the input rows that they are made from; ``sources`` never goes back.

    Two input rows, one a rank, picked as 0 0 1 1 1: the ranks own (2, 3) output rows.
    """
    stops = [bisect_left(sources, row.stop) for row in extents.intervals]
    return Extents(tuple(after - before for before, after in pairwise([0, *stops])))


def _rows_centred_before(row: int, total: int, first_centre: int, stride: int, outputs: int) -> int:
    """How many output rows have their clipped centre before ``row``."""
    if row >= total:
        return outputs
    if row <= 0:
        return 0
    return min(max((row - 1 - first_centre) // stride + 1, 0), outputs)

"""Transposed convolution of the sharded dim."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from halotile.geometry import Extents, Interval
from halotile.spatial.move import fetch
from halotile.spatial.rules.kernel import Convolve
from halotile.spatial.tensor import SpatialTensor


def transposed_convolution(x: SpatialTensor, call: Convolve) -> Any:
    """A transposed convolution: output row j is owned by the owner of the middle one of the input rows it is made of.

    Input row i reaches output rows s i - p + d t for t below k, so output row j is made of the input rows from
    ceil((j + p - d (k - 1)) / s) to floor((j + p) / s).
    """
    dim, me, total = x.spec.dim, x.ranks.rank, x.spec.size
    along = dim - 2
    s, p, d, extra = call.stride[along], call.padding[along], call.dilation[along], call.output_padding[along]
    reach = d * (call.weight.shape[2 + along] - 1)
    outputs = (total - 1) * s - 2 * p + reach + extra + 1

    def outputs_before(row: int) -> int:
        """How many output rows have their middle row, (j + p - reach / 2) / s, before an input row."""
        if row <= 0 or row >= total:
            return 0 if row <= 0 else outputs
        return min(max(row * s - p + reach // 2, 0), outputs)

    seams = [0, *(outputs_before(owned.stop) for owned in x.spec.extents.intervals)]
    extents = Extents(tuple(after - before for before, after in pairwise(seams)))
    wanted = []
    for rows in extents.intervals:
        # at least one row, also for output rows that are bias alone
        first = min(-((reach - rows.start - p) // s), (rows.start + p) // s)
        first = min(max(first, 0), total - 1)
        last = min(max((rows.stop - 1 + p) // s, first), total - 1)
        wanted.append(Interval(first, last + 1) if len(rows) else Interval(0, 0))
    band, mine, rows = fetch(x, wanted), wanted[me], extents.intervals[me]
    spec = x.spec.with_extents(extents)
    if not len(rows):
        return x.like(call.empty(band, dim), spec)
    begin, have = rows.start + p - s * mine.start, (len(mine) - 1) * s + reach + 1
    out = call.padded(along, 0, max(0, begin + len(rows) - have))(band)
    return x.like(out.narrow(dim, begin, len(rows)).contiguous(), spec)

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import Extents, Interval

light = settings(deadline=None, max_examples=100)
extents = st.lists(st.integers(0, 9), min_size=1, max_size=8).map(lambda sizes: Extents(tuple(sizes)))


@light
@given(extents)
def test_intervals_partition_the_rows_and_owner_agrees(ext: Extents) -> None:
    assert [row for own in ext.intervals for row in range(own.start, own.stop)] == list(range(ext.total))
    assert ext.intervals == tuple(ext.interval(rank) for rank in range(ext.ranks))
    assert ext.starts == tuple(own.start for own in ext.intervals)
    assert tuple(len(own) for own in ext.intervals) == ext.sizes
    for row in range(ext.total):
        assert row in ext.interval(ext.owner(row))


def test_owner_passes_over_ranks_without_rows() -> None:
    ext = Extents((0, 3, 0, 0, 2, 0))
    assert [ext.owner(row) for row in range(5)] == [1, 1, 1, 4, 4]
    assert ext.interval(2) == Interval(3, 3)
    assert ext.starts == (0, 0, 3, 3, 3, 5)


@light
@given(st.integers(0, 60), st.integers(1, 16))
def test_even_sums_to_the_total_larger_first(total: int, ranks: int) -> None:
    sizes = Extents.even(total, ranks).sizes
    assert len(sizes) == ranks
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_even_case_s2_few_rows_over_four_ranks() -> None:
    assert Extents.even(5, 4).sizes == (2, 1, 1, 1)
    assert Extents.even(3, 4).sizes == (1, 1, 1, 0)
    assert Extents.even(1, 4).sizes == (1, 0, 0, 0)
    assert Extents.even(0, 4).sizes == (0, 0, 0, 0)


@light
@given(extents, st.integers(1, 12), st.integers(1, 12))
def test_scaled_is_exact_or_refused(ext: Extents, numerator: int, denominator: int) -> None:
    factor = Fraction(numerator, denominator)
    # Fractions are the judge: all seams, the end among them, must land on whole rows.
    seams = [own.stop * factor for own in ext.intervals]
    if all(seam.denominator == 1 for seam in seams):
        assert [own.stop for own in ext.scaled(numerator, denominator).intervals] == seams
    else:
        with pytest.raises(PlanError, match=rf"times {numerator}/{denominator} is not whole"):
            ext.scaled(numerator, denominator)


def test_scaled_refuses_a_seam_between_rows_although_the_total_is_whole() -> None:
    assert Extents((4, 0, 6)).scaled(1, 2).sizes == (2, 0, 3)
    assert Extents((4, 0, 6)).scaled(8).sizes == (32, 0, 48)
    with pytest.raises(PlanError, match=r"rank 1 owns 3 rows, which times 2/4 is not whole .*multiple of 2$"):
        Extents((2, 3, 5)).scaled(2, 4)


def test_refusals_name_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"size of rank 1 in \(3, -2\) is -2; .*at least 0"):
        Extents((3, -2))
    with pytest.raises(PlanError, match=r"sizes is \(\): there must be at least 1 rank"):
        Extents(())
    with pytest.raises(PlanError, match=r"must be a tuple .*\[1, 2\]"):
        Extents([1, 2])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"size of rank 0 .* is 2\.5"):
        Extents((2.5,))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"row 5 has no owner among 5 rows of sizes \(3, 2, 0\)"):
        Extents((3, 2, 0)).owner(5)
    with pytest.raises(PlanError, match=r"row -1 has no owner"):
        Extents((3, 2)).owner(-1)
    with pytest.raises(PlanError, match=r"rank 2 is not one of 2 ranks; ranks are 0 to 1"):
        Extents((3, 2)).interval(2)
    with pytest.raises(PlanError, match=r"rank -1 is not one of 2"):
        Extents((3, 2)).interval(-1)
    with pytest.raises(PlanError, match=r"ranks is 0; .*at least 1"):
        Extents.even(4, 0)
    with pytest.raises(PlanError, match=r"total is -4; .*at least 0"):
        Extents.even(-4, 2)
    with pytest.raises(PlanError, match=r"denominator is 0"):
        Extents((2,)).scaled(1, 0)
    with pytest.raises(PlanError, match=r"numerator is 0"):
        Extents((2,)).scaled(0)

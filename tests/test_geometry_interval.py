from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import Interval

light = settings(deadline=None, max_examples=100)
intervals = st.builds(lambda a, n: Interval(a, a + n), st.integers(-20, 20), st.integers(0, 15))


def rows(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@light
@given(intervals, intervals)
def test_set_operations_agree_with_sets_of_rows(a: Interval, b: Interval) -> None:
    assert rows(a.intersect(b)) == rows(a) & rows(b)
    assert a.contains(b) == (rows(b) <= rows(a))
    both = rows(a) | rows(b)
    assert rows(a.hull(b)) == (set(range(min(both), max(both) + 1)) if both else set())
    assert {row for row in range(-50, 50) if row in a} == rows(a)
    assert len(a) == len(rows(a))
    assert a.empty == (not rows(a)) == (not a)


@light
@given(intervals, intervals)
def test_an_intersection_is_a_valid_slice_of_the_first_even_when_empty(a: Interval, b: Interval) -> None:
    shared = a.intersect(b)
    assert a.start <= shared.start <= shared.stop <= a.stop
    local = list(range(a.start, a.stop))
    assert set(local[shared.start - a.start : shared.stop - a.start]) == rows(a) & rows(b)


def test_an_empty_intersection_lies_at_the_nearer_end() -> None:
    assert Interval(4, 8).intersect(Interval(20, 30)) == Interval(8, 8)
    assert Interval(4, 8).intersect(Interval(-5, 0)) == Interval(4, 4)
    assert Interval(4, 8).intersect(Interval(8, 12)).empty


@light
@given(intervals, st.integers(-30, 30), st.integers(1, 8))
def test_shift_and_scale(a: Interval, by: int, factor: int) -> None:
    assert rows(a.shift(by)) == {row + by for row in rows(a)}
    assert rows(a.scale(factor)) == {row * factor + k for row in rows(a) for k in range(factor)}


def test_hull_ignores_an_empty_interval() -> None:
    assert Interval(2, 4).hull(Interval(40, 40)) == Interval(2, 4)
    assert Interval(40, 40).hull(Interval(2, 4)) == Interval(2, 4)


def test_what_is_not_a_row_is_not_in() -> None:
    assert "3" not in Interval(0, 9)


def test_refusals_name_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"from 7 to 3 has -4 rows; stop must be at least 7"):
        Interval(7, 3)
    with pytest.raises(PlanError, match=r"stop is 4\.0 \(float\); it must be a whole number"):
        Interval(0, 4.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"start is True \(bool\)"):
        Interval(True, 4)
    with pytest.raises(PlanError, match=r"factor is 0; it must be a whole number of at least 1"):
        Interval(0, 4).scale(0)
    with pytest.raises(PlanError, match=r"rows is 0\.5"):
        Interval(0, 4).shift(0.5)  # type: ignore[arg-type]


def test_it_is_frozen_and_hashable() -> None:
    assert len({Interval(0, 4), Interval(0, 4), Interval(0, 5)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Interval(0, 4).start = 1  # type: ignore[misc]

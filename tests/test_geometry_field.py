"""`field_rows`: who owns the output rows of a sliding window, and which rows they look at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.geometry import Extents, Interval, field_rows, rows_by_source

extents = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any).map(lambda sizes: Extents(tuple(sizes)))


@st.composite
def windows(draw):
    """A window that fits: extents and the arguments of `field_rows`."""
    rows = draw(extents)
    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    reach = dilation * (kernel - 1)
    before = draw(st.integers(-2, reach + 2))
    after = draw(st.integers(-2, reach + 2))
    if rows.total + before + after <= reach:
        after = reach + 1 - rows.total - before
    return rows, kernel, stride, before, after, dilation


@given(windows())
def test_rows_are_owned_by_the_owner_of_the_centre(window):
    rows, kernel, stride, before, after, dilation = window
    reach = dilation * (kernel - 1)
    out, _wanted = field_rows(*window)
    padded = rows.total + before + after
    expected = list(range(0, padded - reach, stride))
    assert out.total == len(expected)
    for j, start in enumerate(expected):
        centre = min(max(start - before + reach // 2, 0), rows.total - 1)
        assert out.owner(j) == rows.owner(centre), (j, centre)


@given(windows())
def test_wanted_rows_are_the_fields_of_the_own_output_rows(window):
    rows, kernel, stride, before, _, dilation = window
    out, wanted = field_rows(*window)
    for rank, (own, want) in enumerate(zip(out.intervals, wanted, strict=True)):
        looked_at = [stride * j - before + dilation * i for j in range(own.start, own.stop) for i in range(kernel)]
        if looked_at:
            assert want == Interval(min(looked_at), max(looked_at) + 1)
        else:
            assert want.empty
            assert want.start == rows.starts[rank]


@given(extents, st.integers(0, 3), st.integers(0, 3))
def test_a_same_sized_window_keeps_the_seams(rows, half, dilation_less_one):
    """Odd kernel, stride 1, symmetric padding: the layer that a decoder is made of moves no seam."""
    dilation = dilation_less_one + 1
    out, _ = field_rows(rows, 2 * half + 1, 1, half * dilation, half * dilation, dilation)
    assert out == rows


def test_a_pad_and_then_a_window_without_padding_keeps_the_seams():
    """(6, 6) padded by one row on both sides is (7, 7), which a kernel of 3 brings back to (6, 6)."""
    assert field_rows(Extents((7, 7)), 3)[0] == Extents((6, 6))


def test_halving_keeps_even_seams():
    out, wanted = field_rows(Extents((4, 6)), kernel=2, stride=2)
    assert out == Extents((2, 3))
    assert wanted == (Interval(0, 4), Interval(4, 10))


@pytest.mark.parametrize("arguments", [{"kernel": 4}, {"kernel": 2, "dilation": 3}, {"kernel": 1, "before": -3}])
def test_a_window_that_does_not_fit_is_refused(arguments):
    with pytest.raises(PlanError, match="does not fit"):
        field_rows(Extents((2, 1)), **arguments)


@pytest.mark.parametrize("name", ["kernel", "stride", "dilation"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(PlanError, match=name):
        field_rows(Extents((3,)), **{"kernel": 1, name: 0})


@given(extents, st.data())
def test_rows_go_to_the_owners_of_their_sources(rows, data):
    sources = sorted(data.draw(st.lists(st.integers(0, rows.total - 1), max_size=12)))
    out = rows_by_source(rows, sources)
    assert out.ranks == rows.ranks
    assert [out.owner(j) for j in range(out.total)] == [rows.owner(source) for source in sources]


@given(extents, st.integers(1, 7))
def test_seams_move_to_the_nearest_multiple(rows, quantum):
    out = rows.in_multiples_of(quantum)
    assert out.total == rows.total
    for start, moved in zip(rows.starts, out.starts, strict=True):
        assert moved % quantum == 0 or moved == rows.total
        assert abs(moved - start) <= quantum // 2
    if all(start % quantum == 0 for start in rows.starts):
        assert out == rows

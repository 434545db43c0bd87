"""`deal`: loads, determinism, the bound of longest processing time first, ties."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.planning import SCHEDULERS, deal
from halotile.planning.deal import loads_of

COSTS = st.lists(st.integers(0, 50), max_size=20)
RANKS = st.integers(1, 8)


@given(COSTS, RANKS, st.sampled_from(SCHEDULERS))
def test_every_piece_has_an_owner_and_loads_sum(costs, ranks, scheduler):
    owners = deal(costs, ranks, scheduler)
    assert len(owners) == len(costs)
    assert all(0 <= owner < ranks for owner in owners)
    loads = loads_of(costs, owners, ranks)
    assert len(loads) == ranks
    assert sum(loads) == sum(costs)
    assert list(loads) == [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]


@given(COSTS, RANKS, st.sampled_from(SCHEDULERS))
def test_the_answer_is_the_same_for_any_sequence_type(costs, ranks, scheduler):
    assert deal(costs, ranks, scheduler) == deal(tuple(costs), ranks, scheduler) == deal(costs[:], ranks, scheduler)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 3))
def test_the_heaviest_load_is_within_grahams_bound(costs, ranks):
    heaviest = max(loads_of(costs, deal(costs, ranks), ranks))
    # the first piece may as well be on rank 0
    best = min(max(loads_of(costs, (0, *rest), ranks)) for rest in product(range(ranks), repeat=len(costs) - 1))
    # 4/3 - 1/(3 ranks) of the optimum, in whole numbers
    assert best <= heaviest
    assert 3 * ranks * heaviest <= (4 * ranks - 1) * best


@given(COSTS, RANKS)
def test_no_move_of_one_piece_makes_the_heaviest_rank_lighter_than_it_became(costs, ranks):
    """Greedy: the last piece that a rank was given found it the least loaded."""
    owners = deal(costs, ranks)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads = [0] * ranks
    for index in order:
        assert loads[owners[index]] == min(loads)
        assert owners[index] == loads.index(min(loads))
        loads[owners[index]] += costs[index]


@pytest.mark.parametrize(
    ("costs", "ranks", "owners"),
    [
        ((4, 4, 2, 1), 2, (0, 1, 0, 1)),
        ((1, 2, 3), 2, (1, 1, 0)),
        ((5, 5, 5, 5), 4, (0, 1, 2, 3)),
        ((5, 5, 5, 5), 3, (0, 1, 2, 0)),
        ((1, 5, 5, 1), 2, (0, 0, 1, 1)),
        ((3, 3), 4, (0, 1)),
        ((), 3, ()),
        ((7, 1, 9), 1, (0, 0, 0)),
        ((0, 0, 0), 2, (0, 0, 0)),
    ],
)
def test_ties_go_to_the_lower_index_and_the_lower_rank(costs, ranks, owners):
    assert deal(costs, ranks) == owners


@given(COSTS, RANKS)
def test_round_robin_ignores_costs(costs, ranks):
    assert deal(costs, ranks, "round_robin") == tuple(i % ranks for i in range(len(costs)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_surplus_ranks_get_nothing(costs):
    """H2: with more ranks than pieces, each piece has a rank of its own."""
    ranks = len(costs) + 3
    owners = deal(costs, ranks)
    assert len(set(owners)) == len(costs)
    assert sorted(loads_of(costs, owners, ranks), reverse=True) == [*sorted(costs, reverse=True), 0, 0, 0]


@pytest.mark.parametrize("ranks", [0, -2])
def test_ranks_below_one_are_refused(ranks):
    with pytest.raises(PlanError, match=f"at least 1 rank, got {ranks}"):
        deal((1, 2), ranks)


def test_an_unknown_scheduler_is_refused_with_the_known_ones():
    with pytest.raises(PlanError, match="scheduler='fair' is not known; choose one of balanced, round_robin"):
        deal((1, 2), 2, "fair")


def test_loads_need_one_owner_a_piece():
    with pytest.raises(ValueError, match="shorter"):
        loads_of((1, 2), (0,), 1)

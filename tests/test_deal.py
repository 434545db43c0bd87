"""`deal`: loads, determinism, optimal against brute force, never worse than longest processing time first, ties."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halotile.errors import PlanError
from halotile.planning import SCHEDULERS, deal
from halotile.planning.deal import loads_of, longest_first
from halotile.planning.pack import least_heaviest, pack

COSTS = st.lists(st.integers(0, 50), max_size=20)
RANKS = st.integers(1, 8)


@given(COSTS, RANKS, st.sampled_from(SCHEDULERS))
@settings(deadline=None)
def test_every_piece_has_an_owner_and_loads_sum(costs, ranks, scheduler):
    owners = deal(costs, ranks, scheduler)
    assert len(owners) == len(costs)
    assert all(0 <= owner < ranks for owner in owners)
    loads = loads_of(costs, owners, ranks)
    assert len(loads) == ranks
    assert sum(loads) == sum(costs)
    assert list(loads) == [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]


@given(COSTS, RANKS, st.sampled_from(SCHEDULERS))
@settings(deadline=None)
def test_the_answer_is_the_same_for_any_sequence_type(costs, ranks, scheduler):
    assert deal(costs, ranks, scheduler) == deal(tuple(costs), ranks, scheduler) == deal(costs[:], ranks, scheduler)


def heaviest_of(costs, owners, ranks) -> int:
    return max(loads_of(costs, owners, ranks))


def best_by_brute_force(costs, ranks) -> int:
    # the first piece may as well be on rank 0
    return min(heaviest_of(costs, (0, *rest), ranks) for rest in product(range(ranks), repeat=len(costs) - 1))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None)
def test_balanced_is_optimal(costs, ranks):
    assert heaviest_of(costs, deal(costs, ranks), ranks) == best_by_brute_force(costs, ranks)


@pytest.mark.parametrize(("pieces", "ranks"), [(9, 3), (10, 2), (8, 3)])
def test_balanced_is_optimal_where_longest_first_is_not(pieces, ranks):
    draw = random.Random(pieces)
    behind = 0
    for _ in range(12):
        costs = [draw.randint(1, 60) for _ in range(pieces)]
        best = best_by_brute_force(costs, ranks)
        assert heaviest_of(costs, deal(costs, ranks), ranks) == best
        behind += heaviest_of(costs, longest_first(costs, ranks), ranks) > best
    assert behind >= 3


def best_by_all_loads(costs, ranks) -> int:
    """Every way to deal, ways with the same loads up to the order of ranks taken together."""
    ways = {(0,) * ranks}
    for cost in costs:
        ways = {tuple(sorted((*way[:i], way[i] + cost, *way[i + 1 :]))) for way in ways for i in range(ranks)}
    return min(max(way) for way in ways)


@pytest.mark.parametrize(
    "sizes", [(7, 5, 3), (13, 11, 8, 5), (9, 7), (54 * 37, 38 * 37, 54 * 16, 38 * 16), (10**8, 37)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_balanced_is_optimal_for_pieces_of_few_sizes(sizes, ranks):
    draw = random.Random(ranks)
    for _ in range(20):
        costs = draw.choices(sizes, k=draw.randint(ranks + 1, 12))
        assert len(set(deal(costs, ranks))) == ranks
        assert heaviest_of(costs, deal(costs, ranks), ranks) == best_by_all_loads(costs, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_balanced_is_optimal_for_costs_too_large_for_a_table_of_sums(ranks):
    draw = random.Random(ranks)
    for _ in range(10):
        # sums differ by ones, so that nearly the best is not the best
        costs = [10**8 * draw.randint(1, 3) + draw.randint(0, 2) for _ in range(9)]
        assert heaviest_of(costs, deal(costs, ranks), ranks) == best_by_all_loads(costs, ranks)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 5))
def test_no_deal_is_below_the_bound(costs, ranks):
    assert least_heaviest(costs, ranks) <= heaviest_of(costs, deal(costs, ranks), ranks)
    assert least_heaviest(costs, ranks) >= max(costs)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_balanced_is_never_worse_than_longest_first(costs, ranks):
    assert heaviest_of(costs, deal(costs, ranks), ranks) <= heaviest_of(costs, longest_first(costs, ranks), ranks)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 200))
@settings(deadline=None)
def test_few_steps_give_a_valid_deal_or_none(costs, ranks, steps):
    heaviest = heaviest_of(costs, longest_first(costs, ranks), ranks)
    owners = pack(costs, ranks, heaviest, steps)
    if owners is not None:
        assert len(owners) == len(costs)
        assert all(0 <= owner < ranks for owner in owners)
        assert heaviest_of(costs, owners, ranks) < heaviest
    assert owners == pack(costs, ranks, heaviest, steps)


@pytest.mark.parametrize("costs", [(), (1, 0), (2, -1)])
def test_only_work_is_packed(costs):
    with pytest.raises(PlanError, match="cost at least 1"):
        pack(costs, 2, 3)


def test_worked_example():
    """A 54 x 37 window, strides 45 and 28, on 128 x 128 latents and 4 ranks."""
    costs = [rows * columns for rows in (54, 54, 38) for columns in (37, 37, 37, 37, 16)]
    even = sum(costs) / 4
    assert f"{heaviest_of(costs, longest_first(costs, 4), 4) / even - 1:.1%}" == "4.7%"
    assert f"{heaviest_of(costs, deal(costs, 4), 4) / even - 1:.1%}" == "0.4%"


@pytest.mark.parametrize("ranks", [2, 16, 64, 300])
def test_hundreds_of_tiles_are_dealt_in_a_bounded_number_of_steps(ranks):
    draw = random.Random(ranks)
    # a search to the end of the first list would outlast the session
    for costs in ([draw.randint(1, 10**6) for _ in range(256)], [43 * (43 if i % 16 else 17) for i in range(256)]):
        owners = deal(costs, ranks)
        assert heaviest_of(costs, owners, ranks) <= heaviest_of(costs, longest_first(costs, ranks), ranks)


def test_no_steps_no_answer():
    assert pack((3, 3, 2, 2, 2), 2, 7) == (0, 0, 1, 1, 1)
    assert pack((3, 3, 2, 2, 2), 2, 7, steps=0) is None


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 4))
@settings(deadline=None)
def test_contiguous_runs_are_cut_where_the_heaviest_is_least(costs, ranks):
    owners = deal(costs, ranks, "contiguous")
    assert owners[0] == 0
    assert all(b - a in (0, 1) for a, b in pairwise(owners))
    every = (o for o in product(range(ranks), repeat=len(costs)) if all(a <= b for a, b in pairwise(o)))
    assert heaviest_of(costs, owners, ranks) == min(heaviest_of(costs, o, ranks) for o in every)
    # no rank idles for lack of a piece
    assert len(set(owners)) == min(ranks, len(costs))


@given(COSTS, RANKS)
def test_longest_first_gives_the_costliest_piece_left_to_the_least_loaded_rank(costs, ranks):
    owners = longest_first(costs, ranks)
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
        ((3, 3, 2, 2, 2), 2, (0, 0, 1, 1, 1)),
        ((3, 2, 3, 2, 0, 2), 2, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_ties_go_to_the_lower_index_and_the_lower_rank(costs, ranks, owners):
    assert deal(costs, ranks) == owners


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 12), st.sampled_from(SCHEDULERS))
@example([192] * 10 + [108] * 14, 11, "balanced")
@settings(deadline=None)
def test_no_rank_idles_while_there_are_pieces(costs, ranks, scheduler):
    assert len(set(deal(costs, ranks, scheduler))) == min(ranks, len(costs))


@given(COSTS, RANKS)
def test_round_robin_ignores_costs(costs, ranks):
    assert deal(costs, ranks, "round_robin") == tuple(i % ranks for i in range(len(costs)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(SCHEDULERS))
def test_surplus_ranks_get_nothing(costs, scheduler):
    """H2: with more ranks than pieces, each piece has a rank of its own."""
    ranks = len(costs) + 3
    owners = deal(costs, ranks, scheduler)
    assert len(set(owners)) == len(costs)
    assert sorted(loads_of(costs, owners, ranks), reverse=True) == [*sorted(costs, reverse=True), 0, 0, 0]


@pytest.mark.parametrize("ranks", [0, -2])
def test_ranks_below_one_are_refused(ranks):
    with pytest.raises(PlanError, match=f"at least 1 rank, got {ranks}"):
        deal((1, 2), ranks)


def test_an_unknown_scheduler_is_refused_with_the_known_ones():
    with pytest.raises(
        PlanError, match="scheduler='fair' is not known; choose one of balanced, contiguous, round_robin"
    ):
        deal((1, 2), 2, "fair")


def test_work_is_not_negative():
    with pytest.raises(PlanError, match="costs at least 0, got -1"):
        deal((1, -1), 2)


def test_loads_need_one_owner_a_piece():
    with pytest.raises(ValueError, match="shorter"):
        loads_of((1, 2), (0,), 1)

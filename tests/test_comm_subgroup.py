"""`SubgroupTransport`: some ranks of a group among themselves, over the group's own messages."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from halotile.comm import Ranks, SubgroupTransport, fetch_rows, run_virtual
from halotile.errors import LostGroupError
from halotile.geometry import Extents, Interval

PAIRS = ((0, 1), (2, 3))


def on_pairs(kind, work, members=PAIRS):
    """What `work(ranks of its subgroup)` returns on each of the four ranks of a group, virtual or gloo."""
    if kind == "virtual":
        return run_virtual(4, lambda transport: _in_subgroup(Ranks(transport, 20.0), work, members), 20.0)
    return run_ranks(_on_group, 4, work, members)


def _on_group(group, work, members):
    return _in_subgroup(Ranks.of(group, 20.0), work, members)


def _in_subgroup(ranks, work, members):
    mine = next(each for each in members if ranks.rank in each)
    return work(Ranks(SubgroupTransport(ranks.transport, mine), ranks.timeout_s))


def _numbers(ranks):
    return ranks.rank, ranks.size, ranks.others, [ranks.global_rank(rank) for rank in range(ranks.size)]


def _collectives(ranks):
    transport, whole = ranks.transport, ranks.global_rank(ranks.rank)
    mine = torch.tensor([whole, -whole])
    # of a non-contiguous tensor, of one without dims, of one without elements
    gathered = transport.all_gather(torch.arange(6).view(2, 3).t() + 10 * whole)
    scalar = transport.all_gather(torch.tensor(whole))
    empty = transport.all_reduce(torch.empty(0, 3))
    return {
        "sum": transport.all_reduce(mine).tolist(),
        "max": transport.all_reduce(mine, "max").tolist(),
        "min": transport.all_reduce(mine, "min").tolist(),
        "gathered": [part[0].tolist() for part in gathered],
        "scalar": [int(part) for part in scalar],
        "empty": tuple(empty.shape),
        "sent by the last": transport.broadcast(mine, ranks.size - 1).tolist(),
        "untouched": mine.tolist() == [whole, -whole],
    }


def _rows(ranks):
    first = 100 * ranks.global_rank(0)
    own = torch.arange(3) + first + 3 * ranks.rank
    return fetch_rows(own, 0, Extents((3, 3)), [Interval(0, 4), Interval(2, 6)], ranks).tolist()


def _sums(ranks):
    part = torch.randn(1000, generator=torch.Generator().manual_seed(ranks.rank))
    return ranks.transport.all_reduce(part)


@pytest.mark.parametrize("kind", ["virtual", "gloo"])
def test_ranks_are_numbered_within_the_subgroup(kind):
    assert on_pairs(kind, _numbers) == [
        (0, 2, [1], [0, 1]), (1, 2, [0], [0, 1]), (0, 2, [1], [2, 3]), (1, 2, [0], [2, 3])
    ]  # fmt: skip
    assert on_pairs(kind, _numbers, ((2, 0, 3), (1,)))[0] == (1, 3, [0, 2], [2, 0, 3])


@pytest.mark.parametrize("kind", ["virtual", "gloo"])
def test_collectives_stay_within_the_subgroup(kind):
    results = on_pairs(kind, _collectives)
    assert results[0] == results[1] == {
        "sum": [1, -1], "max": [1, 0], "min": [0, -1], "gathered": [[0, 3], [10, 13]], "scalar": [0, 1],
        "empty": (0, 3), "sent by the last": [1, -1], "untouched": True,
    }  # fmt: skip
    assert results[2] == results[3]
    assert results[3]["sum"] == [5, -5]
    assert results[3]["sent by the last"] == [3, -3]


@pytest.mark.parametrize("kind", ["virtual", "gloo"])
def test_rows_are_fetched_within_the_subgroup(kind):
    assert on_pairs(kind, _rows) == [[0, 1, 2, 3], [2, 3, 4, 5], [200, 201, 202, 203], [202, 203, 204, 205]]


@pytest.mark.parametrize("members", [PAIRS, ((0, 2), (1, 3))])
def test_sums_have_the_same_bits_in_every_subgroup_and_on_every_transport(members):
    first, *others = on_pairs("virtual", _sums, members) + on_pairs("gloo", _sums, members)
    assert all(torch.equal(other, first) for other in others)


def test_traffic_counts_for_the_whole_group_which_is_lost_as_one():
    def work(transport):
        subgroup = SubgroupTransport(transport, (0, 1))
        subgroup.all_gather(torch.zeros(3))
        counted = transport.counters.snapshot()
        subgroup.abort("enough")
        with pytest.raises(LostGroupError, match="enough"):
            transport.exchange([(1 - transport.rank, torch.zeros(1))], [])
        return counted.messages, counted.bytes_sent

    assert run_virtual(2, work, 20.0) == [(1, 12)] * 2

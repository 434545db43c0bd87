"""All transports: `exchange`, `all_reduce`, `all_gather`, `broadcast`, and their counters.

`on_ranks` is how the tests of `comm/` run one function on virtual ranks and on gloo processes (with
and without the memory of their machine).
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from ranks import run_ranks

from halotile.comm import Call, Counters, Ranks, VirtualGroup, run_virtual
from halotile.comm.host_links import HostLinks
from halotile.errors import MissingRankError, PlanError

KINDS = ("virtual", "gloo")
WAYS = (*KINDS, "linked")
SIZES = (1, 2, 3, 4)


def on_ranks(kind, n, fn, *args, timeout_s=20.0, timeout=60.0):
    """`fn(ranks, *args)` on n ranks of a kind; what each returned, in rank order. No wait is longer than `timeout`."""
    if kind == "virtual":
        return run_virtual(n, lambda transport: fn(Ranks(transport, timeout_s), *args), timeout_s)
    return run_ranks(_on_group, n, fn, timeout_s, args, kind == "linked", timeout=timeout)


def on_members(members, fn, *args, timeout_s=20.0, timeout=60.0):
    """`fn(ranks, *args)` on a gloo group of these ranks of a world of four."""
    return run_ranks(_on_group, len(members), fn, timeout_s, args, True, timeout=timeout, members=members)


def _on_group(group, fn, timeout_s, args, linked):
    """Over the memory of this machine, or as a group of several machines: over its own messages."""
    ranks = Ranks.of(group, timeout_s)
    transport = ranks.transport
    if linked:
        with Call(ranks) as call:
            call.meet({})
        assert transport._links.connected or ranks.size == 1
        return fn(ranks, *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_links", HostLinks(ranks.rank, ranks.size))
        patch.setattr(transport._links, "address", "")
        return fn(ranks, *args)


def traffic_of(ranks, work):
    """What `work()` returned, and the traffic that it caused on this rank."""
    before = ranks.counters.snapshot()
    result = work()
    return result, ranks.counters.since(before)


# --- collectives


def _values(rank, dtype, shape=(3, 2)):
    # whole numbers, so that sums are exact in every dtype
    numel = 1
    for size in shape:
        numel *= size
    return (torch.arange(numel).reshape(shape) * (1 if rank % 2 else -1) + rank).to(dtype)


def _reduce_all(ranks, dtype, op, contiguous):
    mine = _values(ranks.rank, dtype)
    mine = mine if contiguous else mine.t().contiguous().t()
    kept = mine.clone()
    out, traffic = traffic_of(ranks, lambda: ranks.transport.all_reduce(mine, op))
    assert torch.equal(mine, kept), "the input was changed"
    return out, traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_is_the_same_on_every_rank(kind, op, dtype):
    results = on_ranks(kind, 4, _reduce_all, dtype, op, False)
    stacked = torch.stack([_values(rank, torch.int64) for rank in range(4)])
    expected = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op].to(dtype)
    for out, traffic in results:
        assert out.dtype == dtype
        assert torch.equal(out, expected)
        assert traffic == Counters(0, 0, 1)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_at_each_world_size(kind, size):
    expected = sum(_values(rank, torch.float32) for rank in range(size))
    for out, traffic in on_ranks(kind, size, _reduce_all, torch.float32, "sum", True):
        assert torch.equal(out, expected)
        assert traffic.collectives == 1


def _gather_all(ranks, dtype, shape):
    mine = _values(ranks.rank, dtype, shape)
    mine = mine.t().contiguous().t() if mine.dim() == 2 else mine
    parts, traffic = traffic_of(ranks, lambda: ranks.transport.all_gather(mine))
    # results are this rank's own: writing to one changes nothing elsewhere
    untouched = mine.clone()
    kept = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    assert torch.equal(mine, untouched)
    return kept, traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3, 2), (5,), ()])
def test_all_gather_has_every_rank_in_order(kind, dtype, shape):
    for parts, traffic in on_ranks(kind, 3, _gather_all, dtype, shape):
        assert len(parts) == 3
        for rank, part in enumerate(parts):
            assert part.dtype == dtype
            assert torch.equal(part, _values(rank, dtype, shape))
        assert traffic == Counters(0, 0, 1)


def _broadcast_from(ranks, source, dtype):
    mine = _values(ranks.rank, dtype).t().contiguous().t()
    kept = mine.clone()
    out, traffic = traffic_of(ranks, lambda: ranks.transport.broadcast(mine, source))
    out = out.clone()
    assert torch.equal(mine, kept), "the input was changed"
    return out, traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcast_gives_the_sources_tensor(kind, source, dtype):
    for out, traffic in on_ranks(kind, 3, _broadcast_from, source, dtype):
        assert torch.equal(out, _values(source, dtype))
        assert traffic == Counters(0, 0, 1)


def test_broadcast_source_is_group_local():
    """Group (1, 3): source 1 is global rank 3."""
    for out, _ in on_members((1, 3), _broadcast_from, 1, torch.float32):
        assert torch.equal(out, _values(1, torch.float32))


def _all_empty(ranks):
    empty = torch.zeros(1, 0, 2)

    def work():
        reduced = ranks.transport.all_reduce(empty)
        parts = ranks.transport.all_gather(empty)
        sent = ranks.transport.broadcast(empty, 1)
        ranks.transport.exchange([(peer, empty) for peer in ranks.others], [(peer, empty) for peer in ranks.others])
        return [tuple(t.shape) for t in (reduced, *parts, sent)]

    shapes, traffic = traffic_of(ranks, work)
    # a following collective is not confused by them
    assert ranks.transport.all_reduce(torch.ones(1)).item() == ranks.size
    return shapes, traffic


@pytest.mark.parametrize("kind", WAYS)
def test_empty_tensors_come_back_empty_and_send_nothing(kind):
    """H5: an empty all_gather ends a gloo process with SIGFPE, so none reaches it."""
    for shapes, traffic in on_ranks(kind, 4, _all_empty):
        assert shapes == [(1, 0, 2)] * 6
        assert traffic == Counters(0, 0, 0)


# --- exchange


def _exchange_in_order(ranks, empties):
    first = [torch.full((2,), 10.0 * ranks.rank + peer) for peer in ranks.others]
    second = [torch.full((3,), 100.0 * ranks.rank + peer) for peer in ranks.others]
    sends, receives = [], []
    for peer, a, b in zip(ranks.others, first, second, strict=True):
        sends += [(peer, a), *([(peer, torch.empty(0))] if empties else []), (peer, b)]
        receives += [(peer, torch.empty(2)), *([(peer, torch.empty(0, 4))] if empties else []), (peer, torch.empty(3))]
    _, traffic = traffic_of(ranks, lambda: ranks.transport.exchange(sends, receives))
    for peer, buffer in receives:
        value = {0: None, 2: 10.0 * peer + ranks.rank, 3: 100.0 * peer + ranks.rank}[buffer.numel()]
        assert value is None or (buffer == value).all(), (peer, buffer, value)
    return traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("empties", [False, True])
def test_exchange_keeps_the_order_between_two_ranks(kind, empties):
    for traffic in on_ranks(kind, 4, _exchange_in_order, empties):
        assert traffic == Counters(6, 3 * (2 + 3) * 4, 0)


def _ring(ranks, rounds):
    """Uneven one-way traffic: each rank sends to the next one only, many times."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for i in range(rounds):
        buffer = torch.empty(1 + i % 5, dtype=torch.int64)
        sent = torch.full_like(buffer, ranks.rank * 1000 + i)
        ranks.transport.exchange([(after, sent)], [(before, buffer)])
        assert (buffer == before * 1000 + i).all(), (i, buffer)
    return ranks.counters.messages


@pytest.mark.parametrize("kind", WAYS)
def test_many_one_way_exchanges_stay_in_step(kind):
    assert min(on_ranks(kind, 3, _ring, 50)) >= 50


def _send_then_change(ranks):
    mine, theirs = torch.ones(4), torch.empty(4)
    peer = 1 - ranks.rank
    ranks.transport.exchange([(peer, mine)], [(peer, theirs)])
    mine.zero_()
    ranks.transport.all_reduce(torch.ones(1))
    return theirs


@pytest.mark.parametrize("kind", WAYS)
def test_what_was_sent_does_not_change_afterwards(kind):
    for theirs in on_ranks(kind, 2, _send_then_change):
        assert torch.equal(theirs, torch.ones(4))


# --- virtual ranks


def test_virtual_ranks_are_at_least_one():
    with pytest.raises(PlanError, match="at least 1 rank, got 0"):
        VirtualGroup(0)


def test_run_virtual_raises_the_cause_and_not_who_waited_for_it():
    def work(transport):
        if transport.rank == 2:
            raise KeyError("the cause")
        transport.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_virtual(3, work, timeout_s=30.0)
    assert time.monotonic() - started < 5.0


def test_a_virtual_rank_that_raises_ends_the_wait_for_its_message():
    def work(transport):
        if transport.rank == 1:
            raise ValueError("before it sends")
        transport.exchange([], [(1, torch.empty(3))])

    started = time.monotonic()
    with pytest.raises(ValueError, match="before it sends"):
        run_virtual(3, work, 20.0)
    assert time.monotonic() - started < 10.0


def test_a_virtual_message_that_never_comes_is_given_up():
    def work(transport):
        if transport.rank == 0:
            transport.exchange([], [(1, torch.empty(1))])

    with pytest.raises(MissingRankError, match="rank 0 waited for a message of rank 1"):
        run_virtual(2, work, timeout_s=0.2)


def test_virtual_ranks_run_at_the_same_time():
    meeting = threading.Barrier(16)
    assert run_virtual(16, lambda transport: (meeting.wait(10), transport.rank)[1]) == list(range(16))


def test_counters_since_a_snapshot():
    counters = Counters(3, 40, 2)
    before = counters.snapshot()
    counters.sent([(1, torch.zeros(2, 3, dtype=torch.bfloat16)), (0, torch.zeros(5, dtype=torch.int64))])
    counters.collectives += 4
    assert before == Counters(3, 40, 2)
    assert counters.since(before) == Counters(2, 2 * 3 * 2 + 5 * 8, 4)

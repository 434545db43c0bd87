"""Messages between processes of one machine: whole, in order, of their call, and known to be lost."""

import gc
import os
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks, run_world

from halotile.comm import Call, Ranks, deliver_rows, host_links, memory_link
from halotile.comm.host_links import HostLinks
from halotile.comm.transport import LinkError
from halotile.errors import MissingRankError, RemoteRankError
from halotile.geometry import Extents


def _connected(size):
    """Links of several ranks within this process."""
    links = [HostLinks(rank, size) for rank in range(size)]
    addresses = [each.address for each in links]
    assert all(addresses)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda each: each.connect(addresses), links))
    return links


@pytest.fixture
def pair():
    links = _connected(2)
    yield links
    for each in links:
        each.close()


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


SIZES = [1, 1000, memory_link._SHORT, memory_link._SHORT + 1, 100_000, 1 << 20, 20_000_000, memory_link._KEPT + 1]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_arrive_as_they_are(pair, size):
    sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
    for call in range(3):
        got = torch.zeros(size, dtype=torch.uint8)
        pair[0].wait(pair[0].post(call, [(1, sent)], []), 1.0)
        pair[1].wait(pair[1].post(call, [], [(0, got)]), 1.0)
        assert torch.equal(got, sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 40, 50)])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_any_tensor(pair, dtype, shape, guard):
    with guard():
        sent = torch.randn(shape).mul(100).to(dtype)
        got = torch.zeros(shape, dtype=dtype)
        pair[1].post(0, [(0, sent)], [])
        pair[0].wait(pair[0].post(0, [], [(1, got)]), 1.0)
        assert torch.equal(got, sent)


def test_what_was_sent_may_change_at_once(pair):
    for size in (10, 100_000):
        sent, got = torch.ones(size), torch.zeros(size)
        pair[0].post(0, [(1, sent)], [])
        sent.zero_()
        pair[1].wait(pair[1].post(0, [], [(0, got)]), 1.0)
        assert got.eq(1).all()


def test_order_is_that_of_posting_whatever_is_waited_for_first(pair):
    sizes = [5, 50_000, 7, 60_000, 10_000_000, 3]
    for number, size in enumerate(sizes):
        pair[0].post(0, [(1, torch.full((size,), float(number)))], [])
    buffers = [torch.empty(size) for size in sizes]
    posted = [pair[1].post(0, [], [(0, buffer)]) for buffer in buffers]
    for each in reversed(posted):
        pair[1].wait(each, 1.0)
    for number, buffer in enumerate(buffers):
        assert buffer.eq(number).all()


def test_both_send_more_than_a_socket_holds(pair):
    def one(rank):
        sent = [(1 - rank, torch.full((20,), float(number))) for number in range(3000)]
        got = [(1 - rank, torch.empty(20)) for _ in range(3000)]
        pair[rank].wait(pair[rank].post(0, sent, got), 20.0)
        return [int(buffer[0]) for _, buffer in got]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [list(range(3000))] * 2


def test_messages_of_a_call_that_was_left_never_enter_a_later_one(pair):
    for size in (10, 100_000, 10_000_000):
        pair[0].post(1, [(1, torch.ones(size)), (1, torch.ones(size))], [])
        left = torch.zeros(size)
        pair[1].post(2, [], [(0, left)])
        pair[0].post(3, [(1, torch.full((size,), 3.0))], [])
        got = torch.zeros(size)
        pair[1].wait(pair[1].post(3, [], [(0, got)]), 1.0)
        assert got.eq(3).all()
        assert left.eq(0).all()


def test_messages_of_a_later_call_wait_for_it(pair):
    pair[0].post(2, [(1, torch.full((4,), 2.0))], [])
    now, later = torch.zeros(4), torch.zeros(4)
    first = pair[1].post(1, [], [(0, now)])
    with pytest.raises(LinkError, match=r"waited 0.1 s for ranks \[0\]"):
        pair[1].wait(first, 0.1)
    pair[1].wait(pair[1].post(2, [], [(0, later)]), 1.0)
    assert now.eq(0).all()
    assert later.eq(2).all()


def test_memory_and_descriptors_are_used_again(pair):
    got, before = torch.empty(100_000), None
    for number in range(50):
        for size in (100_000, 90_000):
            pair[0].wait(pair[0].post(number, [(1, torch.ones(size))], []), 1.0)
            pair[1].wait(pair[1].post(number, [], [(0, got[:size])]), 1.0)
        before = before or _descriptors()
    assert _descriptors() == before
    assert pair[0]._links[1]._numbers <= 2


def test_no_more_memory_is_kept_than_is_said(pair):
    large = torch.ones(memory_link.LARGE // 4 - 100)
    for number in range(3):
        for _ in range(3):
            pair[0].post(number, [(1, large)], [])
        for _ in range(3):
            got = torch.empty_like(large)
            pair[1].wait(pair[1].post(number, [], [(0, got)]), 5.0)
            assert torch.equal(got, large)
        # what was let go of is known with the next note
        pair[0]._links[1].drain()
        pair[1]._links[0].drain()
        assert sum(segment.size for segment in pair[0]._links[1]._free) == memory_link._KEPT
        assert len(pair[1]._links[0]._theirs) == 2
        assert not pair[0]._links[1]._lent


def test_nothing_is_kept_of_a_message_that_is_larger(pair):
    large = torch.ones(memory_link.LARGE // 4 + 1)
    pair[0].post(0, [(1, large)], [])
    got = torch.empty_like(large)
    pair[1].wait(pair[1].post(0, [], [(0, got)]), 5.0)
    assert torch.equal(got, large)
    for link in (pair[0]._links[1], pair[1]._links[0]):
        assert not link._free
        assert not link._lent
        assert not link._theirs


def test_a_post_takes_one_descriptor_however_many_messages_it_has(pair):
    before = _descriptors()
    sent = [torch.full((2000 if number % 3 else 20,), float(number)) for number in range(150)]
    pair[0].post(0, [(1, each) for each in sent], [])
    got = [torch.empty_like(each) for each in sent]
    pair[1].wait(pair[1].post(0, [], [(0, each) for each in got]), 5.0)
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    # at each end
    assert _descriptors() <= before + 2
    assert pair[0]._links[1]._numbers == 1


def test_few_segments_are_kept_however_small(pair):
    before = _descriptors()
    for number in range(30):
        pair[0].post(0, [(1, torch.full((2000,), float(number)))], [])
    for number in range(30):
        got = torch.empty(2000)
        pair[1].wait(pair[1].post(0, [], [(0, got)]), 5.0)
        assert got.eq(number).all()
    pair[0]._links[1].drain()
    pair[1]._links[0].drain()
    assert len(pair[0]._links[1]._free) == len(pair[1]._links[0]._theirs) == memory_link._SEGMENTS
    assert _descriptors() == before + 2 * memory_link._SEGMENTS


def test_large_segments_are_kept_before_small_ones(pair):
    """Sizes as they come in a decode: after the first all messages find memory."""
    sizes = [20_000 << number for number in range(memory_link._SEGMENTS)]
    for number, size in enumerate(sizes):
        # two at a time, as a rank may be ahead
        for _ in range(2):
            pair[0].post(number, [(1, torch.ones(size))], [])
        for _ in range(2):
            pair[1].wait(pair[1].post(number, [], [(0, torch.empty(size))]), 5.0)
    made = pair[0]._links[1]._numbers
    for number, size in enumerate(sizes, len(sizes)):
        pair[0].post(number, [(1, torch.ones(size))], [])
        pair[1].wait(pair[1].post(number, [], [(0, torch.empty(size))]), 5.0)
    assert pair[0]._links[1]._numbers == made


def test_ranks_of_two_users_leave_it_to_the_group(monkeypatch):
    links = [HostLinks(0, 2)]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    links.append(HostLinks(1, 2))
    for each in links:
        each.connect([each.address for each in links])
        assert not each.connected
        each.close()


def test_the_fork_of_a_rank_does_not_keep_its_connections_open(pair):
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        # as the kernel does for a rank that is killed
        for each in pair[0]._sockets:
            each.close()
        begun = time.monotonic()
        with pytest.raises(LinkError, match="connection closed"):
            pair[1].wait(pair[1].post(0, [], [(0, torch.empty(3))]), 20.0)
        assert time.monotonic() - begun < 10
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_that_is_done_reads_nothing_more(pair):
    """What the slower one would say of what it has taken finds no room, and need not."""

    def one(rank):
        got = [torch.empty(2000) for _ in range(700)]
        posted = [
            pair[rank].post(0, [(1 - rank, torch.full((2000,), float(number)))], [(1 - rank, buffer)])
            for number, buffer in enumerate(got)
        ]
        for each in posted:
            pair[rank].wait(each, 20.0)
        return [int(buffer[0]) for buffer in got]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [list(range(700))] * 2


def test_many_messages_among_many():
    links = _connected(4)

    def one(rank):
        others = [other for other in range(4) if other != rank]
        sent = [(other, torch.full((3000,), float(number))) for number in range(400) for other in others]
        got = [(other, torch.empty(3000)) for _ in range(400) for other in others]
        links[rank].wait(links[rank].post(0, sent, got), 30.0)
        return all(int(buffer[0]) == place // 3 for place, (_, buffer) in enumerate(got))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))
    for each in links:
        each.close()


def _forks(group):
    ranks = Ranks.of(group, 20.0)
    with Call(ranks) as call:
        call.meet({})
    if ranks.rank == 0:
        child = os.fork()
        if not child:
            # what a process does that ends by itself, as far as it is ours
            for each in list(weakref.finalize._registry):
                if each.peek()[1] is host_links._close:
                    each()
            os._exit(0)
        os.waitpid(child, 0)
    return [int(each) for each in ranks.transport.all_gather(torch.tensor([ranks.rank]))]


def test_a_fork_that_ends_leaves_the_connections_of_its_parent():
    assert run_ranks(_forks, 2) == [[0, 1]] * 2


def test_an_end_that_closes_is_known_at_once_and_what_it_sent_still_arrives(pair):
    sent = torch.ones(100_000)
    pair[0].post(0, [(1, sent)], [])
    pair[0].close()
    got, more = torch.zeros(100_000), torch.zeros(1)
    posted = pair[1].post(0, [], [(0, got)])
    begun = time.monotonic()
    pair[1].wait(posted, 30.0)
    assert torch.equal(got, sent)
    with pytest.raises(LinkError, match="rank 1 waited for rank 0, whose connection closed"):
        pair[1].wait(pair[1].post(0, [], [(0, more)]), 30.0)
    assert time.monotonic() - begun < 5
    with pytest.raises(LinkError, match="rank 1 had a message for rank 0"):
        pair[1].post(0, [(0, more)], [])


def test_nothing_is_left_open():
    gc.collect()
    before = _descriptors()
    links = _connected(3)
    links[0].post(0, [(1, torch.ones(100_000)), (2, torch.ones(5))], [])
    assert _descriptors() > before
    del links
    gc.collect()
    assert _descriptors() == before


@pytest.mark.parametrize("lacking", ["a rank without", "another machine", "by wish"])
def test_all_go_this_way_or_none(lacking, monkeypatch):
    links = [HostLinks(rank, 2) for rank in range(2)]
    addresses = [each.address for each in links]
    if lacking == "a rank without":
        addresses[1] = ""
    elif lacking == "another machine":
        addresses[1] = addresses[1].replace("net:", "net:1")
    else:
        monkeypatch.setenv("HALOTILE_HOST_LINKS", "0")
        addresses[1] = HostLinks(1, 2).address
        assert addresses[1] == ""
    for each in links:
        each.connect(addresses)
        assert not each.connected
        each.close()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(host_links, "_CONNECT_S", 0.2)
    links = [HostLinks(rank, 2) for rank in range(2)]
    with pytest.raises(LinkError, match="rank 0 could not connect to ranks of its machine"):
        links[0].connect([each.address for each in links])
    for each in links:
        each.close()


# --- as groups use them


def _uses_links(group):
    ranks = Ranks.of(group, 20.0)
    with Call(ranks) as call:
        call.meet({})
    transport, others = ranks.transport, ranks.others
    sent = torch.full((3, 70_000), float(ranks.rank))
    got = [torch.empty_like(sent) for _ in others]
    calls = []
    batch = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: calls.append(ops) or batch(ops)
    try:
        transport.exchange([(rank, sent) for rank in others], list(zip(others, got, strict=True)))
        gathered = transport.all_gather(torch.tensor([ranks.rank]))
    finally:
        dist.batch_isend_irecv = batch
    assert not calls
    return [int(each[0, 0]) for each in got], [int(each) for each in gathered]


@pytest.mark.parametrize("members", [(0, 1), (1, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_a_group_of_one_machine_sends_nothing_over_its_sockets(members):
    results = run_ranks(_uses_links, len(members), members=members)
    for rank, (got, gathered) in enumerate(results):
        assert got == [other for other in range(len(members)) if other != rank]
        assert gathered == list(range(len(members)))


def _large(group):
    ranks = Ranks.of(group, 20.0)
    with Call(ranks) as call:
        call.meet({})
    peer = 1 - ranks.rank
    sent = [torch.full((size,), float(size + ranks.rank)) for size in (7, memory_link.LARGE // 4 + 1, 70_000)]
    got = [torch.empty_like(each) for each in sent]
    calls, batch = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: calls.append(len(ops)) or batch(ops)
    try:
        ranks.transport.exchange([(peer, each) for each in sent], [(peer, each) for each in got])
        whole = torch.full((memory_link.LARGE // 4, 1, 2), float(ranks.rank))
        rows = deliver_rows(whole, 1, Extents((1, 1)), ranks)
    finally:
        dist.batch_isend_irecv = batch
    assert rows is not None
    return [bool(each.eq(len(each) + peer).all()) for each in got], calls, rows.sum((0, 2)).tolist()


def test_large_messages_go_by_the_group_and_are_not_held_twice():
    for right, calls, sums in run_ranks(_large, 2):
        assert right == [True] * 3
        assert calls[0] == 2
        assert len(calls) == 2
        assert sums == [0.0, memory_link.LARGE / 2]


def _pieces(group):
    ranks = Ranks.of(group, 20.0)
    with Call(ranks) as call:
        call.meet({})
    # 40 messages of 1 MB to each of two
    rows = torch.full((40, 1, 250_000), float(ranks.rank))
    calls, batch = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: calls.append(len(ops)) or batch(ops)
    try:
        whole = deliver_rows(rows, 1, Extents((1, 1, 1)), ranks)
    finally:
        dist.batch_isend_irecv = batch
    assert whole is not None
    return calls, whole.amax((0, 2)).tolist()


def test_many_messages_that_are_large_together_go_by_the_group():
    assert run_ranks(_pieces, 3) == [([160], [0.0, 1.0, 2.0])] * 3


def _killed(group, pids):
    # a group of its own, as it is lost
    ranks = Ranks.of(dist.new_group(), 30.0)
    Path(pids, str(ranks.rank)).write_text(str(os.getpid()))
    with Call(ranks) as call:
        call.meet({})
        with call.entangled("work"):
            if ranks.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.transport.exchange([], [(2, torch.empty(3))])


def test_a_rank_that_is_killed_ends_the_waits_of_all(tmp_path):
    begun = time.monotonic()
    with pytest.raises(RankFailure) as failed:
        run_world(_killed, str(tmp_path))
    text = str(failed.value)
    assert text.count(MissingRankError.__name__) >= 3
    assert "no longer answer" in text
    assert time.monotonic() - begun < 25


def _raises(group):
    ranks = Ranks.of(dist.new_group(), 30.0)
    try:
        with Call(ranks) as call:
            call.meet({})
            with call.entangled("work"):
                if ranks.rank == 1:
                    raise ValueError("of rank 1")
                ranks.transport.exchange([], [(1, torch.empty(3))])
    except RemoteRankError as error:
        return str(error), ranks.transport.lost is not None
    return None


def test_a_rank_that_raises_ends_the_waits_of_all():
    begun = time.monotonic()
    for text, lost in run_world(_raises):
        assert "rank 1 failed with ValueError: of rank 1" in text
        assert lost
    # long before the 30 s of a wait
    assert time.monotonic() - begun < 20

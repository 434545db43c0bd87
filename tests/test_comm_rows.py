"""`fetch_rows` and `deliver_rows`: tensors filled with their own global coordinates, exact equality, least traffic."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm_transports import SIZES, WAYS, on_members, on_ranks, traffic_of

from halotile.comm import Counters, Ranks, deliver_rows, fetch_rows, run_virtual
from halotile.decode.memory import Meter
from halotile.errors import MembershipError, PlanError
from halotile.geometry import Extents, Interval


def coordinates(shape, dtype=torch.int64):
    """Each element is its own flat index; below 256 in bfloat16, which holds no more exactly."""
    flat = torch.arange(prod(shape)).reshape(shape)
    return (flat % 256 if dtype == torch.bfloat16 else flat).to(dtype)


def shard(whole, dim, extents, rank, layout="plain"):
    """A rank's rows, contiguous, as a view of the whole, or with another order of strides."""
    start = sum(extents.sizes[:rank])
    rows = whole.narrow(dim, start, extents.sizes[rank])
    if layout == "view":
        return rows
    if layout == "permuted":
        return rows.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([rows, rows - 1], -1)[..., 0]
    return rows.contiguous()


def least_traffic(whole, dim, extents, wanted, rank):
    """The fewest messages and bytes that this rank can send, row by row."""
    row_bytes = whole.numel() // max(whole.shape[dim], 1) * whole.element_size()
    start = sum(extents.sizes[:rank])
    own = set(range(start, start + extents.sizes[rank]))
    asked = [len(own & set(range(w.start, w.stop))) for peer, w in enumerate(wanted) if peer != rank]
    asked = [rows for rows in asked if rows and row_bytes]
    return Counters(len(asked), sum(asked) * row_bytes, 0)


def _fetch(ranks, shape, dim, plan, how=(torch.int64, "plain")):
    (sizes, wanted), (dtype, layout) = plan, how
    whole, extents = coordinates(shape, dtype), Extents(sizes)
    local = shard(whole, dim, extents, ranks.rank, layout)
    kept = local.clone()
    out, traffic = traffic_of(ranks, lambda: fetch_rows(local, dim, extents, wanted, ranks))
    mine = wanted[ranks.rank]
    assert out.dtype == dtype
    assert torch.equal(local, kept), "the local rows were changed"
    assert torch.equal(out, whole.narrow(dim, min(mine.start, shape[dim]) if len(mine) else 0, len(mine)))
    assert traffic == least_traffic(whole, dim, extents, wanted, ranks.rank)
    return traffic


@st.composite
def plans(draw):
    ranks = draw(st.integers(1, 6))
    sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)))
    total = sum(sizes)
    wanted = []
    for _ in range(ranks):
        start, stop = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
        # an empty interval may lie anywhere
        shift = draw(st.sampled_from([0, 0, -9, 50])) if start == stop else 0
        wanted.append(Interval(start + shift, stop + shift))
    dims = draw(st.integers(1, 4))
    dim = draw(st.integers(0, dims - 1))
    shape = tuple(total if i == dim else draw(st.integers(0 if i == 0 else 1, 3)) for i in range(dims))
    return ranks, shape, dim - dims if draw(st.booleans()) else dim, sizes, wanted


@settings(max_examples=150, deadline=None)
@given(
    plan=plans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    layout=st.sampled_from(["plain", "view", "permuted", "strided"]),
)
def test_any_plan_on_virtual_ranks(plan, dtype, layout):
    ranks, shape, dim, sizes, wanted = plan
    traffic = on_ranks("virtual", ranks, _fetch, shape, dim, (sizes, wanted), (dtype, layout))
    assert len(traffic) == ranks


def halos(sizes, before, after):
    """Each rank's rows with a halo, clipped; ranks without rows want none."""
    extents = Extents(sizes)
    whole = Interval(0, extents.total)
    return [
        Interval(own.start - before, own.stop + after).intersect(whole) if len(own) else Interval(0, 0)
        for own in extents.intervals
    ]


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["plain", "permuted"])
def test_halos_at_each_world_size(kind, size, layout):
    sizes = Extents.even(13, size).sizes
    traffic = on_ranks(kind, size, _fetch, (2, 3, 13, 5), 2, (sizes, halos(sizes, 2, 1)), (torch.float32, layout))
    assert [t.messages for t in traffic] == {1: [0], 2: [1, 1], 3: [1, 2, 1], 4: [1, 2, 2, 1]}[size]


@pytest.mark.parametrize("kind", WAYS)
def test_uneven_extents_send_messages_of_exact_size(kind):
    """H6: 100 and 200 rows; neither side pads to the larger."""
    whole = [Interval(0, 300)] * 2
    traffic = on_ranks(kind, 2, _fetch, (1, 2, 300, 3), 2, ((100, 200), whole), (torch.float32, "plain"))
    assert traffic == [Counters(1, 100 * 24, 0), Counters(1, 200 * 24, 0)]


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ((1, 1, 1, 1), [3, 3, 3, 3]),
        ((6, 1, 1, 6), [3, 3, 3, 3]),
        ((9, 1, 1, 1), [3, 3, 3, 3]),
        ((2, 0, 0, 3), [1, 0, 0, 1]),
        ((0, 0, 0, 4), [0, 0, 0, 0]),
        ((0, 0, 0, 0), [0, 0, 0, 0]),
    ],
)
def test_a_halo_reaches_beyond_the_nearest_neighbour(kind, sizes, messages):
    """S4: a band thinner than the kernel's reach."""
    traffic = on_ranks(kind, 4, _fetch, (2, sum(sizes), 3), 1, (sizes, halos(sizes, 3, 3)), (torch.bfloat16, "view"))
    assert [t.messages for t in traffic] == messages


def _gather_large(ranks, sizes, layout):
    shape = (2, 2, sum(sizes), 1 << 15)
    whole = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
    local = shard(whole, 2, Extents(sizes), ranks.rank, layout)
    wanted = [Interval(0, sum(sizes))] * ranks.size
    meter = Meter(local.device)
    with meter:
        out, traffic = traffic_of(ranks, lambda: fetch_rows(local, 2, Extents(sizes), wanted, ranks))
    assert torch.equal(out, whole)
    return (traffic.messages, traffic.bytes_sent), meter.peak_bytes


@pytest.mark.parametrize("kind", WAYS)
def test_large_rows_land_in_their_places(kind):
    """A rank's share of a result is in one piece only for each index of the dims before: four here."""
    row = 4 * (1 << 15) * 8
    told = [
        on_ranks(kind, 3, _gather_large, (1, 1, 1), "plain"),
        # with two ranks the landing buffer is half of the result, and one message is enough
        on_ranks(kind, 2, _gather_large, (1, 1), "plain"),
        # rank 0 lacks 1 of 3 rows, rank 1 lacks 2
        on_ranks(kind, 2, _gather_large, (2, 1), "plain"),
    ]
    sent = [[(8, 2 * row)] * 3, [(1, row)] * 2, [(4, 2 * row), (1, row)]]
    assert [[traffic for traffic, _ in ranks] for ranks in told] == sent
    if kind == "gloo":  # the mailboxes of virtual ranks hold copies
        peaks = [[3 * row] * 3, [3 * row] * 2, [4 * row, 3 * row]]
        assert [[peak for _, peak in ranks] for ranks in told] == peaks, "more is made than the result"
    # another order of dims than the result's: through buffers of their own, and the same messages
    assert [traffic for traffic, _ in on_ranks(kind, 3, _gather_large, (1, 1, 1), "permuted")] == sent[0]


@pytest.mark.parametrize("members", [(2, 3), (1, 3)])
def test_a_group_without_rank_0(members):
    """R2, R3: group-local ranks all the way."""
    traffic = on_members(members, _fetch, (7, 4), 0, ((5, 2), halos((5, 2), 3, 3)), (torch.float32, "plain"))
    assert traffic == [Counters(1, 3 * 16, 0), Counters(1, 2 * 16, 0)]


def test_sixteen_virtual_ranks():
    sizes = Extents.even(37, 16).sizes
    traffic = on_ranks("virtual", 16, _fetch, (37, 3), 0, (sizes, halos(sizes, 7, 7)))
    assert len(traffic) == 16


def test_the_result_is_not_a_view_of_the_local_rows():
    def work(transport):
        local = torch.arange(4.0)
        out = fetch_rows(local, 0, Extents((4,)), [Interval(0, 4)], Ranks(transport))
        out.zero_()
        return local

    assert torch.equal(run_virtual(1, work)[0], torch.arange(4.0))


# --- plans that cannot be


BAD_PLANS = {
    "extents for three ranks": ((2, 2, 2), [Interval(0, 4)] * 2, 2, "needs as many extents and intervals, got 3 and 2"),
    "intervals for one rank": ((2, 2), [Interval(0, 4)], 2, "needs as many extents and intervals, got 2 and 1"),
    "a row too many": ((2, 2), [Interval(0, 4)] * 2, 3, "holds 3 rows of dim 0, the extents"),
    "beyond the last row": ((2, 2), [Interval(0, 4), Interval(1, 5)], 2, "rank 1 wants rows 1 to 5 of a tensor of 4"),
    "before the first row": ((2, 2), [Interval(-1, 4), Interval(0, 4)], 2, "rank 0 wants rows -1 to 4"),
}


def _refused(ranks, sizes, wanted, rows):
    def work():
        with pytest.raises(PlanError) as caught:
            fetch_rows(torch.zeros(rows, 3), 0, Extents(sizes), wanted, ranks)
        return str(caught.value)

    text, traffic = traffic_of(ranks, work)
    # nothing is on its way: a following exchange gets its own contents
    _fetch(ranks, (4, 3), 0, ((2, 2), [Interval(0, 4)] * 2))
    return text, traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_disagrees_is_refused_before_any_traffic(kind, name):
    sizes, wanted, rows, expected = BAD_PLANS[name]
    for text, traffic in on_ranks(kind, 2, _refused, sizes, wanted, rows):
        assert expected in text
        assert traffic == Counters(0, 0, 0)


# --- delivery


def _deliver(ranks, shape, dim, sizes, target):
    deliver, driver = target
    whole, extents = coordinates(shape, torch.float32), Extents(sizes)
    local = shard(whole, dim, extents, ranks.rank, "view")
    out, traffic = traffic_of(ranks, lambda: deliver_rows(local, dim, extents, ranks, deliver, driver))
    if deliver == "sharded":
        assert out is local
    elif deliver == "all" or ranks.rank == driver:
        assert torch.equal(out, whole)
    else:
        assert out is None
    return traffic


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("sizes", [(2, 1, 3, 1), (0, 5, 0, 2), (0, 0, 4, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize(("deliver", "driver"), [("all", 0), ("driver", 0), ("driver", 2), ("sharded", 0)])
def test_delivery_with_empty_shards_sends_the_least(kind, sizes, deliver, driver):
    """H5: empty shards; who is not to have the result receives nothing."""
    total, row_bytes = sum(sizes), 2 * 3 * 4
    traffic = on_ranks(kind, 4, _deliver, (2, total, 3), 1, sizes, (deliver, driver))
    targets = {"all": range(4), "driver": [driver], "sharded": []}[deliver]
    for rank, sent in enumerate(traffic):
        messages = sum(rank != target for target in targets) * (sizes[rank] > 0)
        assert sent == Counters(messages, messages * sizes[rank] * row_bytes, 0)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("deliver", ["all", "driver"])
def test_delivery_of_uneven_shards(kind, deliver):
    """H6."""
    traffic = on_ranks(kind, 2, _deliver, (1, 300, 2), 1, (100, 200), (deliver, 1))
    assert [t.bytes_sent for t in traffic] == [100 * 8, 200 * 8 if deliver == "all" else 0]


def test_delivery_to_a_driver_of_a_group_without_rank_0():
    """R3: driver 1 of group (1, 3) is global rank 3."""
    traffic = on_members((1, 3), _deliver, (5, 2), 0, (2, 3), ("driver", 1))
    assert [t.messages for t in traffic] == [1, 0]


@pytest.mark.parametrize("driver", [-1, 3])
def test_a_driver_outside_the_group_is_refused(driver):
    with pytest.raises(MembershipError, match=f"driver={driver} is not a rank of this group of 3"):
        on_ranks("virtual", 3, _deliver, (3, 2), 0, (1, 1, 1), ("driver", driver))

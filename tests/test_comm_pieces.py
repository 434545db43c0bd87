"""`Delivery`: results with one owner each, to all or to some ranks, as few messages as there can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm_transports import WAYS, on_members, on_ranks, traffic_of

from halotile.comm import Counters, Delivery, Piece

CPU = torch.device("cpu")


def content(index, piece):
    """Values that name the piece and the place in it."""
    return (torch.arange(piece.numel) % 13 + 16 * (index % 15)).reshape(piece.shape).to(piece.dtype)


def _made(pieces, rank, layout):
    own = {i: content(i, piece) for i, piece in enumerate(pieces) if piece.owner == rank}
    if layout == "permuted":
        return {i: t.transpose(0, -1).contiguous().transpose(0, -1) for i, t in own.items()}
    if layout == "one buffer":
        # a network may return views of one result: a batch's samples, say
        out = {}
        for i, t in own.items():
            buffer = torch.cat([t.reshape(-1), t.reshape(-1)])
            out[i] = buffer[t.numel() :].view(t.shape)
        return out
    return own


def _deliver(ranks, pieces, receivers, layout="plain"):
    made = _made(pieces, ranks.rank, layout)
    # a piece lies wherever it arrives as it did where it was made
    layouts = {i: t.stride() for owner in range(ranks.size) for i, t in _made(pieces, owner, layout).items()}
    delivery = Delivery(made, pieces, ranks, receivers, CPU)
    assert delivery.layouts == {i: layouts[i] for i in made}
    results, traffic = traffic_of(ranks, lambda: delivery.deliver(layouts))
    if ranks.rank not in receivers:
        assert results == {}
        return traffic
    assert sorted(results) == list(range(len(pieces)))
    for index, tensor in results.items():
        assert tensor.dtype == pieces[index].dtype
        assert tensor.shape == pieces[index].shape
        assert torch.equal(tensor, content(index, pieces[index]))
        assert tensor.stride() == layouts[index] or not tensor.numel()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), f"{index} shares memory"
    storages = [t.untyped_storage().data_ptr() for t in results.values() if t.numel()]
    assert len(set(storages)) == len(storages), "two pieces share memory"
    return traffic


def least(pieces, receivers, rank):
    """One message a dtype and receiver, of just the bytes that the pieces have."""
    own = [piece for piece in pieces if piece.owner == rank and piece.numel]
    targets = sum(receiver != rank for receiver in receivers)
    size = sum(piece.numel * torch.empty((), dtype=piece.dtype).element_size() for piece in own)
    return Counters(targets * len({piece.dtype for piece in own}), targets * size, 0)


UNEVEN = [
    Piece(0, (2, 3), torch.float32),
    Piece(3, (1, 5), torch.float32),
    Piece(0, (4,), torch.bfloat16),
    Piece(0, (1, 2, 3), torch.float32),
    Piece(3, (7, 1), torch.bfloat16),
]
"""Ranks 1 and 2 have none; both dtypes on both of the others."""


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("receivers", [(0, 1, 2, 3), (0,), (2,), (3,)])
@pytest.mark.parametrize("layout", ["plain", "permuted", "one buffer"])
def test_uneven_pieces_of_two_dtypes(kind, receivers, layout):
    traffic = on_ranks(kind, 4, _deliver, UNEVEN, receivers, layout)
    assert traffic == [least(UNEVEN, receivers, rank) for rank in range(4)]


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_message_a_pair_of_ranks(kind, size):
    pieces = [Piece(i % size, (3, i + 1), torch.float32) for i in range(9)]
    traffic = on_ranks(kind, size, _deliver, pieces, range(size))
    assert sum(t.messages for t in traffic) == size * (size - 1)
    assert sum(t.bytes_sent for t in traffic) == (size - 1) * sum(3 * (i + 1) * 4 for i in range(9))


def test_group_without_rank_0():
    pieces = [Piece(1, (2, 2), torch.float32), Piece(0, (3,), torch.int64)]
    traffic = on_members((1, 3), _deliver, pieces, [1])
    assert traffic == [Counters(1, 24, 0), Counters(0, 0, 0)]


@pytest.mark.parametrize("kind", WAYS)
def test_no_pieces_and_empty_pieces(kind):
    assert on_ranks(kind, 2, _deliver, [], range(2)) == [Counters(0, 0, 0)] * 2
    empty = [Piece(0, (0, 3), torch.float32), Piece(1, (2, 0), torch.bfloat16), Piece(1, (2,), torch.float32)]
    assert on_ranks(kind, 2, _deliver, empty, range(2)) == [Counters(0, 0, 0), Counters(1, 8, 0)]


@st.composite
def deliveries(draw):
    size = draw(st.integers(1, 6))
    piece = st.builds(
        Piece,
        st.integers(0, size - 1),
        st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    )
    receivers = draw(st.lists(st.integers(0, size - 1), unique=True))
    return size, draw(st.lists(piece, max_size=8)), receivers


@settings(max_examples=100, deadline=None)
@given(deliveries(), st.sampled_from(["plain", "permuted", "one buffer"]))
def test_any_delivery_on_virtual_ranks(delivery, layout):
    size, pieces, receivers = delivery
    traffic = on_ranks("virtual", size, _deliver, pieces, receivers, layout)
    assert traffic == [least(pieces, receivers, rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 2), r"piece 0: planned .*shape=\(2, 3\).*, made \(\(2, 2\)"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), r"piece 0: planned .*torch.float32.*, made .*torch.bfloat16"),
    ],
)
def test_a_result_that_is_not_as_planned_is_caught(tensor, text):
    def work(ranks):
        with pytest.raises(RuntimeError, match=text):
            Delivery({0: tensor}, [Piece(0, (2, 3), torch.float32)], ranks, [0], CPU)
        return ranks.counters.messages

    assert on_ranks("virtual", 1, work) == [0]

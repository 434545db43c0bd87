"""Views, slices and joins of sharded tensors: the values of the whole tensor, the same memory, no gathers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from halotile.comm import Ranks, run_virtual
from halotile.errors import PlanError, UnsupportedError
from halotile.geometry import Extents
from halotile.spatial import SpatialSpec, SpatialTensor


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def check(n, x, dim, work, extents=None, gathers=0):
    """`work` on a sharded `x` equals `work` on the whole, on n virtual ranks; how many gathers it may have."""
    expected = work(x.clone())

    def one(transport):
        with torch.no_grad():
            sharded = SpatialTensor.shard(x, Ranks(transport), dim, extents)
            out = work(sharded)
            parts = list(out) if isinstance(out, (tuple, list)) else [out]
            whole = [part.full() if isinstance(part, SpatialTensor) else part for part in parts]
            return whole, sum(sharded.ledger.gathers.values()), [part.shape for part in parts]

    wanted = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    for whole, counted, shapes in run_virtual(n, one, timeout_s=20):
        assert shapes == [part.shape for part in wanted]
        for out, part in zip(whole, wanted, strict=True):
            assert torch.equal(out, part)
        assert counted == gathers


@st.composite
def sharded_shapes(draw, dims=(1, 4), sizes=(1, 7)):
    shape = tuple(draw(st.integers(*sizes)) for _ in range(draw(st.integers(*dims))))
    dim = draw(st.integers(0, len(shape) - 1))
    ranks = draw(st.integers(1, 4))
    cuts = sorted(draw(st.integers(0, shape[dim])) for _ in range(ranks - 1))
    extents = Extents(tuple(b - a for a, b in pairwise([0, *cuts, shape[dim]])))
    return shape, dim, ranks, extents


@st.composite
def regrouped(draw):
    """A sharded shape, and another shape of as many elements, by merging and splitting at random."""
    shape, dim, ranks, extents = draw(sharded_shapes(sizes=(1, 6)))
    factors = [f for size in shape for f in _factors(size)]
    new, product = [], 1
    for factor in factors:
        product *= factor
        if draw(st.booleans()):
            new.append(product)
            product = 1
    new.append(product)
    return shape, dim, ranks, extents, tuple(new)


def _factors(size):
    for f in (2, 3, 5):
        if size % f == 0 and size > f:
            return [f, *_factors(size // f)]
    return [size]


@settings(max_examples=300, deadline=None)
@given(regrouped())
def test_a_view_and_back(case):
    shape, dim, ranks, extents, new = case
    x = numbered(*shape)
    # a shape that cuts across the rows of every dim may have to gather: right all the same
    wanted = x.view(new)

    def one(transport):
        sharded = SpatialTensor.shard(x, Ranks(transport), dim, extents)
        out = sharded.view(new)
        assert out.shape == wanted.shape
        back = out.reshape(shape)
        return [t.full() if isinstance(t, SpatialTensor) else t for t in (out, back)]

    for out, back in run_virtual(ranks, one, timeout_s=20):
        assert torch.equal(out, wanted)
        assert torch.equal(back, x)


ROUND_TRIPS = {
    "tokens of H W": lambda x: x.flatten(3).transpose(2, 3).transpose(2, 3).unflatten(3, (11, 5)),
    "tokens of T H W": lambda x: x.permute(0, 2, 3, 4, 1).reshape(2, 3 * 11 * 5, 4) * 2,
    "T in the batch": lambda x: x.transpose(1, 2).flatten(0, 1).unflatten(0, (2, 3)),
    "H in the batch": lambda x: x.permute(0, 2, 3, 4, 1).reshape(2 * 3 * 11, 5, 4) + 1,
    "groups": lambda x: x.view(2, 2, 2, 3, 11, 5).flatten(2),
    "B C HW": lambda x: x[:, :, 0].flatten(2),
    "patches of a cell": lambda x: x.reshape(2, 2, 2, 3, 11, 5).permute(0, 1, 3, 4, 2, 5).reshape(2, 2, 3, 22, 5),
    "unsqueezed": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1, -1) + 0,
    "repeated": lambda x: x.repeat(1, 2, 1, 3, 2),
    "doubled rows": lambda x: x.unsqueeze(4).expand(-1, -1, -1, -1, 2, -1).reshape(2, 4, 3, 22, 5),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_layouts_of_decoders(name, ranks):
    check(ranks, numbered(2, 4, 3, 11, 5), 3, ROUND_TRIPS[name])


def test_rows_that_a_view_would_cut_in_two_change_hands():
    # space to depth: pairs of rows, and ranks that own 3, 2, 3
    check(
        3,
        numbered(1, 2, 8, 6),
        2,
        lambda x: x.view(1, 2, 4, 2, 3, 2).permute(0, 1, 3, 5, 2, 4).reshape(1, 8, 4, 3),
        Extents((3, 2, 3)),
    )


@settings(max_examples=200, deadline=None)
@given(sharded_shapes(), st.data())
def test_slices(case, data):
    shape, dim, ranks, extents = case
    which = data.draw(st.integers(0, len(shape) - 1))
    bound = st.one_of(st.none(), st.integers(-shape[which] - 1, shape[which] + 1))
    cut = slice(data.draw(bound), data.draw(bound), data.draw(st.integers(1, 3)))
    index = (slice(None),) * which + (cut,)
    check(ranks, numbered(*shape), dim, lambda x: x[index] * 1, extents)


@settings(max_examples=100, deadline=None)
@given(sharded_shapes(dims=(2, 4)), st.data())
def test_select_split_chunk_and_unbind(case, data):
    shape, dim, ranks, extents = case
    which = data.draw(st.integers(0, len(shape) - 1))
    index = data.draw(st.integers(-shape[which], shape[which] - 1))
    size = data.draw(st.integers(1, shape[which]))
    x = numbered(*shape)
    check(ranks, x, dim, lambda t: t.select(which, index) * 1, extents)
    check(ranks, x, dim, lambda t: [part * 1 for part in t.split(size, which)], extents)
    check(ranks, x, dim, lambda t: [part * 1 for part in t.chunk(size, which)], extents)
    check(ranks, x, dim, lambda t: [part * 1 for part in t.unbind(which)], extents, gathers=int(which == dim))


@settings(max_examples=150, deadline=None)
@given(sharded_shapes(), st.data())
def test_cat_stack_roll_flip_and_repeat(case, data):
    shape, dim, ranks, extents = case
    which = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.integers(-8, 8))
    times = [data.draw(st.integers(1, 3)) for _ in shape]
    x = numbered(*shape)
    plain = numbered(*shape) + 100
    check(ranks, x, dim, lambda t: torch.cat([t, plain, t + 1], which), extents)
    check(ranks, x, dim, lambda t: torch.stack([t, plain, t + 1], which), extents)
    check(ranks, x, dim, lambda t: t.roll(shift, which), extents)
    check(ranks, x, dim, lambda t: t.flip(which), extents)
    check(ranks, x, dim, lambda t: t.repeat(times), extents)
    check(ranks, x, dim, lambda t: torch.cat([t[..., :1], t], -1), extents)


@settings(max_examples=100, deadline=None)
@given(sharded_shapes(dims=(2, 4)), st.data())
def test_permutations_with_arithmetic(case, data):
    shape, dim, ranks, extents = case
    order = data.draw(st.permutations(range(len(shape))))
    first, second = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, len(shape) - 1))
    other = numbered(*[shape[d] for d in order])
    check(ranks, numbered(*shape), dim, lambda t: t.permute(order) * other, extents)
    check(ranks, numbered(*shape), dim, lambda t: t.permute(order).contiguous().transpose(first, second) + 1, extents)


WRITES = {
    "rows": lambda x: x[:, :, 2:5].zero_(),
    "rows by step": lambda x: x[:, :, ::2].mul_(3),
    "one row": lambda x: x.__setitem__((slice(None), slice(None), 4), 7.0),
    "the last row": lambda x: x.__setitem__((Ellipsis, -1, slice(None)), -1.0),
    "a column": lambda x: x[..., 1].fill_(5),
    "through a view": lambda x: x.view(1, 2, 55).add_(1),
    "through a permutation": lambda x: x.permute(0, 2, 3, 1)[..., 1].neg_(),
    "rows of others": lambda x: x[:, :, 1:4].copy_(x[:, :, 6:9].clone()),
    "a plain tensor": lambda x: x[:, :, 3:6].copy_(numbered(1, 2, 3, 5)),
    "an unsqueezed part": lambda x: x[:, 0].unsqueeze(1).mul_(2),
    "split parts": lambda x: [part.add_(i) for i, part in enumerate(x.split(3, 2))],
    "blocks": lambda x: x.flatten(1, 2)[:, :11].mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_writes_through_views_reach_the_tensor(name, ranks):
    def run(x):
        x = x.clone()
        WRITES[name](x)
        return x

    check(ranks, numbered(1, 2, 11, 5), 2, run)


def test_writing_to_a_row_that_was_copied_to_all_ranks_is_refused():
    from halotile.spatial.mode import SpatialMode

    def one(transport):
        x = SpatialTensor.shard(numbered(1, 2, 11, 5), Ranks(transport))
        with SpatialMode(x.ledger):
            row = x[:, :, 3]
            with pytest.raises(UnsupportedError, match="view"):
                row.zero_()

    run_virtual(2, one)


def test_the_wrapper_shows_the_layout_of_its_local_part():
    def one(transport):
        x = SpatialTensor.shard(torch.zeros(2, 4, 6, 5), Ranks(transport))
        assert x.is_contiguous()
        assert x.stride() == torch.zeros(2, 4, 6, 5).stride()
        assert x.permute(0, 2, 3, 1).stride() == torch.zeros(2, 4, 6, 5).permute(0, 2, 3, 1).stride()
        assert not x.permute(0, 2, 3, 1).is_contiguous()
        assert x.permute(0, 2, 3, 1).contiguous().is_contiguous()
        last = x.contiguous(memory_format=torch.channels_last)
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert last.local.is_contiguous(memory_format=torch.channels_last)
        assert not x[:, 1:3].is_contiguous()
        assert x[:, 1:3].contiguous().local.is_contiguous()
        assert x.unsqueeze(1).expand(2, 3, 4, 6, 5).stride(1) == 0

    run_virtual(3, one)


def test_the_constructor_checks():
    ranks = Ranks.alone()
    with pytest.raises(PlanError, match="dim 4"):
        SpatialTensor.shard(torch.zeros(1, 2, 3, 4), ranks, 4)
    with pytest.raises(PlanError, match="7 rows on 1 ranks"):
        SpatialTensor.shard(torch.zeros(1, 2, 3, 4), ranks, 2, Extents((7,)))
    with pytest.raises(PlanError, match="1 block or more"):
        SpatialSpec(0, Extents((3,)), 0)
    x = SpatialTensor.shard(torch.zeros(1, 2, 3, 4), ranks)
    with pytest.raises(PlanError, match="2 ranks"):
        x.redistribute(Extents((2, 1)))
    assert "extents=(3,)" in repr(x)


def _redistribute(group):
    x = numbered(2, 7, 3)
    sharded = SpatialTensor.shard(x, Ranks.of(group, 30), 1)
    size = sharded.ranks.size
    for sizes in ((7, *[0] * (size - 1)), (*[0] * (size - 1), 7), Extents.even(7, size).sizes):
        sharded = sharded.redistribute(Extents(sizes))
        assert sharded.local.shape[1] == sizes[sharded.ranks.rank]
        assert torch.equal(sharded.full(), x)
    return True


@pytest.mark.parametrize("members", [(0,), (2, 3), (0, 1, 2, 3)])
def test_redistribute_over_gloo_ranks(members):
    assert all(run_ranks(_redistribute, len(members), members=members))

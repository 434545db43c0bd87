"""Tensors made like sharded ones, random draws, and the mode under which buffers are made sharded."""

import functools

import pytest
import torch
import torch.nn.functional as F
from on_sharded import GUARDS, filled, on_sharded, uneven
from ranks import run_ranks

from halotile.comm import Ranks
from halotile.errors import UnsupportedError
from halotile.geometry import Extents
from halotile.spatial import SpatialTensor
from halotile.spatial.mode import SpatialMode

SHAPE = (2, 3, 7, 5)
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(0, 3, 2, 1),
    "batch_first_inside": lambda x: x.permute(1, 2, 0, 3),
}


def _virtual(work, n, x=None, dim=-2, extents=None, guard="no_grad"):
    out, gathers = on_sharded("virtual", n, filled(*SHAPE) if x is None else x, dim, work, extents, guard)
    assert gathers == {}
    return out


LIKES = {
    "zeros_like": torch.zeros_like,
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int64),
    "full_like": lambda x: torch.full_like(x, 2.5, memory_format=torch.channels_last),
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format).fill_(1.0),
    "clone": lambda x: x.clone(memory_format=torch.channels_last),
    "to": lambda x: x.to(torch.bfloat16) + x.double().to(torch.bfloat16),
    "to_other": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "contiguous": lambda x: x.permute(0, 3, 2, 1).contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "detach": lambda x: x.detach() * 2,
    "dropout": lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_full": lambda x: x.new_full(x.shape, 3.0, dtype=torch.float64),
    "new_strided": lambda x: x.new_empty_strided(
        x.shape, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).stride()
    ).fill_(1),
}


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("name", LIKES)
def test_made_like_a_sharded_tensor(name, guard):
    x = filled(*SHAPE)
    expected = LIKES[name](x)

    def work(sharded):
        out = LIKES[name](sharded)
        assert isinstance(out, SpatialTensor)
        assert out.stride() == expected.stride()
        assert out.dtype == expected.dtype
        return out

    for n in (1, 2, 4):
        assert torch.equal(_virtual(work, n, guard=guard), expected)
        assert torch.equal(_virtual(work, n, extents=uneven(7, n), guard=guard), expected)


@pytest.mark.parametrize("guard", sorted(GUARDS))
def test_aliases_share_memory_and_contiguous_is_the_tensor_itself(guard):
    def work(x):
        assert x.contiguous() is x
        assert x.to(x.dtype) is x
        x.detach().fill_(3.0)
        x[:, :, :2].detach().fill_(4.0)
        x.clone().fill_(5.0)
        return x

    out = _virtual(work, 3, guard=guard)
    assert (out[:, :, :2] == 4).all()
    assert (out[:, :, 2:] == 3).all()


def test_a_new_tensor_of_an_unknown_size_is_dealt_evenly_and_of_other_dims_plain():
    def work(x):
        out = x.new_zeros(2, 3, 9, 5)
        assert out.spec.dim == 2
        assert not isinstance(x.new_ones(7), SpatialTensor)
        assert not isinstance(x.new_ones(7, 5), SpatialTensor)
        return out

    assert torch.equal(_virtual(work, 2), torch.zeros(2, 3, 9, 5))


# --- random draws

DRAWS = {
    "randn_like": lambda x, g: torch.randn_like(x, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, generator=g, dtype=torch.float64),
    "randint_like": lambda x, g: torch.randint_like(x, 0, 1000, generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(1.0, 2.0, generator=g),
    "uniform_": lambda x, g: x.clone().uniform_(-1.0, 3.0, generator=g),
    "uniform_of_a_view": lambda x, g: (x[:, :, 1:6, 1:4].uniform_(generator=g), x)[1],
    "random_": lambda x, g: torch.empty_like(x).random_(3, 90, generator=g),
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(0.3, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(2.0, generator=g),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_rank(name, layout):
    """With a generator a rank: virtual ranks are threads, and the default one is the process's."""

    def work(x):
        generator = torch.Generator().manual_seed(7)
        out = DRAWS[name](LAYOUTS[layout](x), generator)
        return out, torch.rand(3, generator=generator)

    expected, after = work(filled(*SHAPE))
    # of one row, a rank cannot see where its dim lay in memory: that decides the order of a permuted tensor's draws
    for n in (1, 2, 3) if "permuted" in layout else (1, 3, 4):
        out, then = _virtual(work, n)
        assert torch.equal(out, expected)
        assert torch.equal(then, after), "the generator is not where one rank's is"


def _default_generator(x, training):
    torch.manual_seed(5)
    noisy = x + torch.randn_like(x)
    noisy = F.dropout(noisy, 0.4, training=training)
    return noisy.normal_() + noisy, torch.rand(3)


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("training", [False, True])
def test_draws_of_the_default_generator_on_gloo_ranks(guard, training):
    x = filled(*SHAPE)
    out, gathers = on_sharded("gloo", 3, x, -2, functools.partial(_default_generator, training=training), None, guard)
    state = torch.get_rng_state()
    expected = _default_generator(x, training)
    torch.set_rng_state(state)
    assert gathers == {}
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want)


# --- the mode


def _under_mode(work):
    def moded(x):
        with SpatialMode(x.ledger):
            return work(x)

    return moded


BUFFERS = {
    "empty": lambda s: torch.empty(s).fill_(1.0),
    "zeros": lambda s: torch.zeros(s, dtype=torch.float64),
    "ones": torch.ones,
    "full": lambda s: torch.full(s, 3.0),
    "channels_last": lambda s: torch.empty(s, memory_format=torch.channels_last).fill_(1.0),
    "strided": lambda s: torch.empty_strided(s, (105, 1, 15, 3)).fill_(1.0),
    "randn": lambda s: torch.randn(s, generator=torch.Generator().manual_seed(3)),
    "rand": lambda s: torch.rand(s, generator=torch.Generator().manual_seed(3)),
    "randint": lambda s: torch.randint(2, 90, s, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_of_a_known_size_is_made_sharded(name, guard):
    expected = BUFFERS[name](SHAPE)

    def work(x):
        out = BUFFERS[name](tuple(x.shape))
        assert isinstance(out, SpatialTensor)
        assert out.spec == x.spec
        assert out.stride() == expected.stride()
        assert out.dtype == expected.dtype
        # a size that no sharded tensor had, and too few dims
        assert not isinstance(BUFFERS[name]((2, 3, 8, 5)) if name != "strided" else torch.ones(2), SpatialTensor)
        assert not isinstance(torch.ones(7, 5), SpatialTensor)
        return out

    for n in (1, 3, 4):
        assert torch.equal(_virtual(_under_mode(work), n, guard=guard), expected)


def _filled_buffer(x):
    buffer = torch.zeros(x.shape)
    buffer[:, :, 2:6] = x[:, :, 1:5]
    buffer[:, :1] += x[:, 1:2]
    return F.silu(torch.cat([buffer, x], 1)) + torch.randn(2, 6, 7, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("guard", sorted(GUARDS))
def test_a_buffer_filled_with_sharded_rows_needs_no_gather(guard):
    expected = _filled_buffer(filled(*SHAPE))
    for n in (1, 2, 4):
        assert torch.equal(_virtual(_under_mode(_filled_buffer), n, guard=guard), expected)


def test_without_the_mode_such_a_buffer_is_gathered_into():
    out, gathers = on_sharded("virtual", 2, filled(*SHAPE), -2, _filled_buffer)
    assert torch.equal(out, _filled_buffer(filled(*SHAPE)))
    assert gathers


def _gloo_mode(group, guard):
    x = filled(*SHAPE)
    with GUARDS[guard]():
        sharded = SpatialTensor.shard(x, Ranks.of(group, 20.0), -2)
        with SpatialMode(sharded.ledger):
            out = _filled_buffer(sharded)
        return out.full().clone(), dict(sharded.ledger.gathers)


@pytest.mark.parametrize("guard", sorted(GUARDS))
def test_the_mode_on_gloo_ranks(guard):
    for out, gathers in run_ranks(_gloo_mode, 3, guard, timeout=60.0):
        assert gathers == {}
        assert torch.equal(out, _filled_buffer(filled(*SHAPE)))


def test_the_latest_layout_of_a_size_is_taken():
    def work(x):
        y = x.transpose(2, 3).contiguous().transpose(2, 3)
        assert torch.zeros(y.shape).spec.dim == 2
        # the same size, sharded along another dim: 5 columns of 7
        z = SpatialTensor(x.local.new_ones(2, 3, 7, 5).narrow(3, 0, 0 if x.ranks.rank else 5), _columns(x), x.ledger)
        assert torch.zeros(z.shape).spec == z.spec
        return x

    assert torch.equal(_virtual(_under_mode(work), 2), filled(*SHAPE))


def _columns(x):
    return x.spec.at(3).with_extents(Extents((5, 0)))


def _write_into_a_gathered_view(x):
    # one row of the sharded dim: every rank gets a copy
    row = x[:, :, 3]
    row.fill_(1.0)
    return x


def _write_beside_a_gathered_view(x):
    row = x[:, :, 3]
    other = row + 1
    other.mul_(2)
    return other + row


@pytest.mark.parametrize("guard", sorted(GUARDS))
def test_a_write_that_would_be_lost_is_refused(guard):
    with pytest.raises(UnsupportedError, match=r"aten\.fill_\.Scalar writes into a view of a sharded tensor"):
        _virtual(_under_mode(_write_into_a_gathered_view), 2, guard=guard)
    out, _ = on_sharded("virtual", 2, filled(*SHAPE), -2, _under_mode(_write_beside_a_gathered_view), None, guard)
    assert torch.equal(out, _write_beside_a_gathered_view(filled(*SHAPE)))

"""What a convolution sees, put together in one buffer: frames joined in time, borders, halos; and whoever else asks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_sharded import filled, on_sharded, uneven

from halotile.spatial.rules import band

CLIP = (2, 4, 3, 11, 6)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def joins(monkeypatch):
    """How often joined tensors were put together by themselves, outside of a convolution's buffer."""
    made, make = [], band.Joined.make

    def noted(self):
        made.append(self)
        return make(self)

    monkeypatch.setattr(band.Joined, "make", noted)
    return made


def _conv(x, padding=(0, 1, 1), stride=1):
    return F.conv3d(x, filled(5, x.shape[1], 3, 3, 3, seed=1), filled(5, seed=2), stride, padding)


def _causal(x):
    return torch.cat((x[:, :, :1].repeat(1, 1, 2, 1, 1), x), 2)


def _between(x):
    return torch.cat((x[:, :, :1].repeat(1, 1, 1, 1, 1), x, x[:, :, -1:].repeat(1, 1, 1, 1, 1)), 2)


def _zeros(x):
    """LTX."""
    return _conv(_causal(x))


def _reflected(x):
    """LTX2."""
    return _conv(F.pad(_between(x), (1, 1, 1, 1, 0, 0), mode="reflect"), 0)


def _replicated(x):
    return _conv(F.pad(_causal(x), (1, 1, 1, 1, 0, 0), mode="replicate"), 0)


def _cached(x):
    """Wan: the frames of the last chunk, then zeros around."""
    return _conv(F.pad(torch.cat((x[:, :, -2:], x), 2), (1, 1, 1, 1, 1, 0)), 0)


def _strided(x):
    return _conv(_causal(x), (0, 1, 1), (1, 2, 2))


def _unpadded(x):
    return _conv(_causal(x), 0)


def _in_time_and_space(x):
    return _conv(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"), 0)


@pytest.mark.parametrize(
    "work",
    [_zeros, _reflected, _replicated, _cached, _strided, _unpadded, _in_time_and_space],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_frames_that_are_joined_go_into_the_convolutions_buffer(joins, work, n):
    x = filled(*CLIP)
    for dim, extents in ((3, None), (3, uneven(11, n)), (4, None)):
        out, gathers = on_sharded("virtual", n, x, dim, work, extents)
        assert gathers == {}
        torch.testing.assert_close(out, work(x), **CLOSE)
        if extents is None and dim == 3 and n in (2, 3):
            # bands with the rows of the kernel's reach
            assert joins == []
        joins.clear()


def test_thin_bands_and_odd_borders_are_right():
    for rows, n in ((2, 2), (3, 4), (5, 4), (4, 3)):
        x = filled(1, 3, 2, rows, 5)
        for mode, pad in (
            ("reflect", (1, 1, 1, 1, 0, 0)),
            ("replicate", (2, 0, 3, 1, 0, 0)),
            ("replicate", (0, 1, 0, 2, 1, 1)),
        ):
            work = functools.partial(
                lambda x, pad, mode: _conv(F.pad(_between(x), pad, mode=mode), 0), pad=pad, mode=mode
            )
            out, gathers = on_sharded("virtual", n, x, 3, work)
            assert gathers == {}
            torch.testing.assert_close(out, work(x), **CLOSE)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["reflect", "replicate", "constant"]),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(3, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
)
def test_any_border_of_any_join(mode, pad, frames, rows, kernel, stride, dilation, even):
    x = filled(1, 3, 4, rows, 7)
    weight = filled(4, 3, 1, kernel, kernel, seed=1)

    def work(x):
        joined = torch.cat([x[:, :, :count] for count in frames], 2)
        padded = F.pad(joined, (*pad, 0, 0), mode=mode)
        return F.conv3d(padded, weight, None, stride, 0, dilation)

    if rows + pad[2] + pad[3] <= dilation * (kernel - 1) or 7 + pad[0] + pad[1] <= dilation * (kernel - 1):
        return
    for n in (2, 3):
        out, gathers = on_sharded("virtual", n, x, 3, work, None if even else uneven(rows, n))
        assert gathers == {}
        torch.testing.assert_close(out, work(x), **CLOSE)


def _asked(x):
    return _causal(x) * 2


def _twice(x):
    joined = _causal(x)
    return _conv(joined) + joined[:, :1, 2:].sum()


def _again(x):
    return _conv(torch.cat((_causal(x), x), 2))


def _with_plain(x):
    return _conv(torch.cat((torch.ones(2, 4, 1, 11, 6), x), 2))


def _dealt_otherwise(x):
    moved = F.pad(x, (0, 0, 1, 0))[:, :, :, :-1] + 0
    return _conv(torch.cat((moved.contiguous(), x), 2))


def _of_another_dtype(x):
    return _conv(torch.cat((x.double(), x.double()), 2).float())


def _part_written(x):
    x = x + 0
    joined = _causal(x)
    x.mul_(3)
    return _conv(joined)


def _join_written(x):
    joined = _causal(x)
    joined[:, :, 0].mul_(3)
    return _conv(joined)


def _padded_part_written(x):
    x = x + 0
    padded = F.pad(_causal(x), (1, 1, 1, 1, 0, 0), mode="replicate")
    x.mul_(3)
    return _conv(padded, 0)


def _base_of_borders_written(x):
    x = x + 0
    padded = F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate")
    x[:, :, :, 2:5].mul_(3)
    return _conv(padded, 0)


def _borders_asked(x):
    return F.pad(_between(x), (1, 1, 1, 1, 0, 0), mode="reflect").tanh()


def _join_under_a_border_written(x):
    joined = _causal(x)
    padded = F.pad(joined, (1, 1, 1, 1))
    joined.mul_(3)
    return _conv(padded, 0)


def _border_under_a_border_written(x):
    inner = F.pad(x, (1, 1, 1, 1))
    outer = F.pad(inner, (1, 1, 1, 1))
    inner[:, :, :, 2:] = 7
    return outer


@pytest.mark.parametrize(
    "work",
    [
        _join_under_a_border_written,
        _border_under_a_border_written,
        _asked,
        _twice,
        _again,
        _with_plain,
        _dealt_otherwise,
        _of_another_dtype,
        _part_written,
        _join_written,
        _padded_part_written,
        _base_of_borders_written,
        _borders_asked,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("n", [2, 3])
def test_whoever_else_asks_sees_what_one_rank_sees(work, n):
    x = filled(*CLIP)
    out, _ = on_sharded("virtual", n, x, 3, work)
    torch.testing.assert_close(out, work(x), **CLOSE)


@pytest.mark.parametrize("work", [_zeros, _reflected, _cached], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [2, 3])
def test_on_gloo_ranks_and_the_simple_path(work, n, monkeypatch):
    x = filled(1, 4, 3, 17, 12)
    out, _ = on_sharded("gloo", n, x, 3, work, None, "inference_mode")
    torch.testing.assert_close(out, work(x), **CLOSE)
    monkeypatch.setenv("HALOTILE_SIMPLE_CONV", "1")
    simple, _ = on_sharded("virtual", n, x, 3, work)
    torch.testing.assert_close(out, simple, **CLOSE)


def test_one_repetition_is_a_copy():
    def work(x):
        once = x.repeat(1, 1, 1, 1, 1)
        once.zero_()
        return x + once

    x = filled(*CLIP)
    assert torch.equal(on_sharded("virtual", 2, x, 3, work)[0], x)

"""Convolutions of the sharded dim, against one rank, over everything that a convolution can be."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from halotile.comm import Ranks, run_virtual
from halotile.geometry import Extents
from halotile.spatial import SpatialTensor
from halotile.spatial.rules import convolution

# a band may get another kernel than the whole: sums in another order, about 1e-6 for the few hundred terms here
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=["copies first", "seams last"])
def way(request):
    """Both ways of a fast convolution, whatever the size: which one a band gets is a question of cost alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_CPU_BAND_PER_WEIGHT", 1e9 if request.param == "copies first" else 0)
        yield


def filled(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_virtual(n, x, dim, work, extents=None):
    """`work` on a sharded `x`, on n virtual ranks: every rank's whole result, and the gathers; all must agree."""

    def one(transport):
        with torch.no_grad():
            sharded = SpatialTensor.shard(x, Ranks(transport), dim, extents)
            out = work(sharded)
            return out.full(), dict(sharded.ledger.gathers), transport.counters.snapshot()

    results = run_virtual(n, one, timeout_s=20)
    assert all(torch.equal(results[0][0], out) for out, _, _ in results)
    return results[0][0], results[0][1], [traffic for _, _, traffic in results]


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 5)) for _ in range(dims)]
    stride = [draw(st.integers(1, 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    padding = [draw(st.integers(0, 3)) for _ in range(dims)]
    groups = draw(st.sampled_from([1, 2, 4]))
    transposed = draw(st.booleans())
    extra = (
        [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        if transposed
        else [0] * dims
    )
    size = [draw(st.integers(1, 13)) for _ in range(dims)]
    dim = draw(st.integers(0, dims - 1))
    ranks = draw(st.integers(1, 5))
    batch = draw(st.integers(1, 2))
    bias = draw(st.booleans())
    cuts = sorted(draw(st.integers(0, size[dim])) for _ in range(ranks - 1))
    uneven = tuple(b - a for a, b in pairwise([0, *cuts, size[dim]]))
    extents = draw(st.sampled_from([None, Extents(uneven)]))
    return kernel, stride, dilation, padding, groups, transposed, extra, size, dim, ranks, batch, bias, extents


@pytest.mark.usefixtures("way")
@settings(max_examples=200, deadline=None)
@given(convolutions())
def test_any_convolution_equals_one_rank(case):
    kernel, stride, dilation, padding, groups, transposed, extra, size, dim, ranks, batch, bias, extents = case
    x = filled(batch, 4, *size)
    weight = filled(4, 4 // groups, *kernel, seed=1)
    b = filled(4, seed=2) if bias else None

    def convolve(tensor):
        return torch.convolution(tensor, weight, b, stride, padding, dilation, transposed, extra, groups)

    try:
        expected = convolve(x)
    except RuntimeError:
        # too small an input for one rank, too: every rank says so
        with pytest.raises(RuntimeError):
            on_virtual(ranks, x, dim + 2, convolve, extents)
        return
    if not expected.numel():
        return
    out, gathers, _ = on_virtual(ranks, x, dim + 2, convolve, extents)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert gathers == {}


MODES = ["constant", "replicate", "reflect", "circular"]


@pytest.mark.usefixtures("way")
@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(MODES),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.integers(3, 12),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
    st.integers(0, 1),
    st.sampled_from([0.0, 1.5]),
)
def test_padding_and_then_a_convolution(mode, pad, height, ranks, stride, own, value):
    x, weight = filled(1, 4, height, 6), filled(4, 4, 3, 3, seed=1)

    def run(tensor):
        padded = F.pad(tensor, pad, mode=mode, value=value if mode == "constant" else None)
        return F.conv2d(padded, weight, None, stride, own)

    out, gathers, _ = on_virtual(ranks, x, 2, run)
    torch.testing.assert_close(out, run(x), **CLOSE)
    assert gathers == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("height", [3, 4, 11])
def test_padding_gives_its_values_to_whoever_asks(mode, ranks, height):
    x = torch.arange(2.0 * height * 5).view(1, 2, height, 5)

    def run(tensor):
        return F.pad(tensor, (1, 2, 2, 1), mode=mode) * 2

    out, gathers, _ = on_virtual(ranks, x, 2, run)
    assert torch.equal(out, run(x))
    assert gathers == {}


@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
def test_padding_five_dims_in_time_and_space(mode):
    x, weight = filled(1, 4, 4, 9, 6), filled(4, 4, 3, 3, 3, seed=1)

    def run(tensor):
        return F.conv3d(F.pad(tensor, (1, 1, 1, 1, 2, 0), mode=mode), weight)

    out, gathers, _ = on_virtual(3, x, 3, run)
    torch.testing.assert_close(out, run(x), **CLOSE)
    assert gathers == {}


@pytest.mark.parametrize("pad", [(0, 0, -1, 0), (0, 0, 0, -3), (-1, 1, -2, 2), (0, -1, 3, -4), (-1, -1, -1, -1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_negative_padding_cuts_rows_off(pad, ranks):
    x = torch.arange(66.0).view(1, 1, 11, 6)
    out, gathers, _ = on_virtual(ranks, x, 2, lambda tensor: F.pad(tensor, pad, value=7.0))
    assert torch.equal(out, F.pad(x, pad, value=7.0))
    assert gathers == {}


def test_what_is_written_after_padding_does_not_reach_the_padded_tensor():
    x, weight = filled(1, 4, 8, 8), filled(4, 4, 3, 3, seed=1)

    def run(tensor):
        tensor = tensor.clone()
        padded = F.pad(tensor, (1, 1, 1, 1))
        tensor.add_(1)
        return F.conv2d(padded, weight) + tensor

    out, _, _ = on_virtual(2, x, 2, run)
    torch.testing.assert_close(out, run(x), **CLOSE)


def test_a_padded_tensor_can_be_written_to_and_used_twice():
    x, weight = filled(1, 4, 8, 8), filled(4, 4, 3, 3, seed=1)

    def run(tensor):
        padded = F.pad(tensor, (1, 1, 1, 1))
        first = F.conv2d(padded, weight)
        padded.mul_(2)
        return first + F.conv2d(padded, weight) + padded[:, :, 1:-1, 1:-1]

    out, _, _ = on_virtual(3, x, 2, run)
    torch.testing.assert_close(out, run(x), **CLOSE)


def large(dims):
    """Sizes at which one rank takes one kernel for the whole, and a band alone would take another."""
    return (1, 16, 40, 48) if dims == 2 else (1, 16, 4, 24, 24)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_bands_give_the_same_bits(dims, ranks, channels_last):
    torch.set_num_threads(1)
    x = filled(*large(dims))
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    weight = filled(16, 16, *[3] * dims, seed=1)
    run = (F.conv2d, F.conv3d)[dims - 2]
    out, gathers, traffic = on_virtual(ranks, x, x.dim() - 2, lambda tensor: run(tensor, weight, padding=1))
    assert torch.equal(out, run(x, weight, padding=1))
    assert gathers == {}
    # one row to each neighbour and the final result: nothing else travels
    row = x.numel() // x.shape[-2] * 4
    assert traffic[0].bytes_sent == row + (ranks - 1) * row * Extents.even(x.shape[-2], ranks).sizes[0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
def test_the_simple_path_agrees_with_the_fast_one(mode, monkeypatch):
    layer = torch.nn.Conv2d(16, 16, 3, padding=1, padding_mode=mode).requires_grad_(False)
    x = filled(*large(2))
    fast, _, _ = on_virtual(3, x, 2, layer)
    monkeypatch.setenv("HALOTILE_SIMPLE_CONV", "1")
    slow, gathers, _ = on_virtual(3, x, 2, layer)
    torch.testing.assert_close(fast, slow, **CLOSE)
    assert gathers == {}


def _over_ranks(group, dtype, inference):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, padding=1),
        torch.nn.Conv2d(8, 8, 3, stride=2, padding=1),
        torch.nn.Conv2d(8, 8, 5, padding=2, groups=2),
        torch.nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        torch.nn.Conv2d(4, 4, 7, padding=3, padding_mode="reflect"),
    )
    net = net.to(dtype).requires_grad_(False)
    worst = 0.0
    with torch.inference_mode() if inference else torch.no_grad():
        # the last is wide enough to get its seam rows last
        for height, width in ((11, 9), (17, 9), (4, 9), (17, 250)):
            x = filled(2, 4, height, width).to(dtype)
            sharded = SpatialTensor.shard(x, Ranks.of(group, 30))
            out, expected = net(sharded).full(), net(x)
            worst = max(worst, ((out - expected).abs().max() / expected.abs().max()).item())
            assert not sharded.ledger.gathers
    return worst


@pytest.mark.parametrize("members", [(0,), (0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("inference", [False, True])
def test_layers_over_gloo_ranks(members, inference):
    for worst in run_ranks(_over_ranks, len(members), torch.float32, inference, members=members):
        assert worst < 1e-5  # sums in another order
    for worst in run_ranks(_over_ranks, len(members), torch.bfloat16, inference, members=members):
        assert worst < 2e-2  # two units of bfloat16's 8 bits

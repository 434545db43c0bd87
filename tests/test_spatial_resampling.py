"""Pooling, interpolation and shuffles of sharded tensors, against one rank."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from on_sharded import GUARDS, filled, on_sharded, uneven

SIZES = (1, 2, 3, 4)


@st.composite
def pools(draw):
    dims = draw(st.sampled_from([1, 2, 3]))
    size = [draw(st.integers(1, 9)) for _ in range(dims)]
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    stride = [draw(st.integers(1, 4)) for _ in range(dims)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    return dims, size, kernel, stride, padding, dilation, draw(st.booleans())


def _same_on_ranks(x, dim, work, n, extents, guard="no_grad"):
    try:
        expected = work(x)
    except RuntimeError:
        # one rank refuses it, so all do
        with pytest.raises(RuntimeError):
            on_sharded("virtual", n, x, dim, work, extents, guard)
        return
    out, gathers = on_sharded("virtual", n, x, dim, work, extents, guard)
    assert gathers == {}
    for part, whole in zip(*((a if isinstance(a, tuple) else (a,)) for a in (out, expected)), strict=True):
        assert part.dtype == whole.dtype
        assert torch.equal(part, whole)


def _pads_alone(size, kernel, stride, padding, dilation):
    """Whether some window, along some dim, sees padding only."""
    return any(
        not any(0 <= start + t * d < n for t in range(k))
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        for start in range(-p, n + p, s)
        if start + d * (k - 1) < n + p + s
    )


@settings(max_examples=60, deadline=None)
@given(pools(), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 4), st.sampled_from(sorted(GUARDS)))
def test_any_average_pool_equals_one_rank(pool, n, even, include, dim, guard):
    dims, size, kernel, stride, padding, _, ceil_mode = pool
    x = filled(2, 3, *size)
    dim %= x.dim()
    pooling = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][dims - 1]
    work = functools.partial(
        pooling, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=include
    )
    _same_on_ranks(x, dim, work, n, None if even else uneven(x.shape[dim], n), guard)


@settings(max_examples=60, deadline=None)
@given(pools(), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 4), st.sampled_from(sorted(GUARDS)))
def test_any_maximum_pool_equals_one_rank_with_its_indices(pool, n, even, infinite, dim, guard):
    dims, size, kernel, stride, padding, dilation, ceil_mode = pool
    x = torch.full((2, 3, *size), -torch.inf) if infinite else filled(2, 3, *size)
    dim %= x.dim()
    pooling = [F.max_pool1d, F.max_pool2d, F.max_pool3d][dims - 1]
    work = functools.partial(
        pooling,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        ceil_mode=ceil_mode,
        return_indices=True,
    )
    # a window with nothing but padding in it has no index: torch's own there is that of a row outside the tensor
    assume(not _pads_alone(size, kernel, stride, padding, dilation))
    _same_on_ranks(x, dim, work, n, None if even else uneven(x.shape[dim], n), guard)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "work",
    [
        functools.partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, divisor_override=5),
        functools.partial(F.avg_pool2d, kernel_size=2),
        functools.partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
        functools.partial(F.adaptive_avg_pool2d, output_size=(4, 3)),
    ],
)
def test_pools_in_channels_last_and_bfloat16(n, dtype, work):
    x = filled(2, 3, 12, 7, dtype=dtype).to(memory_format=torch.channels_last)
    for extents in (None, uneven(12, n)):
        _same_on_ranks(x, -2, work, n, extents)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("dim", [-3, -2, -1])
def test_adaptive_pool_of_parts_of_equal_size(n, guard, dim):
    x = filled(2, 3, 12, 8, 6)
    _same_on_ranks(x, dim, functools.partial(F.adaptive_avg_pool3d, output_size=(4, 2, 3)), n, None, guard)
    _same_on_ranks(x.flatten(1, 2), dim, functools.partial(F.adaptive_avg_pool2d, output_size=(2, 3)), n, None, guard)


def test_adaptive_pool_to_one_and_to_parts_of_unequal_size():
    x = filled(2, 3, 11, 5)
    for size in ((1, 1), (1, 3)):
        work = functools.partial(F.adaptive_avg_pool2d, output_size=size)
        out, gathers = on_sharded("virtual", 3, x, -2, work)
        assert gathers == {}
        # a mean of 11 rows, summed in another order
        torch.testing.assert_close(out, work(x), rtol=1e-6, atol=1e-6)
    work = functools.partial(F.adaptive_avg_pool2d, output_size=(4, 2))
    out, gathers = on_sharded("virtual", 3, x, -2, work)
    assert sum(gathers.values()) == 1
    assert torch.equal(out, work(x))


# --- interpolation


def _resized(x, mode, factor, by, align_corners=None, recompute=None):
    arguments = {"mode": mode, "align_corners": align_corners}
    if by == "size":
        return F.interpolate(x, size=[max(1, int(s * factor)) for s in x.shape[2:]], **arguments)
    return F.interpolate(x, scale_factor=factor, recompute_scale_factor=recompute, **arguments)


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("shape", [(2, 3, 11), (2, 3, 11, 4), (1, 2, 3, 11, 4), (1, 2, 11, 2, 3)])
def test_nearest_picks_the_rows_that_one_rank_picks(guard, mode, shape):
    x = filled(*shape)
    for factor in (2, 3, 1.7, 0.5, 0.37, 1.0):
        for by in ("size", "factor"):
            work = functools.partial(_resized, mode=mode, factor=factor, by=by)
            for n in SIZES:
                _same_on_ranks(x, shape.index(11), work, n, uneven(11, n) if n == 3 else None, guard)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600), st.booleans(), st.integers(2, 4))
def test_nearest_rounds_places_as_the_kernel_does(rows, outputs, exact, n):
    x = torch.arange(rows, dtype=torch.float32).view(1, 1, rows, 1)
    work = functools.partial(F.interpolate, size=(outputs, 1), mode="nearest-exact" if exact else "nearest")
    out, gathers = on_sharded("virtual", n, x, 2, work, None, "no_grad")
    assert gathers == {}
    # on a place that is a whole number but for its rounding torch's own kernels disagree: 2 rows to 121, exact, row 60
    places = (torch.arange(outputs, dtype=torch.float64) + 0.5 * exact) * rows / outputs
    clear = (places - places.round()).abs() > 1e-4
    assert torch.equal(out.flatten()[clear], work(x).flatten()[clear])
    assert (out - work(x)).abs().max() <= 1


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("mode", "shape"),
    [("linear", (2, 3, 11)), ("bilinear", (2, 3, 11, 4)), ("bicubic", (2, 3, 11, 4)), ("trilinear", (1, 2, 3, 11, 4))],
)
def test_smooth_interpolation_equals_one_rank(guard, dtype, mode, shape):
    # float32: sums in another order; bfloat16: the rows are weighted in float32 and rounded once
    close = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float64: 1e-13}[dtype]
    x = filled(*shape, dtype=dtype)
    for factor in (2, 4, 3, 1.7, 0.5, 0.37, 1.0, 1.05):
        for by, corners, recompute in (
            ("size", False, None),
            ("size", True, None),
            ("factor", False, None),
            ("factor", False, True),
        ):
            work = functools.partial(
                _resized, mode=mode, factor=factor, by=by, align_corners=corners, recompute=recompute
            )
            n = 1 + int(factor * 100) % 4
            out, gathers = on_sharded("virtual", n, x, shape.index(11), work, uneven(11, n) if n == 3 else None, guard)
            assert gathers == {}
            torch.testing.assert_close(out, work(x), rtol=close, atol=close)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_doubling_is_bitwise_the_kernels(mode):
    x = filled(2, 3, 40, 9)
    for n in SIZES:
        _same_on_ranks(
            x, -2, functools.partial(_resized, mode=mode, factor=2, by="factor", align_corners=False), n, None
        )


@pytest.mark.parametrize("align_corners", [False, True])
def test_smooth_weights_are_the_kernels_where_float32_is_coarse(align_corners):
    """Row 3000's place has an error of 1e-4 in float32, and one rank has it, too."""
    x = filled(1, 1, 1100, 1) * 100
    for mode, outputs in (("bilinear", 3301), ("bicubic", 3301), ("bilinear", 701)):
        work = functools.partial(F.interpolate, size=(outputs, 1), mode=mode, align_corners=align_corners)
        out, _ = on_sharded("virtual", 3, x, -2, work)
        # of values up to 400: rounding of the sums
        torch.testing.assert_close(out, work(x), rtol=0, atol=2e-4)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks(n, rows):
    x = filled(2, 4, rows, 6)
    for work in (
        functools.partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1),
        functools.partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
        functools.partial(F.interpolate, scale_factor=2, mode="nearest"),
        functools.partial(F.interpolate, scale_factor=2, mode="bilinear"),
        functools.partial(F.interpolate, size=(5, 7), mode="nearest"),
        functools.partial(F.pixel_shuffle, upscale_factor=2),
        functools.partial(torch.repeat_interleave, repeats=3, dim=2),
    ):
        _same_on_ranks(x, -2, work, n, None)
    work = functools.partial(F.interpolate, size=(5, 7), mode="bicubic")
    out, gathers = on_sharded("virtual", n, x, -2, work)
    assert gathers == {}
    # sums in another order
    torch.testing.assert_close(out, work(x), rtol=1e-5, atol=1e-5)


def test_what_has_no_rule_is_gathered_counted_and_right():
    x = filled(1, 2, 11, 6)
    work = functools.partial(F.interpolate, size=(5, 3), mode="bilinear", antialias=True)
    out, gathers = on_sharded("virtual", 2, x, -2, work)
    assert torch.equal(out, work(x))
    assert gathers == {"aten._upsample_bilinear2d_aa.default": 1}


# --- shuffles


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("n", SIZES)
def test_shuffles_and_repeats_equal_one_rank(guard, n):
    x = filled(2, 12, 10, 6)
    for dim in (0, 2, 3):
        for work in (
            functools.partial(F.pixel_shuffle, upscale_factor=2),
            functools.partial(F.pixel_unshuffle, downscale_factor=2),
            functools.partial(torch.channel_shuffle, groups=3),
            functools.partial(torch.repeat_interleave, repeats=3, dim=2),
            functools.partial(torch.repeat_interleave, repeats=2, dim=1),
            functools.partial(torch.repeat_interleave, repeats=torch.arange(12), dim=1),
        ):
            _same_on_ranks(x, dim, work, n, None, guard)


def _unshuffled_extents(x):
    out = F.pixel_unshuffle(x, 4)
    return torch.tensor(out.spec.extents.sizes)


def test_unshuffling_moves_rows_that_belong_together():
    """(5, 5, 2) in multiples of 4 is (4, 8, 0)."""
    x = filled(1, 1, 12, 4)
    sizes, gathers = on_sharded("virtual", 3, x, -2, _unshuffled_extents, uneven(12, 3))
    assert sizes.sum() == 3
    assert gathers == {}
    _same_on_ranks(x, -2, functools.partial(F.pixel_unshuffle, downscale_factor=4), 3, uneven(12, 3))


def _decoderlike(x):
    x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    x = F.avg_pool2d(x, 3, 1, 1)
    x = F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)
    x = F.interpolate(x, size=(17, 5), mode="bilinear", align_corners=True)
    return F.max_pool2d(x, 3, 2, 1)


@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_chain_on_gloo_ranks(guard, n):
    x = filled(2, 4, 11, 6)
    out, gathers = on_sharded("gloo", n, x, -2, _decoderlike, None, guard)
    assert gathers == {}
    # the linear step sums in another order
    torch.testing.assert_close(out, _decoderlike(x), rtol=1e-5, atol=1e-5)

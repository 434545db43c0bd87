"""Upsampling that waits for its convolution: taken where it may be, right wherever it is not."""

import diffusers
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_sharded import GUARDS, filled, on_sharded, uneven
from ranks import run_ranks

import halotile
from halotile.spatial.rules import upsampled

TOLERANCE = 2e-6
"""Of the largest value: weights are added up first, which rounds otherwise, and so do the norms of several ranks."""


@pytest.fixture
def folds(monkeypatch):
    """What was convolved by phases, at any size."""
    monkeypatch.setattr(upsampled, "_FEWEST_POSITIONS", 1)
    monkeypatch.setattr(upsampled, "_FEWEST_CHANNELS", 1)
    taken = []
    by_phase = upsampled._by_phase

    def noted(*args):
        taken.append(args)
        return by_phase(*args)

    monkeypatch.setattr(upsampled, "_by_phase", noted)
    return taken


def _close(out, expected):
    assert out.shape == expected.shape
    assert (out - expected).abs().max() <= TOLERANCE * expected.abs().max()


def _conv(x, **how):
    weight = filled(6, x.shape[1], *[3] * (x.dim() - 2), seed=1)
    return [F.conv1d, F.conv2d, F.conv3d][x.dim() - 3](x, weight, filled(6, seed=2), **{"padding": 1, **how})


def _twice(x, mode="nearest"):
    return F.interpolate(x, scale_factor=2.0, mode=mode)


def _image(x):
    return _conv(_twice(F.group_norm(x, 2)))


def _exact(x):
    return _conv(_twice(F.group_norm(x, 2), "nearest-exact"))


def _by_size(x):
    return _conv(F.interpolate(F.group_norm(x, 2), size=[2 * n for n in x.shape[2:]]))


def _channels_last(x):
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return _conv(_twice(F.group_norm(x, 2).contiguous(memory_format=layout)))


def _replicated(x):
    return _conv(F.pad(_twice(F.group_norm(x, 2)), [1, 1] * (x.dim() - 2), mode="replicate"), padding=0)


def _height_and_width(x):
    return _conv(F.interpolate(F.group_norm(x, 2), scale_factor=(1, 2, 2)))


def _first_frame_apart(x):
    """What HunyuanVideo does."""
    first, others = F.group_norm(x, 2).split((1, x.shape[2] - 1), 2)
    first = _twice(first.squeeze(2)).unsqueeze(2)
    both = torch.cat((first, _twice(others.contiguous())), 2)
    return _conv(F.pad(both, (1, 1, 1, 1, 2, 0), mode="replicate"), padding=0)


IMAGE, CLIP = (2, 4, 13, 6), (1, 4, 3, 11, 6)
TAKEN = [
    (_image, (2, 4, 13), 2),
    (_image, IMAGE, 2),
    (_image, IMAGE, 3),
    (_exact, IMAGE, 2),
    (_by_size, IMAGE, 2),
    (_replicated, IMAGE, 2),
    (_image, CLIP, 2),
    (_image, CLIP, 3),
    (_replicated, CLIP, 4),
    (_channels_last, IMAGE, 2),
    (_channels_last, IMAGE, 3),
    (_channels_last, CLIP, 3),
    (_height_and_width, CLIP, 3),
    (_first_frame_apart, CLIP, 3),
    (_first_frame_apart, CLIP, 4),
]


@pytest.mark.parametrize(("work", "shape", "dim"), TAKEN)
@pytest.mark.parametrize("guard", sorted(GUARDS))
@pytest.mark.parametrize("n", [2, 3, 4])
def test_convolutions_of_repeated_elements_go_by_phases(folds, work, shape, dim, guard, n):
    x = filled(*shape)
    for extents in (None, uneven(shape[dim], n)):
        folds.clear()
        out, gathers = on_sharded("virtual", n, x, dim, work, extents, guard)
        assert gathers == {}
        having = n if extents is None else sum(size > 0 for size in extents.sizes)
        assert len(folds) == min(having, shape[dim])
        _close(out, work(x))


def _keeps_its_layout(x):
    out = _channels_last(x)
    return torch.tensor(out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous())


def test_channels_stay_last_in_memory(folds):
    for n in (1, 2, 3):
        assert on_sharded("virtual", n, filled(*IMAGE), 2, _keeps_its_layout)[0]
    assert len(folds) == 5


def _alone(x):
    return _conv(_twice(x))


def _strided(x):
    return _conv(_twice(F.group_norm(x, 2)), stride=2)


def _unpadded(x):
    return _conv(_twice(F.group_norm(x, 2)), padding=(0, 1))


def _one_sided(x):
    return _conv(F.pad(_twice(F.group_norm(x, 2)), (0, 1, 0, 1)), padding=0)


def _one_sided_border(x):
    return _conv(F.pad(_twice(F.group_norm(x, 2)), (2, 0, 1, 1), mode="replicate"), padding=0)


def _three_times(x):
    return _conv(F.interpolate(F.group_norm(x, 2), scale_factor=3.0))


def _more_than_twice(x):
    """To twice the width, by a scale that repeats the columns unevenly."""
    return _conv(F.interpolate(F.group_norm(x, 2), scale_factor=(2.0, 2.1)))


def _halved(x):
    return _conv(F.interpolate(F.group_norm(x, 2), scale_factor=0.5))


def _width_alone(x):
    return _conv(F.interpolate(F.group_norm(x, 2), scale_factor=(1, 2)))


def _smaller(x):
    return F.conv2d(_twice(F.group_norm(x, 2)), filled(6, 4, 1, 1, seed=1))


def _between(x):
    return _conv(F.silu(_twice(F.group_norm(x, 2))) + 1)


def _beside_another(x):
    x = F.group_norm(x, 2)
    return _conv(torch.cat((_twice(x), _twice(x) + 1), 1))


def _view(x):
    return _twice(F.group_norm(x, 2)).flatten(2)


def _permuted(x):
    return _conv(_twice(F.group_norm(x, 2).transpose(2, 3)))


@pytest.mark.parametrize(
    "work",
    [
        _strided,
        _unpadded,
        _one_sided,
        _one_sided_border,
        _three_times,
        _halved,
        _width_alone,
        _smaller,
        _between,
        _beside_another,
        _view,
        _permuted,
        _more_than_twice,
    ],
)
def test_whatever_else_asks_for_the_elements_gets_them(folds, work):
    x = filled(2, 4, 14, 6)
    for n in (2, 3):
        out, gathers = on_sharded("virtual", n, x, 2, work)
        assert gathers == {}
        _close(out, work(x))
    assert folds == []


def test_thin_bands_have_the_order_of_dims_of_the_whole():
    for rows, width in ((2, 1), (3, 1), (4, 2)):
        x = filled(2, 4, rows, width)
        for n in (2, 3):
            for dim in (2, 3):
                for work in (_channels_last, lambda x: _twice(F.silu(F.group_norm(x, 2)[:, :, 1:]))):
                    _close(on_sharded("virtual", n, x, dim, work)[0], work(x))


def test_bits_of_one_rank_are_kept_where_they_still_are(folds):
    x = filled(*IMAGE)
    for work, n in ((_alone, 2), (_alone, 3), (_image, 1)):
        out, _ = on_sharded("virtual", n, x, 2, work)
        assert torch.equal(out, work(x))
    assert folds == []


def test_the_simple_path_and_small_or_thin_layers_take_none(folds, monkeypatch):
    x = filled(*IMAGE)
    for name, value in (("_FEWEST_POSITIONS", 13 * 6 // 2 + 1), ("_FEWEST_CHANNELS", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(upsampled, name, value)
            _close(on_sharded("virtual", 2, x, 2, _image)[0], _image(x))
    monkeypatch.setenv("HALOTILE_SIMPLE_CONV", "1")
    _close(on_sharded("virtual", 2, x, 2, _image)[0], _image(x))
    assert folds == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_take_none(folds, dtype):
    x = filled(*IMAGE).to(dtype)

    def work(x):
        weight = filled(6, 4, 3, 3, seed=1).to(dtype)
        return F.conv2d(_twice(F.group_norm(x, 2)), weight, padding=1)

    out, _ = on_sharded("virtual", 2, x, 2, work)
    # bfloat16 has eight bits, and the norm may round to the neighbour
    torch.testing.assert_close(out, work(x), rtol=2e-2, atol=2e-2)
    assert folds == []


def _base_written(x):
    x = F.group_norm(x, 2)
    up = _twice(x)
    x.mul_(2)
    return _conv(up)


def _written(x):
    up = _twice(F.group_norm(x, 2))
    up[:, :, 3:9].mul_(2)
    return _conv(up)


def _view_written(x):
    up = _twice(F.group_norm(x, 2))
    up.unsqueeze(2).mul_(2)
    return _conv(up)


def _written_under_a_view(x):
    up = _twice(F.group_norm(x, 2))
    view = up.unsqueeze(2)
    up.mul_(2)
    return _conv(view)


def _padded_base_written(x):
    x = F.group_norm(x, 2)
    up = F.pad(_twice(x), (1, 1, 1, 1), mode="replicate")
    x.mul_(2)
    return _conv(up, padding=0)


@pytest.mark.parametrize("work", [_base_written, _written, _view_written, _written_under_a_view, _padded_base_written])
def test_what_is_written_meanwhile_is_seen_where_one_rank_sees_it(folds, work):
    x = filled(*IMAGE)
    for n in (2, 3):
        _close(on_sharded("virtual", n, x, 2, work)[0], work(x))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 2), min_size=2, max_size=2),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 4),
    st.sampled_from([2, 3]),
)
def test_any_convolution_of_any_upsampling(factors, kernel, stride, dilation, padding, groups, n, dim):
    x = filled(1, 4, 9, 7)

    def work(x):
        up = F.interpolate(F.group_norm(x, 2), scale_factor=[float(factor) for factor in factors])
        weight = filled(4, 4 // groups, *kernel, seed=1)
        return F.conv2d(up, weight, None, stride, padding, dilation, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upsampled, "_FEWEST_POSITIONS", 1)
        patch.setattr(upsampled, "_FEWEST_CHANNELS", 1)
        _close(on_sharded("virtual", n, x, dim, work)[0], work(x))


def _image_vae():
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64), layers_per_block=1, latent_channels=4, norm_num_groups=8,
    )  # fmt: skip


def _clip_vae():
    return diffusers.AutoencoderKLHunyuanVideo(
        block_out_channels=(16, 32, 32, 32), layers_per_block=1, latent_channels=4, norm_num_groups=8
    )


def _decoded(group, build, z):
    """A rank's picture, and how often a convolution went by phases."""
    torch.manual_seed(0)
    vae = build().eval().requires_grad_(False)
    taken, by_phase = [], upsampled._by_phase

    def noted(*args):
        taken.append(args)
        return by_phase(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upsampled, "_by_phase", noted)
        return halotile.decode(vae, z, group, "shard", strict=True), len(taken)


@pytest.mark.parametrize(
    ("build", "shape", "layers"), [(_image_vae, (2, 4, 50, 32), 1), (_clip_vae, (1, 4, 2, 31, 30), 3)]
)
@pytest.mark.parametrize("n", [2, 3])
def test_a_real_decode_takes_them_where_they_pay(build, shape, layers, n):
    torch.manual_seed(0)
    vae, z = build().eval().requires_grad_(False), filled(*shape)
    with torch.no_grad():
        expected = vae.decode(z).sample
    results = run_ranks(_decoded, n, build, z)
    for out, taken in results:
        assert torch.equal(out, results[0][0])
        assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert taken == layers

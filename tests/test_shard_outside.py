"""Sharded decodes of what diffusers does not have: MONAI's autoencoders, plain modules and functions."""

from __future__ import annotations

import warnings

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks
from torch import nn

import halotile
from halotile.comm import Ranks
from halotile.decode.shard import deal_rows, rows_dim
from halotile.errors import UnsupportedError
from halotile.geometry import Extents

TOLERANCE = 2e-5
"""Of the largest value: sums of float32 in another order, over some thirty layers."""


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    assert (out - expected).abs().max() <= TOLERANCE * expected.abs().max()


# --- MONAI


def _monai(dims: int) -> nn.Module:
    with warnings.catch_warnings():
        # what MONAI imports is deprecated here and there
        warnings.simplefilter("ignore")
        from monai.networks.nets import AutoencoderKL

        torch.manual_seed(0)
        return AutoencoderKL(
            spatial_dims=dims,
            in_channels=1,
            out_channels=1,
            num_res_blocks=(1, 1, 1),
            channels=(8, 16, 16),
            attention_levels=(False, False, True),
            latent_channels=3,
            norm_num_groups=4,
        ).eval()


def _monai_input(dims: int, half: str) -> torch.Tensor:
    shape = (11, 5) if dims == 2 else (11, 4, 5)
    generator = torch.Generator().manual_seed(1)
    if half == "decode":
        return torch.randn(1, 3, *shape, generator=generator)
    return torch.randn(1, 1, *(4 * size for size in shape), generator=generator)


def _monai_sharded(group, dims, half):
    model = _monai(dims)
    with halotile.parallelize(model, group, strategy="shard", deliver="sharded") as handle:
        getattr(model, half)(_monai_input(dims, half))
    call = getattr(halotile, half)
    return call(model, _monai_input(dims, half), group, "shard"), handle.report


@pytest.mark.parametrize("half", ["decode", "encode"])
@pytest.mark.parametrize(("dims", "ranks"), [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_monai_autoencoders(dims: int, ranks: int, half: str) -> None:
    x = _monai_input(dims, half)
    with torch.no_grad():
        out = getattr(_monai(dims), half)(x)
    expected = out if half == "decode" else out[0]
    for result, report in run_ranks(_monai_sharded, ranks, dims, half):
        assert_close(result, expected)
        assert report.gathers == {}
        assert report.attention_gathers > 0
        # volumes are dealt along their first spatial dim, as pictures are
        assert sum(report.extents) == expected.shape[2]
        assert report.loads[0] * x.shape[2] == x[:, 0].numel() * Extents.even(x.shape[2], ranks).sizes[0]


# --- modules and functions


def _native_video() -> nn.Module:
    """A decoder `B C F H W`, causal in time as those in the repositories of LTX, Wan and Hunyuan are."""
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self, channels_in: int, channels_out: int):
            super().__init__()
            self.conv = nn.Conv3d(channels_in, channels_out, 3, padding=(0, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.cat([x[:, :, :1], x[:, :, :1], x], 2))

    return nn.Sequential(
        Causal(4, 8), nn.SiLU(), nn.Upsample(scale_factor=(1, 2, 2), mode="nearest"), Causal(8, 3)
    ).eval()


def _video(group, dim, deliver):
    return halotile.decode(_native_video(), _video_latent(), group, "shard", deliver=deliver, dim=dim)


def _video_latent() -> torch.Tensor:
    return torch.randn(1, 4, 3, 7, 5, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("dim", "rows"), [(-2, (8, 6)), (3, (8, 6)), (4, (6, 4)), (None, (2, 1))])
def test_a_native_video_decoder_is_a_module_and_says_which_dim_to_deal(dim: int | None, rows: tuple[int, ...]) -> None:
    with torch.no_grad():
        expected = _native_video()(_video_latent())
    at = 2 if dim is None else dim
    shards = run_ranks(_video, 2, dim, "sharded")
    assert tuple(shard.shape[at] for shard in shards) == rows
    assert_close(torch.cat(shards, at), expected)
    for out in run_ranks(_video, 2, dim, "all"):
        assert_close(out, expected)


def _function(x: torch.Tensor, gain: float = 1.0) -> tuple[torch.Tensor, int]:
    return nn.functional.avg_pool2d(x * gain, 3, stride=1, padding=1), 0


def _call_function(group):
    return halotile.encode(_function, torch.arange(70.0).view(1, 1, 10, 7), group, "shard", gain=2.0)


def test_a_function_with_arguments_that_returns_a_tuple() -> None:
    expected, _ = _function(torch.arange(70.0).view(1, 1, 10, 7), 2.0)
    for out in run_ranks(_call_function, 3):
        assert_close(out, expected)


def _bound_method(group):
    return halotile.decode(
        tiny.build("AutoencoderKLWan_2.1").decode, tiny.latent("AutoencoderKLWan_2.1"), group, "shard"
    )


def test_the_bound_method_of_a_diffusers_class_is_dealt_along_height() -> None:
    name = "AutoencoderKLWan_2.1"
    with torch.no_grad():
        expected = tiny.build(name).decode(tiny.latent(name)).sample
    for out in run_ranks(_bound_method, 2):
        assert_close(out, expected)


@pytest.mark.parametrize("strategy", ["auto", "serial"])
def test_other_strategies_call_it_as_it_is(strategy: str) -> None:
    x = torch.randn(1, 4, 3, 7, 5)
    model = _native_video().bfloat16()
    out = halotile.decode(model, x, Ranks.alone(), strategy)
    assert out.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(out, model(x.bfloat16()).float())


def test_a_callable_has_no_tile_loop() -> None:
    with pytest.raises(UnsupportedError, match=r"PlainCallable cannot be run with strategy='tile': .*no tile loop"):
        halotile.decode(_native_video(), torch.zeros(1, 4, 1, 8, 8), Ranks.alone(), "tile")


class _Pipeline:
    def __init__(self):
        self.vae = tiny.build("AutoencoderKL")

    def __call__(self, prompt):
        return prompt


@pytest.mark.parametrize(
    ("thing", "said"),
    [(_Pipeline(), "pass the pipeline's .vae"), (3, "int has no method 'decode'"), (None, "has no method 'decode'")],
)
def test_what_is_no_model_is_refused(thing: object, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        halotile.decode(thing, torch.zeros(1, 4, 8, 8), Ranks.alone(), "shard")


# --- which rows


def test_the_rule_for_the_dim() -> None:
    picture, clip = (1, 4, 8, 8), (1, 4, 3, 8, 8)
    wan = tiny.build("AutoencoderKLWan_2.1")
    assert rows_dim(wan, clip, None) == -2
    assert rows_dim(wan.decoder, clip, None) == -2
    assert rows_dim(_native_video(), clip, None) == -3
    assert rows_dim(_native_video(), picture, None) == -2
    assert [rows_dim(wan, clip, dim) for dim in (2, 3, 4, -1, -2, -3)] == [-3, -2, -1, -1, -2, -3]


def test_pixels_are_dealt_so_that_latents_come_out_even() -> None:
    vae = tiny.build("AutoencoderKL")
    assert deal_rows(vae, "decode", 11, 2).sizes == (6, 5)
    assert deal_rows(vae, "encode", 88, 2).sizes == (48, 40)
    # not whole latents: whatever the encoder makes of it
    assert deal_rows(vae, "encode", 90, 4).sizes == (23, 23, 22, 22)
    assert deal_rows(_native_video(), "encode", 11, 2).sizes == (6, 5)

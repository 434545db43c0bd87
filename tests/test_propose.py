"""`plan`, `price_window` and a `TilePlan` set on a VAE: every proposal can be had, and is what the loop then does."""

from __future__ import annotations

from fractions import Fraction

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile import PlanError, UnsupportedError
from halotile.comm import Ranks
from halotile.families import family_of


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOTILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def shape_of(kind: str, height: int, width: int) -> tuple[int, ...]:
    return (*tiny.latent(kind).shape[:-2], height, width)


class _Stub(torch.nn.Module):
    """Notes the latents that it is given, and returns pixels of the right size."""

    def __init__(self, decoder, ratio):
        super().__init__()
        self.seen = []
        self.decoder, self.ratio = decoder, ratio

    def forward(self, z, *args, **kwargs):
        self.seen.append(tuple(z.shape[-2:]))
        return z[:, :3].repeat_interleave(self.ratio, -1).repeat_interleave(self.ratio, -2)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_proposals_can_be_set_for_every_kind(kind: str) -> None:
    vae, shape = tiny.build(kind), shape_of(kind, 96, 64)
    before = {name: value for name, value in vars(vae).items() if "til" in name}
    plans = halotile.plan(vae, shape, 3)
    assert {name: value for name, value in vars(vae).items() if "til" in name} == before, "planning sets nothing"
    assert [plan.name for plan in plans] in (["coarse", "balanced", "fine"], ["coarse", "fine"])
    for plan in plans:
        assert 3 <= plan.tiles <= 12
        assert plan.predicted_bytes > 0
        halotile.apply_tile_plan(vae, plan)
        assert vae.use_tiling
        again = halotile.price_window(vae, shape, 3, plan.window_px, plan.overlap_px)
        assert again.to_dict() == plan.to_dict() | {"name": "asked"}
    assert plans[0].predicted_bytes > plans[-1].predicted_bytes


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderKLFlux2"])
def test_the_loop_cuts_the_tiles_of_the_plan(kind: str) -> None:
    vae, shape = tiny.build(kind), shape_of(kind, 96, 64)
    stub = _Stub(vae.decoder, family_of(vae).ratio(vae))
    vae.decoder = stub
    for plan in halotile.plan(vae, shape, 3):
        halotile.apply_tile_plan(vae, plan)
        stub.seen.clear()
        loop = halotile.tiled_decode_for(vae) or vae.tiled_decode
        with torch.no_grad():
            picture = loop(torch.zeros(shape), return_dict=False)[0]
        assert picture.shape[-2:] == plan.picture_px
        assert stub.seen == [tuple(len(region) for region in tile.regions) for tile in plan.grid.tiles]


def test_a_plan_holds_what_it_predicts() -> None:
    """One tile at a time: the peak of a tiled decode is a tile's, and the pictures of those that are done."""
    vae, shape = tiny.build("AutoencoderKL"), (1, 4, 96, 64)
    for plan in halotile.plan(vae, shape, 1):
        halotile.apply_tile_plan(vae, plan)
        with halotile.parallelize(vae, Ranks.alone(), "serial", halves=("decode",)) as handle:
            vae.decode(torch.zeros(shape))
        picture = 3 * 4 * plan.picture_px[0] * plan.picture_px[1]
        held = handle.report.peak_activation_bytes
        assert plan.predicted_bytes <= held <= plan.predicted_bytes + float(plan.decoded_ratio + 2) * picture


def test_budgets() -> None:
    vae, shape = tiny.build("AutoencoderKL"), (1, 4, 128, 128)
    plans = halotile.plan(vae, shape, 4)
    sizes = sorted(plan.predicted_bytes for plan in plans)
    assert all(plan.predicted_bytes <= sizes[1] for plan in halotile.plan(vae, shape, 4, sizes[1]))
    with pytest.raises(PlanError, match=r"the least is (\d+)") as raised:
        halotile.plan(vae, shape, 4, 1000)
    least = int(str(raised.value).split("the least is ")[1].split(",")[0])
    assert [plan.predicted_bytes for plan in halotile.plan(vae, shape, 4, least)] == [least]


def test_memory_is_that_of_the_window_or_of_the_picture_if_that_is_smaller() -> None:
    """M1: a window that exceeds the picture holds no more than the picture."""
    vae, shape = tiny.build("AutoencoderKL"), (1, 4, 64, 40)
    asked = halotile.price_window(vae, shape, 1, (512, 1024), (0, 0))
    whole = halotile.price_window(vae, shape, 1, (512, 320), (0, 0))
    assert (asked.tiles, asked.predicted_bytes) == (1, whole.predicted_bytes)
    assert halotile.price_window(vae, shape, 1, (256, 320), (64, 0)).predicted_bytes < whole.predicted_bytes


def test_a_loop_over_frames_is_priced() -> None:
    vae = tiny.build("AutoencoderKLHunyuanVideo")
    channels = tiny.latent("AutoencoderKLHunyuanVideo").shape[1]
    shape = (1, channels, 12, 32, 32)
    vae.use_framewise_decoding = False
    still = halotile.price_window(vae, shape, 2, (128, 256), (32, 0))
    vae.use_framewise_decoding = True
    window, stride = (n // vae.temporal_compression_ratio for n in (16, 12))
    vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 16, 12
    looped = halotile.price_window(vae, shape, 2, (128, 256), (32, 0))
    frames = sum(min(window + 1, 12 - start) for start in range(0, 12, stride))
    assert looped.decoded_ratio == still.decoded_ratio * Fraction(frames, 12)
    assert looped.predicted_bytes < still.predicted_bytes


@pytest.mark.parametrize("shape", [(4, 64, 64), (1, 4, 64, 0), (1, 4, 64, 64.0), (1, 4, 3, 64, 64, 1), ()])
def test_shapes_that_are_none(shape) -> None:
    with pytest.raises(PlanError, match="it must be B C H W or B C F H W"):
        halotile.plan(tiny.build("AutoencoderKL"), shape, 2)


def test_refusals_name_the_reason() -> None:
    vae = tiny.build("AutoencoderKL")
    with pytest.raises(PlanError, match="not whole latents"):
        halotile.price_window(vae, (1, 4, 64, 64), 2, (250, 256), (64, 64))
    with pytest.raises(PlanError, match="ranks"):
        halotile.plan(vae, (1, 4, 64, 64), 0)
    with pytest.raises(PlanError, match="decode it whole"):
        halotile.plan(vae, (1, 4, 8, 8), 2)
    with pytest.raises(UnsupportedError, match="no row"):
        halotile.plan(torch.nn.Linear(1, 1), (1, 4, 64, 64), 2)
    plan = halotile.price_window(vae, (1, 4, 64, 64), 2, (256, 256), (64, 64))
    wan = tiny.build("AutoencoderKLLTX2Video")
    held = dict(vars(wan))
    with pytest.raises(PlanError, match="AutoencoderKLLTX2Video cannot have the tiles of 'asked'"):
        halotile.apply_tile_plan(wan, halotile.price_window(vae, (1, 4, 64, 64), 2, (24, 24), (8, 8)))
    assert vars(wan) == held
    halotile.apply_tile_plan(vae, plan)


def _plan_alone(group):
    """Rank 0 plans on a parallelized VAE, the other does not; both then decode."""
    vae, z = tiny.build("AutoencoderKL"), tiny.latent("AutoencoderKL")
    with halotile.parallelize(vae, group, "tile") as handle:
        if group.rank() == 0:
            assert halotile.plan(vae, (1, 4, 64, 64), 2)
        vae.decode(z)
        return handle.report.calls


def test_planning_on_a_parallelized_vae_is_no_call_of_its_group(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path))
    first, second = run_ranks(_plan_alone, 2)
    assert first == second


def test_a_shape_plan_after_strips_has_an_overlap_again() -> None:
    vae = tiny.build("AutoencoderKLWan_2.1")
    halotile.apply_tile_plan(vae, halotile.plan(vae, shape_of("AutoencoderKLWan_2.1", 64, 32), 2)[0])
    shape = halotile.tile_shape_plan(vae, 256, 256)
    assert shape["tile_sample_stride_width"] < 256


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderKLHunyuanVideo15"])
def test_the_classs_own_way_of_setting_a_window_is_heard_after_a_rectangle(kind: str) -> None:
    vae, fresh = tiny.build(kind), tiny.build(kind)
    halotile.apply_tile_plan(vae, halotile.plan(vae, shape_of(kind, 64, 48), 3)[-1])
    ratio = family_of(vae).ratio(vae)
    names = ["size"] if hasattr(vae, "tile_sample_min_size") else ["height", "width"]
    own = {f"tile_sample_min_{name}": 16 * ratio for name in names}
    if kind == "AutoencoderKL":
        halotile.families.set_window(vae, 16 * ratio, 12 * ratio)
        halotile.families.set_window(fresh, 16 * ratio, 12 * ratio)
    else:
        for each in (vae, fresh):
            halotile.enable_tiling(each, tile_overlap_factor=0.25, **own)
    tilings = [
        halotile.families.loop_tilings(each, (16 * ratio,) * 2, (4 * ratio,) * 2, (64 * ratio, 48 * ratio))
        for each in (vae, fresh)
    ]
    assert tilings[0] == tilings[1]
    assert {name: value for name, value in vars(vae).items() if name.startswith("tile_")} == {
        name: value for name, value in vars(fresh).items() if name.startswith("tile_")
    }


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tile_overlap_factor": float("nan")},
        {"tile_overlap_factor": 2.0},
        {"tile_overlap_factor": -0.5},
        {"tile_sample_min_size": float("nan")},
        {"tile_sample_min_size": -8},
        {"tile_sample_min_size": (64, 0)},
    ],
)
def test_numbers_that_cannot_be_are_not_set(plan) -> None:
    vae = tiny.build("AutoencoderKL")
    before = dict(vars(vae))
    with pytest.raises(PlanError, match=r"of the plan is|the plan is empty"):
        halotile.apply_tile_plan(vae, plan)
    assert vars(vae) == before

"""Which strategy when: the rule and its numbers, without ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import tiny_vaes as tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

import halotile
from halotile import PlanError, Ranks, UnsupportedError
from halotile.decode.calibrate import rates_from
from halotile.decode.rates import DEFAULTS, keep_rates, rates_key, rates_of
from halotile.decode.workload import CPU_ATTENTION, Workload, measure, workload_of
from halotile.planning.situation import Rates, Situation, tiles_of
from halotile.planning.strategy import decide

RATES = Rates(1e10, 0.001, 1.1, 0.0005, 1e9, "made up")
# 64 x 64 latents of a network with 1e6 operations and 4 kB a latent
WHOLE = Situation(
    ranks=2, shape_lat=(64, 64), flops=(0.0, 1e6, 0.0), peak=((0.0, 4000.0, 0.0),), exchanges=40, result_bytes=786432
)
# a window of 32, a stride of 24
TILED = replace(WHOLE, tiling=True, tiles=tiles_of((32, 32, 16), (32, 32, 16)))


def _names(decision, refused: bool) -> list[str]:
    return [each.name for each in decision.predictions if bool(each.refused) == refused]


# --- the rule


def test_tiles_are_dealt_where_a_ranks_rows_are_more_than_a_tile() -> None:
    decision = decide(TILED, RATES)
    assert decision.strategy == "tile"
    (shard,) = (each for each in decision.predictions if each.strategy == "shard")
    assert shard.refused == "32 x 64 latents of a rank are more than the 1024 of the largest tile"
    assert "tile, 9 tiles, predicted" in decision.reason


def test_the_height_split_replaces_tiling_where_a_ranks_rows_fit_one_tile() -> None:
    decision = decide(replace(TILED, ranks=4), RATES)
    assert decision.strategy == "shard"
    assert "16 of 64 latent rows a rank" in decision.reason
    # also where the picture is too small to pay for the messages
    small = replace(TILED, flops=(0.0, 1.0, 0.0), ranks=4)
    assert decide(small, RATES).strategy == "shard"
    assert _names(decide(small, RATES), refused=True) == ["serial", "tile"]
    # at the border: 17 rows of 64 are more than 32 x 32
    assert "17 x 64" in next(
        each.refused for each in decide(replace(TILED, ranks=4, shape_lat=(65, 64)), RATES).predictions[1:2]
    )


def test_without_tiling_rows_are_dealt_if_that_pays() -> None:
    assert decide(WHOLE, RATES).strategy == "shard"
    assert decide(replace(WHOLE, shape_lat=(8, 8), result_bytes=12288), RATES).strategy == "serial"
    # 3 rows are fewer than 2 ranks of 2
    thin = replace(WHOLE, shape_lat=(3, 512), min_rows=2)
    assert decide(thin, RATES).strategy == "serial"
    assert decide(replace(thin, min_rows=1), RATES).strategy == "shard"
    assert _names(decide(WHOLE, RATES), refused=True) == ["tile"]


def test_a_window_that_clears_the_picture_is_no_tiling() -> None:
    assert decide(replace(WHOLE, tiling=True, tiles=()), RATES) == replace(
        decide(WHOLE, RATES), situation=replace(WHOLE, tiling=True)
    )


def test_one_rank_runs_it_as_it_is() -> None:
    for situation in (WHOLE, TILED):
        decision = decide(replace(situation, ranks=1), RATES)
        assert (decision.strategy, len(decision.predictions)) == ("serial", 1)


def test_hybrid_is_for_fewer_tiles_than_ranks() -> None:
    two = replace(TILED, shape_lat=(32, 48), tiles=((32, 32), (32, 24)), ranks=4, min_rows=9)
    assert [each.name for each in decide(two, RATES).predictions] == [
        "serial", "shard", "tile", "hybrid, 2 shards a tile", "hybrid, 4 shards a tile",
    ]  # fmt: skip
    assert all("hybrid" not in each.name for each in decide(TILED, RATES).predictions)
    few = next(each.refused for each in decide(two, RATES).predictions if each.shards_per_tile == 4)
    assert few == "32 latent rows are fewer than 4 ranks of 9"
    assert decide(two, RATES).predictions[4].refused == "32 rows of the thinnest tile are too few for 4 ranks"


def test_no_way_holds_more_than_the_budget_and_else_the_least_runs() -> None:
    whole, half = 64 * 64 * 4000, 32 * 64 * 4000
    assert decide(replace(WHOLE, budget_bytes=whole), RATES).strategy == "shard"
    known = replace(WHOLE, tiles=TILED.tiles, budget_bytes=half - 1)
    decision = decide(known, RATES)
    assert decision.strategy == "tile", "tiling is off, but nothing else fits"
    assert str(half) in decision.predictions[1].refused
    nothing = decide(replace(known, budget_bytes=1), RATES)
    assert (nothing.strategy, "nothing is predicted to fit 1 bytes" in nothing.reason) == ("tile", True)
    assert decide(replace(WHOLE, no_tile="made up", budget_bytes=1), RATES).strategy == "shard"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_of_all_that_may_run_the_fastest_is_taken(ranks: int) -> None:
    shapes = [(height, width) for height in (1, 8, 30, 64, 90, 200) for width in (8, 64, 160, 300, 512)]
    chosen = set()
    for shape in shapes:
        for tiled in (False, True):
            sides = [[min(32, side - start) for start in range(0, side, 24)] for side in shape]
            situation = replace(WHOLE, ranks=ranks, shape_lat=shape, tiling=tiled, tiles=tiles_of(*sides))
            decision = decide(situation, RATES)
            allowed = [each for each in decision.predictions if not each.refused]
            assert decision.best in allowed
            assert decision.best.seconds == min(each.seconds for each in allowed)
            chosen.add(decision.strategy)
    assert chosen >= ({"serial", "shard", "tile"} if ranks > 1 else {"serial"})


# --- its numbers


def test_rates_are_checked() -> None:
    for name, bad in (("flops_per_s", 0), ("bytes_per_s", math.inf), ("slowdown", 0.5), ("exchange_s", -1)):
        with pytest.raises(PlanError, match=f"{name} must be"):
            replace(RATES, **{name: bad})
    with pytest.raises(PlanError, match="ranks"):
        replace(WHOLE, ranks=0)


def test_a_workload_is_that_of_any_size() -> None:
    """Predicted operations and bytes of a decode of 24 x 40 latents against those that it makes."""
    for name in ("AutoencoderKL", "AutoencoderKLLTX2Video"):
        vae, z = tiny.build(name), tiny.latent(name)
        big = torch.zeros(*z.shape[:-2], 24, 40)
        counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
        with torch.no_grad(), counter:
            made = vae.decode(big).sample
        work = measure(vae, "decode", tuple(z.shape))
        cells = 24 * 40
        counted = counter.get_total_flops()
        assert counted == pytest.approx(work.flops[1] * cells + work.flops[2] * cells**2, rel=1e-6)
        assert made.numel() * 4 == round(work.result * cells)
        assert work.exchanges > 10


def test_workloads_are_measured_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path))
    vae = tiny.build("AutoencoderKL")
    first = workload_of(vae, "decode", (1, 4, 16, 16))
    # `halotile.decode` is the function, too
    module = sys.modules["halotile.decode.workload"]
    monkeypatch.setattr(module, "measure", lambda *args: pytest.fail("measured again"))
    assert workload_of(vae, "decode", (1, 4, 99, 99)) == first
    assert (tmp_path / "workloads.json").exists()


def test_rates_are_kept_for_a_class_and_dtype(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path))
    vae, cpu = tiny.build("AutoencoderKL"), torch.device("cpu")
    assert "not measured" in rates_of(vae, cpu).source
    keep_rates(vae, cpu, RATES)
    assert rates_of(vae, cpu) == RATES
    assert "not measured" in rates_of(tiny.build("AutoencoderTiny"), cpu).source
    (tmp_path / "rates.json").write_text('{"%s": {"flops_per_s": -1}}' % rates_key(vae, cpu))  # noqa: UP031
    assert "not measured" in rates_of(vae, cpu).source
    assert rates_of(vae, torch.device("meta")).flops_per_s == DEFAULTS["cpu"].flops_per_s


def test_rates_explain_the_seconds_they_come_from() -> None:
    """1e9 operations a second, 10 ms a call; sharded 1.25 times as slow, and 2 ms for each of 5 places."""
    work = Workload((0.0, 1e6, 0.0), 5, 1.0)
    seconds = {"serial small": 0.11, "serial large": 0.41}
    seconds |= {"shard small": 0.02 + 1.25 * 0.05, "shard large": 0.02 + 1.25 * 0.2}
    rates = rates_from(work, 2, (10, 10), (20, 20), seconds, 0.1, "made up", RATES)
    assert rates.flops_per_s == pytest.approx(1e9)
    assert rates.call_s == pytest.approx(0.01)
    assert rates.slowdown == pytest.approx(1.25)
    assert rates.exchange_s == pytest.approx(0.002)
    # out of order, as on a busy machine: no fixed part
    odd = rates_from(work, 2, (10, 10), (20, 20), dict.fromkeys(seconds, 0.4), 0.1, "made up", RATES)
    assert (odd.flops_per_s, odd.call_s) == (1e9, 0.0)


# --- explain


def test_m3_a_dense_mask_is_seen_and_tiles_are_taken() -> None:
    """HunyuanVideo, 1280 x 720 px, 16 latent frames at once: the causal mask is 230400 x 230400, 198 GiB in float32."""
    vae = tiny.build("AutoencoderKLHunyuanVideo")
    vae.use_framewise_decoding = False
    decision = halotile.explain(vae, (1, 4, 16, 90, 160), 2, memory_budget_bytes=80 * 10**9)
    by_name = {each.name: each for each in decision.predictions}
    peak = by_name["serial"].peak_bytes
    assert peak is not None
    assert peak > 198 * 2**30
    assert all(by_name[name].refused.endswith("a rank may hold 80000000000") for name in ("serial", "shard"))
    assert decision.strategy == "tile"


def test_explain_says_every_number(monkeypatch) -> None:
    vae = tiny.build("AutoencoderKL")
    vae.enable_tiling()
    decision = halotile.explain(vae, (1, 4, 96, 96), 2)
    assert decision.situation.tiling
    plain = decision.to_dict()
    assert {"best", "reason", "predictions", "situation", "rates"} == plain.keys()
    assert decision.strategy in decision.reason
    with pytest.raises(PlanError, match="latent_shape is"):
        halotile.explain(vae, (4, 96, 96), 2)
    encode = halotile.explain(vae, (1, 3, 768, 768), 2, half="encode")
    assert encode.situation.shape_lat == (768 // 2 ** (len(vae.config.block_out_channels) - 1),) * 2


def test_a_long_clip_is_followed_in_a_few_frames() -> None:
    """Operations of 9 latent frames of Wan, and of five windows of Hunyuan's loop, against those that are made."""
    for name, frames in (("AutoencoderKLWan_2.1", 9), ("AutoencoderKLHunyuanVideo", 15)):
        vae, z = tiny.build(name), tiny.latent(name)
        shape = (*z.shape[:2], frames, 16, 16)
        situation = halotile.explain(vae, shape, 2).situation
        whole = measure(vae, "decode", shape)
        # the first frame of Wan makes one picture and not four, and costs a little more than a fourth
        assert situation.flops[1] == pytest.approx(whole.flops[1], rel=0.05)
        assert situation.exchanges == pytest.approx(whole.exchanges, rel=0.1)


def test_what_cannot_be_explained_or_calibrated() -> None:
    vae = tiny.build("AutoencoderKL")
    for wrong, said in (
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": "2"}, "ranks is '2'"),
        ({"half": "foo"}, "half='foo'"),
        ({"memory_budget_bytes": -5}, "memory_budget_bytes is -5"),
        ({"latent_shape": None}, "latent_shape is NoneType"),
    ):
        with pytest.raises(PlanError, match=said):
            halotile.explain(vae, **{"latent_shape": (1, 4, 8, 8), "ranks": 2, **wrong})
    for shape, repeats, said in (
        ((4, 8, 8), 1, "must be B C H W"),
        ((1, 4, 1, 8), 1, "too small: give at least 2 x 2"),
        ((1,), 0, "repeats"),
    ):
        with pytest.raises(PlanError, match=said):
            halotile.calibrate(vae, shape, Ranks.alone(), repeats=repeats)
    for call in (halotile.explain, halotile.calibrate):
        with pytest.raises(UnsupportedError, match="Linear has no row"):
            call(torch.nn.Linear(2, 2), (1, 4, 8, 8), *([2] if call is halotile.explain else []))


def test_one_rank_says_nothing_of_sharding(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path))
    vae = tiny.build("AutoencoderKL")
    rates = halotile.calibrate(vae, (1, 4, 8, 8), Ranks.alone(), repeats=1)
    assert (rates.slowdown, rates.exchange_s) == (DEFAULTS["cpu"].slowdown, DEFAULTS["cpu"].exchange_s)
    assert "sharding by defaults" in rates.source
    assert rates_of(vae, torch.device("cpu")) == rates
    monkeypatch.setenv("HALOTILE_CACHE", "/dev/null/below")
    with pytest.warns(UserWarning, match="could not be kept"):
        halotile.calibrate(vae, (1, 4, 8, 8), Ranks.alone(), repeats=1)


def test_results_count_as_memory_where_they_come_together() -> None:
    """A rank's rows of a large result are few, but the result is not."""
    large = replace(WHOLE, result_bytes=10**9, ranks=16)
    shard = decide(large, RATES).predictions[1]
    assert (shard.strategy, shard.peak_bytes) == ("shard", 3 * 10**9)
    assert decide(replace(large, budget_bytes=10**9), RATES).predictions[1].refused
    tiled = decide(replace(TILED, result_bytes=10**9), RATES).predictions
    assert all(each.peak_bytes > 3 * 10**9 for each in tiled if each.strategy in ("serial", "tile"))

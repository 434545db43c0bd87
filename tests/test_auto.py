"""`strategy="auto"` on ranks: all choose alike, from what each has, and run what they chose."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial

import pytest
import tiled
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile import MismatchError, Ranks
from halotile.comm import run_virtual
from halotile.decode.auto import offer_of
from halotile.decode.options import Options
from halotile.decode.rates import DEFAULTS, keep_rates, rates_key

KL, LTX2 = "AutoencoderKL", "AutoencoderKLLTX2Video"
# so slow that every message pays, and so fast that none does
SLOW = replace(DEFAULTS["cpu"], flops_per_s=1e6, call_s=0.0, source="made up: slow")
FAST = replace(DEFAULTS["cpu"], flops_per_s=1e15, source="made up: fast")
CPU = torch.device("cpu")


def _decoded(group, name, tiling, height, width, rates):
    """One auto decode with these rates a rank, and the plain ones."""
    vae = tiled.build_tiled(name)
    vae.use_tiling = tiling
    x = tiled.tiled_input(name, "decode", height=height, width=width)
    mine, before = rates[torch.distributed.get_rank(group)], os.environ["HALOTILE_CACHE"]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["HALOTILE_CACHE"] = folder
        try:
            if mine is not None:
                keep_rates(vae, CPU, mine)
            with halotile.parallelize(vae, group) as handle:
                out = vae.decode(x, return_dict=False)[0]
        finally:
            os.environ["HALOTILE_CACHE"] = before
        loop = vae.decode(x, return_dict=False)[0]
        vae.use_tiling = False
        whole = vae.decode(x, return_dict=False)[0]
    return handle.report, float((out - whole).abs().max()), torch.equal(out, loop)


@pytest.mark.parametrize(
    ("tiling", "height", "width", "rates", "strategy", "exactness"),
    [
        (True, 10, 7, FAST, "shard", "allclose"),
        (True, 20, 14, FAST, "tile", "bitwise"),
        (False, 20, 14, SLOW, "shard", "allclose"),
        (False, 20, 14, FAST, "serial", "bitwise"),
    ],
)
@pytest.mark.parametrize("name", [KL, LTX2])
def test_each_rule_runs_what_it_says(name, tiling, height, width, rates, strategy, exactness) -> None:
    results = run_ranks(_decoded, 2, name, tiling, height, width, (rates, rates))
    for report, error, same in results:
        assert (report.strategy, report.exactness) == (strategy, exactness)
        assert report.reason.startswith(f"auto: {strategy}")
        assert report.predicted_seconds > 0
        assert report.predicted_bytes > 0
        # float32 rounding of the sharded decode, as in test_shard_families.py
        assert error < 2e-5 if strategy == "shard" else same
    assert len({report.predicted_seconds for report, *_ in results}) == 1


def test_ranks_with_other_rates_choose_alike_by_the_first_ones() -> None:
    for rates, strategy in (((SLOW, FAST), "shard"), ((FAST, SLOW), "serial"), ((None, SLOW), "serial")):
        results = run_ranks(_decoded, 2, KL, False, 20, 14, rates)
        assert [report.strategy for report, *_ in results] == [strategy] * 2


def _budgets(group, budgets):
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode", height=20, width=14)
    vae.use_tiling = False
    module = sys.modules["halotile.decode.auto"]
    original = module.budget_of
    module.budget_of = lambda device, ranks: budgets[torch.distributed.get_rank(group)]
    try:
        with torch.no_grad(), halotile.parallelize(vae, group) as handle:
            vae.decode(x)
    finally:
        module.budget_of = original
    return handle.report


def test_the_least_memory_of_all_ranks_counts() -> None:
    for budgets, strategy in (((10**9, 10**9), "serial"), ((10**9, 1), "tile"), ((None, 10**9), "serial")):
        reports = run_ranks(_budgets, 2, budgets)
        assert [report.strategy for report in reports] == [strategy] * 2
        assert ("nothing is predicted to fit 1 bytes" in reports[0].reason) == (strategy == "tile")


def _disagree(group):
    rank, x = torch.distributed.get_rank(group), tiled.tiled_input(KL, "decode", height=20, width=14)
    vae = tiled.build_tiled(KL)
    with torch.no_grad(), pytest.raises(MismatchError, match="strategy: rank 0 has auto, rank 1 has tile"):
        halotile.decode(vae, x, group, "tile" if rank else "auto")
    if rank:
        halotile.families.set_window(vae, 32, 16)
    with torch.no_grad(), pytest.raises(MismatchError, match="plan: rank 0 has 20 x 14 latents, 20 tiles"):
        halotile.decode(vae, x, group)


def test_ranks_that_ask_for_something_else_do_not_start() -> None:
    run_ranks(_disagree, 2)


def test_it_is_the_best_of_what_may_run_on_thirty_shapes(monkeypatch, tmp_path) -> None:
    """What all ranks settle on is the least predicted way that `explain` does not refuse, for 1, 2, 4 and 8 ranks.

    That a call then runs it is tested above, and here for a few of the shapes.
    """
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path))
    vaes = [tiled.build_tiled(KL) for _ in range(8)]
    keep_rates(vaes[0], CPU, replace(DEFAULTS["cpu"], flops_per_s=1e8, source="made up"))
    shapes = [(1, 4, height, width) for height in (2, 5, 9, 14, 20) for width in (3, 8, 13)]
    chosen, ran = set(), set()
    for ranks in (1, 2, 4, 8):
        for shape in shapes:
            for tiling in (False, True):
                for vae in vaes:
                    vae.use_tiling = tiling
                allowed = [each for each in halotile.explain(vaes[0], shape, ranks).predictions if not each.refused]
                best = min(allowed, key=lambda each: each.seconds)
                chosen.add(best.strategy)
                if ranks == 1:
                    assert best.strategy == "serial"
                    continue
                if (best.strategy, ranks) in ran:
                    offers = run_virtual(ranks, partial(_offered, vaes[0], shape))
                    asides = [offer.aside for offer in offers]
                    assert {offer.settle(asides).best for offer in offers} == {best}, (ranks, shape, tiling)
                    continue
                ran.add((best.strategy, ranks))
                assert run_virtual(ranks, partial(_ran, vaes, shape)) == [best.strategy] * ranks, (ranks, shape, tiling)
    assert chosen == {"serial", "shard", "tile", "hybrid"}
    assert {strategy for strategy, _ in ran} == chosen


def _offered(vae, shape, transport):
    return offer_of(vae, "decode", torch.zeros(shape), Options(), Ranks(transport))


def _ran(vaes, shape, transport):
    vae = vaes[transport.rank]
    with torch.no_grad(), halotile.parallelize(vae, Ranks(transport)) as handle:
        vae.decode(torch.zeros(shape))
    return handle.report.strategy


def test_what_is_said_aside_is_json() -> None:
    vae = tiny.build(KL)

    def work(transport):
        return offer_of(vae, "decode", torch.zeros(1, 4, 8, 8), Options(), Ranks(transport))

    offer = run_virtual(2, work)[0]
    assert offer is not None
    assert json.loads(offer.aside)["rates"] == asdict(offer.rates)
    assert rates_key(vae, CPU).startswith("AutoencoderKL float32 on ")
    assert work(Ranks.alone().transport) is None


def _calibrated(group, repeats):
    rank, vae = torch.distributed.get_rank(group), tiny.build(KL)
    with pytest.raises(MismatchError, match="repeats: rank 0 has 1, rank 1 has 2"):
        halotile.calibrate(vae, (1, 4, 16, 16), group, repeats=1 + rank)
    with pytest.raises(halotile.RemoteRankError if rank == 0 else halotile.PlanError, match="too small"):
        halotile.calibrate(vae, (1, 4, 1, 1) if rank else (1, 4, 16, 16), group, repeats=repeats)
    return halotile.calibrate(vae, (1, 4, 16, 16), group, repeats=repeats)


def test_ranks_calibrate_together_or_not_at_all() -> None:
    first, second = run_ranks(_calibrated, 2, 1)
    assert first == second
    assert "with 2 ranks" in first.source

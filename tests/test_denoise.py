"""`TiledDenoiser` over real ranks: one result, one `all_reduce`, and errors that all ranks raise."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from denoised import DiT, identity, placed, places, tiling, values
from ranks import run_ranks
from torch import nn

from halotile import GradientError, MismatchError, PlanError, RemoteRankError, TiledDenoiser, UnsupportedError
from halotile.comm import Ranks

GRID = (2, 12, 16)
EXTRA = [(-1, 0, 0), (1, 7, 3), (0, 0, 0), (9, 0, 0)]
# 1 to 16 tiles, fewer than ranks among them
TILINGS = [
    tiling((1, 0), (1, 0), (1, 0)),
    tiling((1, 0), (2, 3), (1, 0)),
    tiling((1, 0), (1, 0), (3, 2)),
    tiling((2, 0), (2, 2), (2, 2)),
    tiling((1, 0), (4, 6), (4, 6)),
]


class _Counted:
    """Every `all_reduce` of this process, whatever its group."""

    def __enter__(self):
        self.original, self.calls = dist.all_reduce, 0

        def counting(*args, **kwargs):
            self.calls += 1
            return self.original(*args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_):
        dist.all_reduce = self.original


def _forwards(group, deterministic, scheduler="balanced", dtype=torch.float32):
    tokens, positions = values(GRID, len(EXTRA), batch=2, dtype=dtype), places(GRID, EXTRA, batch=2)
    model = DiT().to(dtype)
    results = []
    for tiles in TILINGS:
        denoiser = TiledDenoiser(
            lambda x, p, **_: model(x + p.to(dtype).sum((1, 3))[..., None] / 64, p),
            tiles,
            group,
            deterministic=deterministic,
            scheduler=scheduler,
        )
        with _Counted() as counted:
            results.append((denoiser(tokens, positions, grid=GRID), denoiser.report.drift, denoiser.report.loads))
        assert denoiser.report.all_reduces == int(denoiser.report.tiles > 1)
        # virtual ranks have no collectives of torch
        assert isinstance(group, Ranks) or counted.calls == denoiser.report.all_reduces
        # two agreements of the ranks and one reduction, or nothing at all
        assert denoiser.report.collectives == (3 if denoiser.report.tiles > 1 else 0)
    return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("scheduler", ["balanced", "round_robin"])
def test_every_rank_has_the_result_of_one_rank(n, scheduler):
    alone = _forwards(Ranks.alone(), False)
    for result in run_ranks(_forwards, n, False, scheduler):
        for (got, drift, loads), (expected, drift_alone, _) in zip(result, alone, strict=True):
            # the order of a sum of at most 16 float32 numbers of around 1
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            assert drift == pytest.approx(drift_alone, rel=1e-4)
            assert len(loads) == n
    first = run_ranks(_forwards, n, False, scheduler)
    for result in first[1:]:
        for (got, drift, _), (expected, drift_first, _) in zip(result, first[0], strict=True):
            assert torch.equal(got, expected)
            assert drift == drift_first


def test_a_group_without_global_rank_0():
    alone = _forwards(Ranks.alone(), False)
    for result in run_ranks(_forwards, 2, False, members=(1, 3)):
        for (got, _, _), (expected, _, _) in zip(result, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_is_the_same_bits_for_every_number_of_ranks(dtype):
    alone = _forwards(Ranks.alone(), True, "balanced", dtype)
    for n in (2, 3, 4):
        for result in run_ranks(_forwards, n, True, "balanced", dtype):
            for (got, drift, _), (expected, drift_alone, _) in zip(result, alone, strict=True):
                assert got.dtype == dtype
                assert torch.equal(got, expected)
                assert drift == drift_alone


def test_both_ways_of_summing_agree():
    summed, slots = _forwards(Ranks.alone(), False), _forwards(Ranks.alone(), True)
    for (a, drift_a, _), (b, drift_b, _) in zip(summed, slots, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert drift_a == pytest.approx(drift_b, rel=1e-4)


def _loads(group, scheduler):
    extra = [(0, 0, 0)] * 20
    denoiser = TiledDenoiser(identity, tiling((1, 0), (4, 0), (1, 0)), group, scheduler=scheduler)
    denoiser(values((1, 12, 4), 20), places((1, 12, 4), extra), grid=(1, 12, 4))
    return denoiser.report.loads


def test_tiles_are_dealt_by_what_attention_costs():
    # the first tile has all the conditioning tokens: 32 in all, which cost 32^2, more than the three others of 12
    assert run_ranks(_loads, 2, "balanced") == [(32, 36)] * 2
    assert run_ranks(_loads, 2, "round_robin") == [(44, 24)] * 2


def test_one_tile_is_the_plain_model():
    model, tokens, positions = DiT(), values(GRID), places(GRID, scale=(1.0, 0.5, 3.0))
    positions += 3
    denoiser = TiledDenoiser(model, TILINGS[0], Ranks.alone())
    with torch.no_grad():
        assert torch.equal(denoiser(tokens, positions, grid=GRID), model(tokens, positions))
    assert (denoiser.report.tiles, denoiser.report.all_reduces, denoiser.drift) == (1, 0, [0.0])
    # no video: nothing to tile
    assert TiledDenoiser(lambda *args, **kwargs: (args, kwargs), TILINGS[1], Ranks.alone())(None, None, a=1) == (
        (None, None),
        {"a": 1},
    )


def _alone_of_four(group, tiles):
    """One rank makes calls that are its own, the others do not: nobody waits."""
    tokens, positions = values(GRID), places(GRID)
    if dist.get_rank(group) == 2:
        TiledDenoiser(DiT(), TILINGS[0], group)(tokens, positions, grid=GRID)
        TiledDenoiser(identity, tiles, group)(None, None)
    # nor is the group out of step afterwards
    return TiledDenoiser(identity, tiles, group)(tokens, positions, grid=GRID)


def test_one_tile_and_no_video_exchange_nothing():
    for got in run_ranks(_alone_of_four, 4, TILINGS[1]):
        torch.testing.assert_close(got, values(GRID), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_attention_that_fits_in_the_overlap_is_as_it_was_without_tiles(overlap):
    # two blocks that look one cell far see two cells
    model, grid = DiT(reach=1), (1, 16, 20)
    tokens, positions = values(grid, depth=4), places(grid)
    tiles = tiling((1, 0), (2, overlap), (2, overlap))
    with torch.no_grad():
        whole = model(tokens, positions)
    got = TiledDenoiser(model, tiles, Ranks.alone())(tokens, positions, grid=grid)
    from halotile.denoise import plan_tokens

    shared = plan_tokens(grid, tiles, None, 320).shared
    cores = torch.ones(320, dtype=torch.bool)
    cores[shared] = False
    assert 100 < int(cores.sum()) < 320
    error = (got - whole).abs()[:, cores].max()
    if overlap >= 2:
        # rounding of sums over another number of masked keys, of values around 1
        assert error < 1e-5
    else:
        assert error > 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_drift_is_the_mean_squared_disagreement(deterministic):
    grid, tiles = (1, 12, 4), tiling((1, 0), (2, 4), (1, 0))
    denoiser = TiledDenoiser(
        lambda x, p: x * 0 + p[:, 1].amax() - 8, tiles, Ranks.alone(), normalize_positions=False,
        deterministic=deterministic,
    )  # fmt: skip
    got = denoiser(values(grid), places(grid), grid=grid)
    # rows 0 to 8 and 4 to 12: tiles predict 0 and 4, and over the shared rows there is a ramp of fifths
    assert denoiser.report.drift == pytest.approx(16, rel=1e-5)
    torch.testing.assert_close(got[0, ::4, 0], torch.tensor([0.0] * 4 + [0.8, 1.6, 2.4, 3.2] + [4.0] * 4))
    denoiser(values(grid), places(grid), grid=grid)
    assert len(denoiser.drift) == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_drift_of_what_is_not_finite_is_not_small(bad, deterministic):
    denoiser = TiledDenoiser(lambda x, p: x * bad, TILINGS[1], Ranks.alone(), deterministic=deterministic)
    denoiser(values(GRID), places(GRID), grid=GRID)
    assert denoiser.report.drift != denoiser.report.drift


def test_drifts_of_the_last_forwards_are_kept(monkeypatch):
    from halotile.denoise import tiled

    monkeypatch.setattr(tiled, "_REMEMBERED", 3)
    for tiles in TILINGS[:2]:
        denoiser = TiledDenoiser(placed, tiles, Ranks.alone())
        for _ in range(5):
            denoiser(values(GRID), places(GRID), grid=GRID)
        assert denoiser.drift == [denoiser.report.drift] * 3


@pytest.mark.parametrize("prediction", ["velocity", "sample"])
def test_a_token_that_no_tile_keeps_is_neutral(prediction):
    tokens, positions = values(GRID, len(EXTRA)), places(GRID, EXTRA)
    denoiser = TiledDenoiser(lambda x, p: x + 1, TILINGS[1], Ranks.alone(), prediction=prediction)
    got = denoiser(tokens, positions, grid=GRID)
    assert denoiser.report.unkept == 1
    assert torch.equal(got[:, -1], torch.zeros(1, 4) if prediction == "velocity" else tokens[:, -1])
    torch.testing.assert_close(got[:, :-1], tokens[:, :-1] + 1)


def _sound(group, audio, deterministic):
    """A model whose answer to audio tells where it was told that the audio is, and where the video ends."""
    tokens, positions = values((4, 4, 4)), places((4, 4, 4), scale=(0.5, 1.0, 1.0))
    heard, times = torch.ones(1, 5, 2), torch.arange(5.0).view(1, 1, 5, 1).repeat(1, 1, 1, 2)

    def model(x, p, audio, audio_positions, name):
        assert name == "kept"
        return x, audio * (audio_positions[0, 0, :, :1] + 100 * p[:, 0].amin())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        denoiser = TiledDenoiser(model, tiling((2, 0), (1, 0), (2, 0)), group, audio=audio, deterministic=deterministic)
        for _ in range(2):
            with _Counted() as counted:
                video, sound = denoiser(
                    tokens, positions, grid=(4, 4, 4), audio=heard, audio_positions=times, name="kept"
                )
            assert counted.calls == denoiser.report.all_reduces == (2 if audio == "average" else 1)
    torch.testing.assert_close(video, tokens)
    return sound, [str(each.message) for each in caught]


@pytest.mark.parametrize("deterministic", [False, True])
def test_audio_goes_through_every_tile_and_is_averaged(deterministic):
    for n in (1, 3, 4):
        results = run_ranks(_sound, n, "average", deterministic)
        for rank, (sound, said) in enumerate(results):
            # two tiles begin at 0 s, two at 1 s: the audio is where the tile's video is
            torch.testing.assert_close(sound[0, :, 0], torch.arange(5.0) - 0.5)
            assert torch.equal(sound, results[0][0])
            assert len(said) == (rank == 0)
            assert not said or "not a meaningful latent" in said[0]


def _sound_bits(group):
    def model(x, p, audio):
        return x, audio * x.mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        denoiser = TiledDenoiser(model, TILINGS[4], group, deterministic=True)
        return denoiser(values(GRID), places(GRID), grid=GRID, audio=torch.full((1, 5, 2), 1.1))[1]


def test_deterministic_audio_is_the_same_bits_for_every_number_of_ranks():
    alone = _sound_bits(Ranks.alone())
    for n in (2, 3, 4):
        for sound in run_ranks(_sound_bits, n):
            assert torch.equal(sound, alone)


def test_frozen_audio_is_left_as_it_is():
    for sound, said in run_ranks(_sound, 2, "frozen", False):
        # no velocity
        assert torch.equal(sound, torch.zeros(1, 5, 2))
        assert not said


@pytest.mark.parametrize("tiles", TILINGS[:2])
@pytest.mark.parametrize("prediction", ["velocity", "sample"])
def test_frozen_audio_follows_one_rule_for_one_tile_and_for_many(tiles, prediction):
    tokens, heard = values(GRID), torch.ones(1, 5, 2)
    denoiser = TiledDenoiser(
        lambda x, p, audio: (x * 2, audio + 9), tiles, Ranks.alone(), audio="frozen", prediction=prediction
    )
    video, sound = denoiser(tokens, places(GRID), grid=GRID, audio=heard)
    assert torch.equal(sound, heard if prediction == "sample" else torch.zeros_like(heard))
    if tiles is TILINGS[0]:
        assert torch.equal(video, tokens * 2)


def _warned(group, sigmas, limit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        denoiser = TiledDenoiser(identity, TILINGS[1], group, **({} if limit is None else {"first_sigma_limit": limit}))
        for sigma in sigmas:
            denoiser(values(GRID), places(GRID), grid=GRID, sigma=sigma)
    return [str(each.message) for each in caught], dist.get_rank()


@pytest.mark.parametrize(
    ("sigmas", "limit", "times"),
    [
        ((1.0, 0.9), None, 1),
        ((1.0, 1.0), None, 1),
        ((torch.tensor([0.96]), 0.5), None, 1),
        ((0.909375, 1.0), None, 0),
        ((0.5,), 0.4, 1),
        ((900.0,), None, 0),
    ],
)
def test_the_first_rank_warns_once_of_a_first_stage(sigmas, limit, times):
    # the first rank of the group is global rank 1
    for said, rank in run_ranks(_warned, 2, sigmas, limit, members=(1, 3)):
        assert len(said) == (times if rank == 1 else 0)
        if said:
            assert "first stage full-frame" in said[0]
            assert "negative frame index" in said[0]


def _fails(group):
    tokens, positions = values(GRID), places(GRID)
    fails = dist.get_rank(group) == 1

    def model(x, p):
        if fails:
            raise ValueError("out of luck")
        return x

    denoiser = TiledDenoiser(model, TILINGS[3], group)
    said = []
    try:
        denoiser(tokens, positions, grid=GRID)
    except RemoteRankError as error:
        said.append((error.rank, error.kind, error.remote_message))
    fails = False
    got = denoiser(tokens, positions, grid=GRID)
    return said, torch.allclose(got, tokens, atol=1e-6), len(denoiser.drift)


def test_a_rank_that_fails_is_an_error_on_all_and_the_next_forward_is_right():
    for result in run_ranks(_fails, 3):
        assert result == ([(1, "ValueError", "out of luck")], True, 1)


def _differ(group):
    return {what: _differs(group, what) for what in ("grid", "tiling", "dtype", "kept", "deterministic", "arguments")}


def _differs(group, what):
    odd = dist.get_rank(group) == 1
    grid = (2, 12, 15) if odd and what == "grid" else GRID
    tiles = TILINGS[2] if odd and what == "tiling" else TILINGS[1]
    dtype = torch.float64 if odd and what == "dtype" else torch.float32
    extra = [(0, 0, 0)] if not (odd and what == "kept") else [(0, 11, 0)]
    options = {"deterministic": odd} if what == "deterministic" else {}
    more = {"guide": values(grid, 1)} if odd and what == "arguments" else {}
    denoiser = TiledDenoiser(identity, tiles, group, **options)
    try:
        denoiser(values(grid, 1, dtype=dtype), places(grid, extra), grid=grid, **more)
    except MismatchError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_agree_are_told_before_any_work():
    for told in run_ranks(_differ, 2):
        for what, said in told.items():
            assert f"{what}: rank 0 has" in said


def _one_refuses(group):
    """One rank's arguments are refused before it meets the others."""
    positions = places(GRID)
    bad = dist.get_rank(group) == 0
    try:
        TiledDenoiser(identity, TILINGS[1], group)(values(GRID), positions[..., :1] if bad else positions, grid=GRID)
    except (PlanError, RemoteRankError) as error:
        return type(error).__name__
    return ""


def test_a_rank_that_cannot_begin_is_not_waited_for():
    assert run_ranks(_one_refuses, 2, timeout=30) == ["PlanError", "RemoteRankError"]


def _steps(group, tiles):
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[0.8, 0.6, 0.4, 0.2])
    taken = []
    step = scheduler.step
    scheduler.step = lambda *args, **kwargs: taken.append(1) or step(*args, **kwargs)
    latents = values(GRID)
    denoiser = TiledDenoiser(placed, tiles, group)
    for time in scheduler.timesteps:
        # every tile is at the same step: the scheduler sees one prediction, the blend of all
        prediction = denoiser(latents, places(GRID), grid=GRID, sigma=time / 1000)
        latents = scheduler.step(prediction, time, latents).prev_sample
    return latents, len(taken), scheduler.step_index, len(denoiser.drift)


def test_a_scheduler_with_a_state_steps_once_on_the_blend():
    expected = _steps(Ranks.alone(), TILINGS[3])
    for latents, taken, index, drifts in run_ranks(_steps, 3, TILINGS[3]):
        assert (taken, index, drifts) == (4, 4, 4)
        torch.testing.assert_close(latents, expected[0], rtol=1e-5, atol=1e-5)


def test_gradients_are_refused():
    denoiser = TiledDenoiser(DiT(), TILINGS[1], Ranks.alone())
    tokens, positions = values(GRID), places(GRID)
    for arguments in (
        ((tokens.requires_grad_(), positions), {}),
        ((tokens.detach(), positions), {"context": [torch.ones(1, requires_grad=True)]}),
    ):
        with pytest.raises(GradientError, match=r"torch\.no_grad"):
            denoiser(*arguments[0], grid=GRID, **arguments[1])
    with torch.no_grad():
        assert not denoiser(tokens, positions, grid=GRID).requires_grad


class _WithConfig(DiT):
    config = "as it was"

    @property
    def dtype(self):
        return self.inside.weight.dtype

    def to(self, *args, **kwargs):
        self.moved = True
        return super().to(*args, **kwargs)


def test_it_stands_in_for_the_model_and_leaves_it_as_it_was():
    model = _WithConfig().eval()
    before, names = {**vars(model)}, list(model.state_dict())
    denoiser = TiledDenoiser(model, TILINGS[1], Ranks.alone())
    assert isinstance(denoiser, nn.Module)
    assert (denoiser.config, denoiser.dtype, denoiser.reach) == ("as it was", torch.float32, None)
    assert not denoiser.training
    assert list(denoiser.state_dict()) == names
    denoiser.load_state_dict(model.state_dict())
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = denoiser.other
    assert vars(model) == before
    assert denoiser.to(torch.float64) is denoiser
    assert model.moved
    assert denoiser.model is model
    assert denoiser.dtype == torch.float64
    tokens = values(GRID, dtype=torch.float64)
    assert denoiser(tokens, places(GRID).double(), grid=GRID).dtype == torch.float64
    report = denoiser.report.to_dict()
    assert (report["tiles"], report["grid"], report["tokens"]) == (2, GRID, 384)


def test_a_deep_copy_has_a_model_of_its_own_and_the_same_ranks():
    denoiser = TiledDenoiser(DiT(), TILINGS[1], Ranks.alone())
    made = copy.deepcopy(denoiser)
    assert made.ranks is denoiser.ranks
    assert made.model is not denoiser.model
    expected = denoiser(values(GRID), places(GRID), grid=GRID)
    assert torch.equal(made(values(GRID), places(GRID), grid=GRID), expected)
    with torch.no_grad():
        made.model.outside.weight.zero_()
    assert torch.equal(denoiser(values(GRID), places(GRID), grid=GRID), expected)
    with pytest.raises(UnsupportedError, match="cannot be pickled or saved"):
        pickle.dumps(denoiser)


def test_further_keywords_with_one_entry_a_token_can_be_named():
    def model(x, p, mine):
        return x + mine

    tokens, mine = values(GRID), 2 * values(GRID)
    named = TiledDenoiser(model, TILINGS[1], Ranks.alone(), per_token=["mine"])
    torch.testing.assert_close(named(tokens, places(GRID), grid=GRID, mine=mine), tokens + mine)
    with pytest.raises(RemoteRankError, match="must match the size"):
        TiledDenoiser(model, TILINGS[1], Ranks.alone())(tokens, places(GRID), grid=GRID, mine=mine)

"""`TiledDataParallelBuilder`: models called with (video, audio, perturbations), as LTX-2's are."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from denoised import places, tiling, values
from ranks import run_ranks

from halotile import PlanError, TiledDataParallelBuilder, UnsupportedError
from halotile.comm import Ranks

GRID = (4, 6, 8)
EXTRA = [(-1, 0, 0), (1, 5, 3), (50, 0, 0)]
TOTAL = 192 + len(EXTRA)
TILES = tiling((2, 1), (1, 0), (3, 2))
TOOLS = SimpleNamespace(grid=GRID)


@dataclass(frozen=True)
class _Modality:
    """The fields of LTX-2's."""

    latent: torch.Tensor
    sigma: torch.Tensor
    timesteps: torch.Tensor
    positions: torch.Tensor
    context: torch.Tensor
    enabled: bool = True
    attention_mask: torch.Tensor | None = None
    keyframes_mask: torch.Tensor | None = None


def video():
    return _Modality(
        latent=values(GRID, len(EXTRA), batch=2),
        sigma=torch.tensor([0.5, 0.5]),
        timesteps=torch.arange(2.0 * TOTAL).view(2, TOTAL) / TOTAL / 2,
        positions=places(GRID, EXTRA, batch=2, scale=(0.5, 32.0, 32.0)),
        # a text of as many tokens as the video
        context=torch.rand(2, TOTAL, 3),
        attention_mask=torch.arange(float(TOTAL))[None, :, None] - torch.arange(float(TOTAL))[None, None],
        keyframes_mask=torch.arange(float(TOTAL)).view(1, TOTAL, 1),
    )


def audio():
    times = torch.arange(7.0).view(1, 1, 7, 1).repeat(2, 1, 1, 2)
    return _Modality(torch.ones(2, 7, 3), torch.tensor([0.5, 0.5]), torch.ones(2, 7), times, torch.rand(2, 5, 3))


class _Model(torch.nn.Module):
    """What comes out shows which tokens came in, and that what belongs to them came along."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, video, audio, perturbations=None):
        self.calls.append((video, audio))
        assert perturbations == "as given"
        sound = None if audio is None or not audio.enabled else audio.latent * audio.positions[:, 0, :, :1]
        if video is None:
            return None, sound
        index = video.keyframes_mask[0, :, 0]
        assert torch.equal(video.attention_mask[0], index[:, None] - index[None])
        assert video.context.shape[1] == TOTAL
        return video.latent * 2 + video.timesteps[..., None] + index[:, None], sound


class _Inner:
    def __init__(self):
        self.given = None

    def build(self, **given):
        self.given = given
        return _Model()


def _made(model):
    return SimpleNamespace(build=lambda **_: model)


def _built(group=None, inner=None, **options):
    builder = TiledDataParallelBuilder(inner or _Inner(), Ranks.alone() if group is None else group, TILES, **options)
    return builder.build(video_tools=TOOLS)


def _forward(group, heard):
    reports = []
    model = _built(group, tracker=reports.append)
    sound = {"yes": audio(), "no": None, "disabled": replace(audio(), enabled=False)}[heard]
    before = model.ranks.counters.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model(video(), sound, "as given")
    assert [report.all_reduces for report in reports] == [2 if heard == "yes" else 1]
    # besides them only the two agreements
    assert model.ranks.counters.since(before).collectives == 2 + reports[0].all_reduces
    return made, model.report.loads


@pytest.mark.parametrize("heard", ["yes", "no", "disabled"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_rank_has_the_predictions_of_the_whole(n, heard):
    whole = video()
    expected = whole.latent * 2 + whole.timesteps[..., None] + torch.arange(float(TOTAL))[:, None]
    # no tile keeps the last token, and the model predicts samples: its own value
    expected[:, -1] = whole.latent[:, -1]
    results = run_ranks(_forward, n, heard)
    for (seen, sound), loads in results:
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(seen, results[0][0][0])
        # 3 + 2 frames, 6 rows, 4 + 4 + 4 columns; one reference in all six tiles, one token in two
        assert (sum(loads), len(loads)) == (5 * 6 * 12 + 6 + 2, n)
        if heard == "yes":
            # tiles of frames [0, 3) and [2, 4) begin at 0 s and 1 s, half of the six each
            torch.testing.assert_close(sound[0, :, 0], torch.arange(7.0) - 0.5)
        else:
            assert sound is None


def test_tiles_are_told_positions_from_zero_and_audio_moves_along():
    model = _built(audio="frozen")
    _, sound = model(video(), audio(), perturbations="as given")
    assert torch.equal(sound, audio().latent)
    assert len(model.calls) == 6
    for number, (tile, heard) in enumerate(model.calls):
        generated = int((tile.keyframes_mask[0] < 192).sum())
        assert torch.equal(tile.positions[:, :, :generated, 0].amin(-1), torch.zeros(2, 3))
        assert tile.sigma.tolist() == [0.5, 0.5]
        assert torch.equal(heard.positions, audio().positions - (number >= 3) * 1.0)
    still = _built(audio="frozen", normalize_positions=False)
    still(video(), audio(), "as given")
    assert all(torch.equal(heard.positions, audio().positions) for _, heard in still.calls)
    assert still.calls[5][0].positions[0, 0, 0, 0] == 1


def _without_video(group):
    model = _built(group)
    before = model.ranks.counters.snapshot()
    if dist.get_rank(group) == 1:
        _, sound = model(None, audio(), "as given")
        assert torch.equal(sound, audio().latent * audio().positions[:, 0, :, :1])
        model(replace(video(), enabled=False), audio(), "as given")
    assert model.ranks.counters.since(before).collectives == 0
    return len(model.calls), model.report


def test_without_video_the_model_runs_as_it_is():
    assert run_ranks(_without_video, 2) == [(0, None), (2, None)]


def test_build_hands_on_what_it_is_given():
    inner = _Inner()
    builder = TiledDataParallelBuilder(inner, Ranks.alone(), TILES, registry="kept")
    model = builder.build(torch.device("cpu"), torch.bfloat16, video_tools=TOOLS, more=1)
    assert inner.given == {"device": torch.device("cpu"), "dtype": torch.bfloat16, "registry": "kept", "more": 1}
    assert isinstance(model.model, _Model)
    assert model.options.prediction == "sample"
    builder.build(video_tools=TOOLS)
    assert inner.given == {"registry": "kept"}


def test_a_builder_that_takes_a_registry_and_a_tracker_that_builds():
    class WithRegistry(_Inner):
        def with_registry(self, registry):
            self.registry = registry
            return self

    class Tracker:
        def build(self, inner, **given):
            self.given = given
            return inner.build()

    inner, tracker = WithRegistry(), Tracker()
    model = TiledDataParallelBuilder(inner, Ranks.alone(), TILES, "kept", tracker).build("cpu", video_tools=TOOLS)
    assert (inner.registry, inner.given, tracker.given) == ("kept", {}, {"device": "cpu"})
    model(video(), None, "as given")
    assert model.report.tiles == 6


def test_the_grid_comes_from_the_tools():
    shape = SimpleNamespace(frames=4, height=12, width=8)
    tools = SimpleNamespace(target_shape=shape, patchifier=SimpleNamespace(patch_size=(1, 2, 1)))
    builder = TiledDataParallelBuilder(_Inner(), Ranks.alone(), TILES)
    model = builder.build(video_tools=tools)
    model(video(), None, "as given")
    assert model.report.grid == GRID
    with pytest.raises(PlanError, match="needs video_tools"):
        builder.build()
    assert builder.build(video_tools=SimpleNamespace(grid=[*GRID]))._grid == GRID
    shape.height = 11
    with pytest.raises(PlanError, match="not whole patches"):
        builder.build(video_tools=tools)
    for wrong in (SimpleNamespace(), SimpleNamespace(grid=(4, 6)), SimpleNamespace(grid=[4, 6, 0])):
        with pytest.raises(PlanError, match="give no grid of tokens"):
            builder.build(video_tools=wrong)


def test_what_cannot_be_is_refused():
    with pytest.raises(UnsupportedError, match=r"has no build\(\)"):
        TiledDataParallelBuilder(object(), Ranks.alone(), TILES)
    with pytest.raises(UnsupportedError, match="give a TileCountConfig"):
        TiledDataParallelBuilder(_Inner(), Ranks.alone(), 4)
    with pytest.raises(UnsupportedError, match="neither be called"):
        TiledDataParallelBuilder(_Inner(), Ranks.alone(), TILES, tracker=3)
    model = _built()
    with pytest.raises(UnsupportedError, match="must be a dataclass with a latent"):
        model(torch.zeros(1, 2, 3), None, "as given")
    with pytest.raises(PlanError, match=r"video.positions of 195 tokens must be B 3 195 2"):
        model(replace(video(), positions=video().positions[..., 0]), None, "as given")
    with pytest.raises(PlanError, match=r"with 2 or 1 for B, got \(3, 3, 195, 2\)"):
        model(replace(video(), positions=places(GRID, EXTRA, batch=3)), None, "as given")
    with pytest.raises(PlanError, match=r"video.positions must be a tensor B 3 195 2, got NoneType"):
        model(replace(video(), positions=None), None, "as given")
    with pytest.raises(UnsupportedError, match="audio is a _Modality without a latent"):
        model(video(), replace(audio(), latent=None), "as given")
    model = _built(inner=_made(lambda video, audio: (None, audio.latent)), audio="frozen")
    with pytest.raises(UnsupportedError, match="the model returned a NoneType for the video"):
        model(video(), audio())
    model = _built(inner=_made(lambda video, audio: [video.latent, None]))
    with pytest.raises(UnsupportedError, match=r"predictions, but this one returned a list"):
        model(video(), None)


@dataclass(frozen=True)
class _Bare:
    latent: torch.Tensor
    positions: torch.Tensor
    strength: torch.Tensor


def test_a_video_without_timesteps_and_with_a_field_of_its_own():
    inner = _made(lambda video, audio: (video.latent * video.strength, None))
    model = _built(inner=inner, per_token=("strength",))
    given = _Bare(values(GRID), places(GRID), torch.rand(1, 192, 1))
    made, sound = model(given, None)
    torch.testing.assert_close(made, given.latent * given.strength)
    assert sound is None
    assert model.report.sigma is None


@pytest.mark.parametrize("prediction", ["velocity", "sample"])
def test_frozen_audio_is_left_as_it_is(prediction):
    for tiles in (TILES, tiling((1, 0), (1, 0), (1, 0))):
        builder = TiledDataParallelBuilder(_Inner(), Ranks.alone(), tiles, audio="frozen", prediction=prediction)
        _, sound = builder.build(video_tools=TOOLS)(video(), audio(), "as given")
        assert torch.equal(sound, audio().latent * (prediction == "sample"))

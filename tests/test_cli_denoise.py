"""`halotile demo --denoise` as people run it, on a small picture: what it writes, what it prints, and who agrees."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from test_cli import in_process, on_the_pool  # noqa: F401 - a fixture

import halotile
from halotile.cli.demo_dit import DiTConfig, PhotoDiT, from_tokens, grid_positions, load_dit, to_tokens
from halotile.cli.denoising import LAYOUTS, STUDIES
from halotile.cli.media import read_image
from halotile.errors import PlanError
from halotile.planning.tilings import DimensionTilingConfig, TileCountConfig

DATA = Path(halotile.__file__).parent / "data" / "photo_dit"
SMALL = ("--denoise", "--side", "128", "--steps", "2", "--sigmas", "0.5")
NUMBER = r"(-?[\d.]+|nan|-?inf)"


def numbers(text: str, layout: str) -> list[tuple[float, float]]:
    """Drift and PSNR of each row of `layout`, in the order of the studies; the whole frame has no drift: 0."""
    rows = [line for line in text.splitlines() if re.search(rf"│ {layout} +│", line)]
    found = []
    for row in rows:
        *_, drift, psnr_db = (cell.strip() for cell in row.strip("│ ").split("│"))
        found.append((float(drift or 0), float(psnr_db)))
    return found


@pytest.mark.usefixtures("on_the_pool")
def test_demo_of_denoising_on_one_rank_and_on_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert in_process("demo", *SMALL, "--ranks", "1", "--out", str(one)) == 0
    told_by_one = capsys.readouterr().out
    assert in_process("demo", *SMALL, "--ranks", "2", "--out", str(two)) == 0
    told_by_two = capsys.readouterr().out
    assert "NO" not in told_by_two
    assert told_by_two.count(" yes ") == len(STUDIES) * len(LAYOUTS)
    for layout in ("whole frame", *(layout.name for layout in LAYOUTS)):
        # the last digits may differ
        alone, together = numbers(told_by_one, layout), numbers(told_by_two, layout)
        assert len(alone) == len(together) == len(STUDIES)
        for (drift, psnr_db), (drift_2, psnr_db_2) in zip(alone, together, strict=True):
            assert math.isfinite(drift)
            assert psnr_db > 15  # a picture, no noise
            assert drift_2 == pytest.approx(drift, abs=2e-5)
            assert psnr_db_2 == pytest.approx(psnr_db, abs=0.02)
            assert (drift > 0) == (layout != "whole frame")
    for folder in (one, two):
        assert read_image(folder / "whole.png").shape == read_image(folder / "tiled.png").shape == (1, 3, 128, 128)
        assert read_image(folder / "denoise.png").shape[-1] > 1900
    # eight bits round the last digits away nearly everywhere
    assert (read_image(one / "tiled.png") - read_image(two / "tiled.png")).abs().max() <= 2 / 127
    assert not torch.equal(read_image(one / "tiled.png"), read_image(one / "whole.png"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--steps", "3"), "--steps 3 would be ignored"),
        (("--denoise", "--sigmas", "0.5;1"), "--sigmas '0.5;1' is not"),
        (("--denoise", "--sigmas", "1.5", "--ranks", "1"), "--sigmas 1.5: a first sigma is above 0 and at most 1"),
        (
            ("--denoise", "--side", "200", "--ranks", "1"),
            "--side 200: pixels along the picture's side, a multiple of 16",
        ),
    ],
)
def test_settings_that_cannot_be(
    given: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process("demo", *given, "--out", str(tmp_path)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rotary", "absolute"])
def test_the_models_that_ship(name: str) -> None:
    assert sum(file.stat().st_size for file in (DATA / name).iterdir()) < 3_000_000
    model = load_dit(DATA / name)
    latents = torch.randn(2, 16, 8, 12)
    tokens = to_tokens(latents, model.config)
    # a mean and a scale taken off and put on again
    torch.testing.assert_close(from_tokens(tokens, (1, 4, 6), model.config), latents, rtol=1e-5, atol=1e-5)
    positions = grid_positions((1, 4, 6)).expand(2, -1, -1, -1)
    moved = positions + torch.tensor([0.0, 20.0, 30.0])[:, None, None]
    here, there = model(tokens, positions, 0.5, tokens), model(tokens, moved, 0.5, tokens)
    assert here.shape == tokens.shape
    # rotations see differences only: the same but for the rounding of their angles
    assert torch.allclose(here, there, atol=1e-4) == (name == "rotary")


def test_a_token_sees_its_own_guide_when_tiled() -> None:
    model = load_dit(DATA / "rotary")
    tokens, guide = torch.randn(2, 1, 64, 64).unbind()
    guide[:, :32] += 3
    one = DimensionTilingConfig()
    tiling = TileCountConfig(one, DimensionTilingConfig(2, 0), one)
    denoiser = halotile.TiledDenoiser(model, tiling)
    positions = grid_positions((1, 8, 8))
    tiled = denoiser(tokens, positions, grid=(1, 8, 8), sigma=0.5, guide=guide)
    upper, lower = (
        model(tokens[:, half], positions[:, :, half], 0.5, guide[:, half]) for half in (slice(32), slice(32, 64))
    )
    # the lower half's positions begin at zero in the tile: rounding of the rotations' angles
    torch.testing.assert_close(tiled, torch.cat([upper, lower], dim=1), rtol=1e-4, atol=1e-4)


def test_refusals_of_the_model() -> None:
    with pytest.raises(PlanError, match="positions='fixed'"):
        DiTConfig("fixed", (0.0,), (1.0,), (1.0,))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="width=100 with heads=4: a head has 32 channels"):
        DiTConfig("rotary", (0.0,), (1.0,), (1.0,), width=100)
    model = PhotoDiT(DiTConfig("rotary", (0.0,), (1.0,), (1.0,)))
    with pytest.raises(PlanError, match="their last dim must be 4"):
        model(torch.zeros(1, 4, 8), grid_positions((1, 2, 2)), 0.5)

"""What ships with the library, and the main job on it: a real photograph and a real clip over real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import halotile
from halotile.cli.media import read_image, read_video
from halotile.verify import psnr_db

DATA = Path(halotile.__file__).parent / "data"
MEGABYTE = 1_000_000


def test_what_ships_has_the_size_that_it_should() -> None:
    def model_bytes(name: str) -> int:
        return sum(file.stat().st_size for file in (DATA / name).iterdir())

    assert model_bytes("photo_vae") <= 6 * MEGABYTE
    assert model_bytes("video_vae") <= 8 * MEGABYTE
    with Image.open(DATA / "photo.jpg") as photo:
        assert photo.width * photo.height >= MEGABYTE
    clip, _ = read_video(DATA / "clip.mp4")
    assert clip.shape[2] >= 33
    assert clip.shape[-1] >= 480
    assert clip.shape[-2] >= 320
    for name in ("MODEL_CARD.md", "LICENSES.md"):
        assert (DATA / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_main_job_runs_on_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halotile.cli", "demo", "--ranks", "2", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bitwise equal") == 2
    photo_db, clip_db = (float(number) for number in re.findall(r"([\d.]+) dB", done.stdout))
    # neither was seen in training: see the model card
    assert photo_db >= 24
    assert clip_db >= 21
    # what was printed is what was written, but for eight bits and H.264
    assert psnr_db(read_image(tmp_path / "photo.png"), read_image(DATA / "photo.jpg")) == pytest.approx(
        photo_db, abs=0.1
    )
    written, original = read_video(tmp_path / "clip.mp4")[0], read_video(DATA / "clip.mp4")[0]
    assert psnr_db(written, original) == pytest.approx(clip_db, abs=1.0)
    with Image.open(tmp_path / "side_by_side.png") as sheet:
        assert sheet.width > 1000

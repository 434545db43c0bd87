"""`halotile decode --grid`: frames written while later ones are decoded; alone, with a fleet, under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_cli import TORCHRUN, Bench, bench, fails, in_process, out, spawned  # noqa: F401 - fixtures

import halotile
from halotile.cli.media import read_video

VIDEO_VAE = Path(halotile.__file__).parent / "data" / "video_vae"
GRID = ("--grid", "1x2x2", "--grid-overlap", "0x2x2")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    # a kernel's rounding depends on how many threads share its work
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_clip_is_the_same_alone_with_a_fleet_and_under_torchrun(bench: Bench, out: Path) -> None:  # noqa: F811
    decode = ("decode", bench.clip_latent, "--vae", bench.video_vae)
    made = {name: out / f"{name}.mp4" for name in ("alone", "fleet", "torchrun")}
    assert in_process(*decode, "-o", str(made["alone"]), *GRID) == 0
    fleet = spawned(*decode, "-o", str(made["fleet"]), *GRID, "--ranks", "2")
    assert (fleet.returncode, fleet.stderr) == (0, "")
    run = spawned("-m", "halotile.cli", *decode, "-o", str(made["torchrun"]), *GRID, command=TORCHRUN)
    assert run.returncode == 0, run.stderr
    clips = [read_video(path) for path in made.values()]
    assert all(torch.equal(clip, clips[0][0]) for clip, _ in clips)
    # what was encoded: 4 frames of 38 x 60 px, 12 a second
    assert (tuple(clips[0][0].shape), clips[0][1]) == ((1, 3, 4, 38, 60), 12)


def test_a_picture_on_a_grid_and_tiles_within_tiles(
    bench: Bench,  # noqa: F811
    out: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    decode = ("decode", bench.photo_latent, "--vae", bench.image_vae)
    assert in_process(*decode, "-o", str(out / "a.png"), *GRID) == 0
    assert in_process(*decode, "-o", str(out / "b.png"), *GRID, "--tile", "16", "--stride", "8") == 0
    two = ("-o", str(out / "c.png"), "--ranks", "2")
    assert in_process(*decode, *two, *GRID, "--tile", "16", "--stride", "8") == 0
    assert capfd.readouterr().err == ""  # of the workers, too
    assert (out / "b.png").read_bytes() == (out / "c.png").read_bytes() != (out / "a.png").read_bytes()


def test_what_cannot_be_is_one_line(bench: Bench, fails, out: Path) -> None:  # noqa: F811
    decode = ("decode", bench.clip_latent, "--vae", bench.video_vae, "-o", str(out / "a.mp4"))
    bad = {
        ("--grid", "2x2"): "--grid '2x2' is not FxHxW",
        ("--grid", "0x2x2"): "num_tiles",
        ("--grid-overlap", "0x1x1"): "--grid-overlap 0x1x1 needs --grid",
        ("--grid", "1x2x2", "--strategy", "shard"): "--grid 1x2x2 would be ignored",
        ("--grid", "1x99x1"): "99",
    }
    for arguments, said in bad.items():
        assert said in fails(*decode, *arguments), arguments
    assert not any(out.iterdir())


def test_what_cannot_be_is_one_line_with_a_fleet_too(
    bench: Bench,  # noqa: F811
    out: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    decode = ("decode", bench.clip_latent, "--vae", bench.video_vae, "-o", str(out / "a.mp4"))
    capfd.readouterr()
    assert in_process(*decode, "--grid", "1x99x1", "--ranks", "2") == 2
    shown, said = capfd.readouterr()  # of the workers, too
    assert (shown, said.count("\n")) == ("", 1)
    assert "99" in said
    assert not any(out.iterdir())


def test_ctrl_c_in_the_middle_leaves_no_process_and_no_half_file(tmp_path: Path) -> None:
    save_file({"latents": torch.randn(1, 32, 61, 40, 48)}, tmp_path / "latent.safetensors")
    decode = ["decode", "latent.safetensors", "--vae", str(VIDEO_VAE), "-o", "clip.mp4", "--grid", "20x1x1"]
    command = [*TORCHRUN, "-m", "halotile.cli", *decode]
    program = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    # the clip is written beside its place, and moved there when it is whole
    while len(list(tmp_path.iterdir())) == 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (tmp_path / "clip.mp4").exists()
    os.killpg(program.pid, signal.SIGINT)
    assert program.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == ["latent.safetensors"]

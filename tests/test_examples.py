"""The scripts of examples/ on tiny pipelines of random weights, started by torchrun as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import av
import pytest
from PIL import Image

# diffusers makes its pipelines only where it is installed
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"
TOLERANCE = 1e-5
"""Of values from 0 to 1: half of that of a sharded decode, whose values are from -1 to 1."""


def _run(out: Path, script: str, ranks: int, *options: str) -> dict[int, str]:
    """What each rank printed. What the script makes is `out`."""
    logs = out.parent / "logs"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # a file a rank: on one stream their lines would mix
    launch += ["--redirects", "1", "--log-dir", str(logs)]
    done = subprocess.run(
        [*launch, str(EXAMPLES / script), "--tiny", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {int(log.parent.name): log.read_text() for log in logs.glob("*/attempt_0/*/stdout.log")}


def _said(printed: dict[int, str], pattern: str) -> dict[int, str]:
    """What matches in the line `rank N: ...` of each rank that has such a line."""
    found = {rank: re.search(rf"^rank {rank}: {pattern}$", text, re.MULTILINE) for rank, text in printed.items()}
    return {rank: match[1] for rank, match in found.items() if match}


def test_image_pipeline(tmp_path):
    """With guidance, "pil" and "np", models offloaded; the group is an axis of a mesh."""
    out = tmp_path / "image.png"
    printed = _run(out, "image_pipeline.py", 2, "--compare", "--offload", "--strategy", "tile")
    assert _said(printed, "(tile, tiles 12, ranks 2)").keys() == {0, 1}
    assert _said(printed, "largest difference from one rank (.*)") == {0: "0", 1: "0"}
    with Image.open(out) as image:
        assert image.size == (128, 192)


@pytest.mark.slow
def test_wan_video_with_a_group_that_is_not_the_world(tmp_path):
    """Rank 0 is not of the group: it stops at latents, and the others are exact without it."""
    out = tmp_path / "wan.mp4"
    printed = _run(out, "wan_video.py", 3, "--compare", "--vae-group", "1", "2", "--tile", "48", "32")
    assert _said(printed, r"latents (\(.*\))") == {0: "(4, 3, 12, 8)"}
    assert _said(printed, "(tile, tiles 6, ranks 2)").keys() == {1, 2}
    assert _said(printed, "largest difference from one rank (.*)") == {1: "0", 2: "0"}
    assert _streams(out) == {"video": (64, 96)}


def test_ltx2_video_with_sound(tmp_path):
    """Guidance by one forward of two samples; the clip is decoded untiled, each rank its rows."""
    out = tmp_path / "ltx2.mp4"
    printed = _run(out, "ltx2_audio_video.py", 2, "--compare", "--offload")
    assert _said(printed, "(shard, tiles 1, ranks 2)").keys() == {0, 1}
    differences = _said(printed, "largest difference from one rank (.*)")
    assert differences.keys() == {0, 1}
    assert max(map(float, differences.values())) <= TOLERANCE
    assert _said(printed, "the same sound (.*)") == {0: "True", 1: "True"}
    assert _streams(out) == {"video": (128, 192), "audio": None}


def test_tiled_denoising(tmp_path):
    out = tmp_path / "large.png"
    printed = _run(out, "tiled_denoising.py", 2)
    drifts = _said(printed, "192 x 128, drift (.*) at last")
    assert drifts.keys() == {0, 1}
    assert drifts[0] == drifts[1]
    assert not drifts[0].startswith("0 ")
    with Image.open(out) as image:
        assert image.size == (192, 128)


def _streams(path: Path) -> dict[str, tuple[int, int] | None]:
    with av.open(str(path)) as container:
        return {
            stream.type: (stream.width, stream.height) if stream.type == "video" else None
            for stream in container.streams
        }

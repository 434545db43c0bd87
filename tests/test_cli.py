"""The command as people run it: files in, files out, exit codes, and one line where it cannot be done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file

import halotile
from halotile.cli import demo, launch, spread, verify
from halotile.cli.latents import read_latents
from halotile.cli.main import run
from halotile.cli.media import read_image, read_video, write_image, write_video

SOURCES = str(Path(halotile.__file__).parents[1])
COMMAND = [sys.executable, "-m", "halotile.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# the class's tiles are 32 px every 24: 3 x 2 of them on the picture below
TILES = ("--tile", "32", "--stride", "24")


@dataclass(frozen=True)
class Bench:
    """Tiny VAEs with random weights, a picture and a clip of odd sizes, and their latents."""

    folder: Path
    image_vae: str
    video_vae: str
    photo: str
    clip: str
    photo_latent: str
    clip_latent: str


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
    ).save_pretrained(folder / "image_vae")
    diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        downsample_type=("spatiotemporal", "temporal"),
        decoder_block_out_channels=(8, 8),
        decoder_layers_per_block=(1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True),
        upsample_type=("temporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(2, 1),
        decoder_causal=False,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    ).save_pretrained(folder / "video_vae")
    write_image(folder / "photo.png", torch.rand(1, 3, 61, 47) * 2 - 1)
    write_video(folder / "clip.mp4", torch.rand(1, 3, 4, 38, 60) * 2 - 1, Fraction(12))
    names = ("image_vae", "video_vae", "photo.png", "clip.mp4", "photo.safetensors", "clip.safetensors")
    made = Bench(folder, *(str(folder / name) for name in names))
    for source, vae, latent in (
        (made.photo, made.image_vae, made.photo_latent),
        (made.clip, made.video_vae, made.clip_latent),
    ):
        assert in_process("encode", source, "--vae", vae, "-o", latent) == 0
    return made


def in_process(*arguments: str) -> int:
    """The exit code of the command, run in this process, where it costs no start."""
    before, sys.argv = sys.argv, ["halotile", *arguments]
    try:
        run()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    return 0


def spawned(*arguments: str, command: list[str] = COMMAND, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [*command, *arguments], env=environment(**variables), capture_output=True, text=True, timeout=120, check=False
    )


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": SOURCES, **variables}


@pytest.fixture
def on_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of `--ranks` are those of `ranks.py`, which are there already, and not some that the command starts.

    For what the ranks do; that they are started, and what they say when they fail, is tested with real ones.
    """

    def on_ranks_that_are_there(work: Callable[..., Any], ranks: int, device: str | None, arguments: Any) -> Any:
        return run_ranks(_seated, ranks, work, *arguments)[0]

    monkeypatch.setattr(launch, "_start_local_ranks", on_ranks_that_are_there)


def _seated(group: dist.ProcessGroup, work: Callable[..., Any], *arguments: Any) -> Any:
    return work(launch.Seat(dist.get_rank(group), dist.get_world_size(group), group, torch.device("cpu")), *arguments)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, which must exit with 2 and one line on stderr; returns the line."""

    def check(*arguments: str) -> str:
        capsys.readouterr()
        assert in_process(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("halotile: ")
        assert shown.err.count("\n") == 1
        return shown.err

    return check


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder that must hold no half-written file afterwards."""
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".") or ".part" in path.name] == []


def test_a_picture_goes_through_and_keeps_its_size(bench: Bench, out: Path) -> None:
    latents, source = read_latents(Path(bench.photo_latent))
    assert latents.shape == (1, 4, 16, 12)  # 61 x 47 padded to 64 x 48, ratio 4
    assert (source.height_px, source.width_px, source.vae_class) == (61, 47, "AutoencoderKL")

    alone, shared = out / "alone.png", out / "shared.png"
    assert in_process("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(alone), *TILES) == 0
    done = spawned("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(shared), "--ranks", "2", *TILES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")  # nobody watches: nothing to say
    assert read_image(shared).shape == (1, 3, 61, 47)
    assert shared.read_bytes() == alone.read_bytes()

    untiled = out / "untiled.png"
    assert in_process("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(untiled)) == 0
    assert untiled.read_bytes() != alone.read_bytes(), "the tiles must have made a difference"


def test_a_clip_goes_through_and_keeps_its_size_and_rate(bench: Bench, out: Path) -> None:
    latents, source = read_latents(Path(bench.clip_latent))
    assert latents.shape == (1, 4, 2, 5, 8)  # 4 frames padded to 1 + 4, 38 x 60 to 40 x 64; ratios 4 and 8
    assert (source.frames, source.fps) == (4, 12)

    shared = out / "shared.safetensors"
    done = spawned(
        "encode", bench.clip, "--vae", bench.video_vae, "-o", str(shared), "--ranks", "2", "--strategy", "serial"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert torch.equal(read_latents(shared)[0], latents)

    clip = out / "clip.mp4"
    assert in_process("decode", str(shared), "--vae", bench.video_vae, "-o", str(clip), *TILES) == 0
    pixels, fps = read_video(clip)
    assert (pixels.shape, fps) == ((1, 3, 4, 38, 60), 12)
    assert in_process("decode", str(shared), "--vae", bench.video_vae, "-o", str(clip), "--fps", "29.97") == 0
    assert read_video(clip)[1] == Fraction(2997, 100)


def test_encoding_in_tiles_differs_from_encoding_whole(bench: Bench, out: Path) -> None:
    tiled = out / "a.safetensors"
    assert in_process("encode", bench.photo, "--vae", bench.image_vae, "-o", str(tiled), *TILES) == 0
    found = read_latents(tiled)[0]
    assert found.shape == (1, 4, 16, 12)
    assert not torch.equal(found, read_latents(Path(bench.photo_latent))[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_precisions(bench: Bench, out: Path, dtype: str) -> None:
    latent, picture = str(out / "a.safetensors"), str(out / "a.png")
    options = ("--vae", bench.image_vae, "--dtype", dtype)
    assert in_process("encode", bench.photo, *options, "-o", latent) == 0
    assert str(read_latents(Path(latent))[0].dtype) == f"torch.{dtype}"
    assert in_process("decode", latent, *options, "-o", picture) == 0


def _tampered(seat: launch.Seat, *arguments: Any) -> Any:
    """What a rank of `verify` does, but that one value of the distributed decode is off."""
    honest = spread.decode

    def decode(*given: Any) -> Any:
        pixels, report = honest(*given)
        if pixels is not None:
            pixels = pixels.clone()
            pixels[0, 1, 17, 3] += 1e-6
        return pixels, report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "decode", decode)
        return verify._work(seat, *arguments)


@pytest.mark.usefixtures("on_the_pool")
def test_verify_exits_with_1_when_one_value_is_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "on_ranks", lambda _, *arguments: launch.on_ranks(_tampered, *arguments))
    assert in_process("verify", bench.photo_latent, "--vae", bench.image_vae, "--ranks", "2", *TILES) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    cells = rows_of(shown.out)
    assert (cells["bitwise equal"], cells["promise kept"]) == ("no", "NO")
    assert (cells["first differing row"], cells["differing values"]) == ("17", "1")
    assert 0 < float(cells["max error"]) < 1e-5


def test_verify_under_torchrun_uses_the_ranks_that_are_there(bench: Bench) -> None:
    module = [*TORCHRUN, "-m", "halotile.cli"]
    done = spawned("verify", bench.photo_latent, "--vae", bench.image_vae, *TILES, command=module, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("promise kept") == 1, "one rank reports"
    cells = rows_of(done.stdout)
    assert cells["bitwise equal"] == cells["promise kept"] == "yes"
    assert (cells["ranks"], cells["tiles"], cells["first differing row"]) == ("2", "6", "none")
    assert cells["strategy"].startswith("tile")
    # 3 x 2 tiles of a 16 x 12 latent, window 8, stride 6: 8, 8 and 4 rows by 8 and 6 columns
    assert sum(map(int, cells["load a rank (latent cells)"].split())) == 20 * 14


def test_another_number_of_ranks_than_torchruns_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert in_process("verify", bench.photo_latent, "--vae", bench.image_vae, "--ranks", "3") == 2
    expected = "halotile (rank 1): --ranks 3 differs from the 2 ranks that torchrun started; leave it out\n"
    assert capsys.readouterr().err == expected


def test_encode_does_not_write_latents_over_a_picture(
    bench: Bench, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = out / "x.png"
    picture.write_bytes(b"a picture")
    assert in_process("encode", bench.photo, "--vae", bench.image_vae, "-o", picture) == 2
    assert "name it x.safetensors" in capsys.readouterr().err
    assert picture.read_bytes() == b"a picture"


def test_an_error_of_started_ranks_is_one_line(bench: Bench, out: Path) -> None:
    options = ("--vae", bench.image_vae, "-o", str(out / "a.png"), "--ranks", "2")
    done = spawned("decode", bench.photo_latent, *options, "--tile", "30", "--stride", "20")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("halotile: AutoencoderKL cannot have a window of 30 px")
    assert not any(out.iterdir())


def test_ctrl_c_and_a_killed_launcher_stop_every_rank(bench: Bench, out: Path) -> None:
    stuck = out / "stuck.py"
    stuck.write_text(
        "import os, pathlib, time\n"
        "import halotile.cli.spread as spread\n"
        "def sleep(*arguments):\n"
        "    pathlib.Path(os.environ['HERE'], str(arguments[2].rank)).touch()\n"
        "    time.sleep(100)\n"
        "spread.decode = sleep\n"
        "if __name__ == '__main__':\n"
        "    from halotile.cli.main import run\n"
        "    run()\n"
    )
    command = [sys.executable, str(stuck), "decode", bench.photo_latent, "--vae", bench.image_vae, "--ranks", "2"]
    processes = {}
    try:
        for way in ("interrupted", "killed"):
            here = out / way
            here.mkdir()
            processes[way] = subprocess.Popen(
                [*command, "-o", str(out / "a.png")],
                env=environment(HERE=str(here)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        limit = time.monotonic() + 90
        while not all((out / way / str(rank)).exists() for way in processes for rank in (0, 1)):
            assert time.monotonic() < limit, "the ranks did not come"
            assert all(process.poll() is None for process in processes.values())
            time.sleep(0.1)
        os.killpg(processes["interrupted"].pid, signal.SIGINT)  # as a terminal does
        processes["killed"].kill()
        shown = processes["interrupted"].communicate(timeout=30)
        assert (processes["interrupted"].returncode, *shown) == (130, "", "")
        for process in processes.values():
            process.wait(30)
            assert_nobody_is_left(process.pid, 20)
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert not (out / "a.png").exists()


def assert_nobody_is_left(session: int, limit_s: float) -> None:
    """Python's own helpers leave a moment after the process that they helped."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"processes of session {session} are still there after {limit_s} s")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("--help") == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "encode", "decode", "verify", "ops"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("transcode",),
        ("decode", "a.safetensors"),
        ("decode", "a.safetensors", "--vae", "v", "-o", "a.png", "--dtype", "float12"),
        ("decode", "a.safetensors", "--vae", "v", "-o", "a.png", "--ranks", "0"),
        ("verify", "a.safetensors", "--vae", "v", "--strategy", "magic"),
    ],
    ids=["command", "missing", "dtype", "ranks", "strategy"],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_files_that_are_not_there_or_not_what_they_seem(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    (out / "text.png").write_text("no picture")
    (out / "text.safetensors").write_text("no tensors")
    encode, decode = (
        ("--vae", bench.image_vae, "-o", str(out / "a.safetensors")),
        ("--vae", bench.image_vae, "-o", str(out / "a.png")),
    )
    assert "none.png: no such file" in fails("encode", str(out / "none.png"), *encode)
    assert "text.png: not a picture" in fails("encode", str(out / "text.png"), *encode)
    assert "neither a picture's nor a clip's" in fails("encode", bench.photo_latent, *encode)
    assert "none.safetensors: no such file" in fails("decode", str(out / "none.safetensors"), *decode)
    assert "text.safetensors: not a readable safetensors file" in fails(
        "decode", str(out / "text.safetensors"), *decode
    )
    assert "no such file" in fails("verify", str(out / "none.safetensors"), "--vae", bench.image_vae)


def test_outputs_that_cannot_be(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    photo, clip = (
        ("decode", bench.photo_latent, "--vae", bench.image_vae),
        ("decode", bench.clip_latent, "--vae", bench.video_vae),
    )
    assert "suffix .xyz" in fails(*photo, "-o", str(out / "a.xyz"))
    assert "holds a picture" in fails(*photo, "-o", str(out / "a.mp4"))
    assert "holds a clip" in fails(*clip, "-o", str(out / "a.png"))
    assert "does not exist" in fails(*photo, "-o", str(out / "none" / "a.png"))
    assert "is a folder" in fails("encode", bench.photo, "--vae", bench.image_vae, "-o", str(out))
    assert "cannot be written" in fails(*photo, "-o", "/proc/a.png")
    assert not any(out.iterdir())


def test_vaes_that_cannot_be(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    def vae(config: object, *, weights: bytes | None = None) -> tuple[str, ...]:
        folder = out / "vae"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if weights is not None:
            (folder / "diffusion_pytorch_model.safetensors").write_bytes(weights)
        return ("encode", bench.photo, "--vae", str(folder), "-o", str(out / "a.safetensors"))

    good = json.loads(Path(bench.image_vae, "config.json").read_text())
    output = ("-o", str(out / "a.safetensors"))
    assert "none: not a folder" in fails("encode", bench.photo, "--vae", str(out / "none"), *output)
    assert "photo.png: not a folder" in fails("encode", bench.photo, "--vae", bench.photo, *output)
    assert "no config.json" in fails("encode", bench.photo, "--vae", str(out), *output)
    assert "not a readable VAE configuration" in fails(*vae("{ not json"))
    assert "not a readable VAE configuration" in fails(*vae(["a list"]))
    assert "names no _class_name" in fails(*vae({}))
    assert "has no class AutoencoderNobody" in fails(*vae({"_class_name": "AutoencoderNobody"}))
    assert "UNet2DModel is not an autoencoder" in fails(*vae({"_class_name": "UNet2DModel"}))
    assert "cannot be loaded as AutoencoderKL" in fails(*vae(good))
    assert "cannot be loaded as AutoencoderKL" in fails(*vae(good, weights=b"no tensors"))
    assert not (out / "a.safetensors").exists()


def test_weights_that_are_missing_are_not_made_up(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    vae = diffusers.AutoencoderKL.from_pretrained(bench.image_vae)
    vae.save_pretrained(out / "vae")
    weights = load_file(out / "vae" / "diffusion_pytorch_model.safetensors")
    del weights["decoder.conv_out.weight"]
    save_file(weights, out / "vae" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    line = fails("encode", bench.photo, "--vae", str(out / "vae"), "-o", str(out / "a.safetensors"))
    assert "1 weights are missing, decoder.conv_out.weight first" in line


def test_vae_and_data_that_do_not_fit(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    line = fails("encode", bench.clip, "--vae", bench.image_vae, "-o", str(out / "a.safetensors"))
    assert "AutoencoderKL takes pictures; this is a clip of 4 frames" in line
    line = fails("decode", bench.photo_latent, "--vae", bench.video_vae, "-o", str(out / "a.png"))
    assert "was encoded by AutoencoderKL" in line
    assert "holds AutoencoderKLLTX2Video" in line


@pytest.mark.parametrize("shape", [(1, 16, 16, 12), (1, 4, 2, 16, 12)])
def test_latents_of_another_vae(bench: Bench, out: Path, fails: Callable[..., str], shape: tuple[int, ...]) -> None:
    latent, picture = out / "a.safetensors", out / ("a.png" if len(shape) == 4 else "a.mp4")
    save_file({"anything": torch.zeros(shape)}, latent)
    line = fails("decode", str(latent), "--vae", bench.image_vae, "-o", str(picture))
    assert f"AutoencoderKL decodes latents B x 4 x H x W, not {' x '.join(map(str, shape))}" in line


def test_options_of_another_strategy_are_refused(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    decode = ("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(out / "a.png"))
    assert "--tile 32 would be ignored" in fails(*decode, "--strategy", "shard", *TILES)
    assert "--strict would be ignored: it is about shard and hybrid, not tile" in fails(
        *decode, "--strategy", "tile", "--strict"
    )
    assert not any(out.iterdir())


@pytest.mark.usefixtures("on_the_pool")
def test_verify_holds_a_sharded_decode_to_rounding(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    shard = ("--ranks", "2", "--strategy", "shard", "--strict")
    assert in_process("verify", bench.photo_latent, "--vae", bench.image_vae, *shard) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    cells = rows_of(shown.out)
    assert cells["strategy"].startswith("shard")
    assert (cells["promise"], cells["promise kept"], cells["gathered operations"]) == ("allclose", "yes", "none")
    # the latent's 16 rows of 12 cells
    assert cells["load a rank (latent cells)"] == "96 96"
    assert int(cells["bytes sent, all ranks"]) > 0
    assert float(cells["peak of activations, this rank"].removesuffix(" MB")) > 0


@pytest.mark.usefixtures("on_the_pool")
def test_a_sharded_encode_gives_the_latents_of_one_rank(bench: Bench, out: Path) -> None:
    latent = str(out / "latent.safetensors")
    shard = ("--ranks", "2", "--strategy", "shard")
    assert in_process("encode", bench.photo, "--vae", bench.image_vae, "-o", latent, *shard) == 0
    sharded, alone = read_latents(Path(latent))[0], read_latents(Path(bench.photo_latent))[0]
    assert (sharded - alone).abs().max() <= 2e-5 * alone.abs().max()


def test_ops_lists_the_rules_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("ops", "--json") == 0
    kinds = json.loads(capsys.readouterr().out)
    assert "aten.convolution.default" in kinds["convolution"]
    assert "aten.native_group_norm.default" in kinds["norms"]
    assert kinds["pointwise"] == ["any operation that torch tags so"]
    assert in_process("ops") == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in kinds)
    assert "any operation" in shown


def test_tiles_that_cannot_be(bench: Bench, out: Path, fails: Callable[..., str]) -> None:
    decode = ("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(out / "a.png"))
    assert "--stride 320 exceeds --tile 256" in fails(*decode, "--tile", "256", "--stride", "320")
    assert "--stride 24 needs --tile" in fails(*decode, "--stride", "24")
    assert "not whole latents" in fails(*decode, "--tile", "30", "--stride", "20")
    assert not any(out.iterdir())


@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")])
def test_a_device_that_is_not_here(
    bench: Bench, fails: Callable[..., str], ranks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = fails("verify", bench.photo_latent, "--vae", bench.image_vae, "--device", "cuda", *ranks)
    assert "needs as many CUDA devices, found 0" in line


def test_a_video_vae_takes_a_picture_as_a_clip_of_one_frame(bench: Bench, out: Path) -> None:
    latent, picture = str(out / "a.safetensors"), str(out / "a.png")
    assert in_process("encode", bench.photo, "--vae", bench.video_vae, "-o", latent) == 0
    assert read_latents(Path(latent))[0].shape == (1, 4, 1, 8, 6)
    assert in_process("decode", latent, "--vae", bench.video_vae, "-o", picture) == 0
    assert read_image(Path(picture)).shape == (1, 3, 61, 47)


def test_an_unforeseen_error_is_one_line_too(
    bench: Bench, out: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("halotile.cli.spread.decode", broken)
    decode = ("decode", bench.photo_latent, "--vae", bench.image_vae, "-o", str(out / "a.png"))
    assert fails(*decode) == "halotile: RuntimeError: first second\n"
    monkeypatch.setenv("HALOTILE_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        in_process(*decode)


def test_the_earliest_failure_is_the_one_told(tmp_path: Path) -> None:
    for rank, at in ((0, 20.0), (1, 10.0)):
        failure = {"at": at, "rank": rank, "message": f"rank {rank} broke"}
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(failure))
    assert launch._first_failure(tmp_path, RuntimeError()) == "rank 1 broke"


def test_demo_on_tiny_vaes(
    bench: Bench,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: Callable[..., str],
) -> None:
    exhibits = (
        demo.Exhibit("photograph", "photo.png", "image_vae", demo.Spread("tile", 32, 24), "photo.png"),
        demo.Exhibit("clip", "clip.mp4", "video_vae", demo.Spread("tile", 32, 24), "clip.mp4"),
    )
    monkeypatch.setattr(demo, "EXHIBITS", exhibits)
    monkeypatch.setattr(demo, "DATA", bench.folder)
    assert in_process("demo", "--ranks", "1", "--out", str(out / "made")) == 0
    shown = capsys.readouterr().out
    assert shown.count("bitwise equal") == 2
    assert sorted(path.name for path in (out / "made").iterdir()) == ["clip.mp4", "photo.png", "side_by_side.png"]
    assert read_image(out / "made" / "photo.png").shape == (1, 3, 61, 47)
    assert read_video(out / "made" / "clip.mp4")[0].shape == (1, 3, 4, 38, 60)

    (out / "file").touch()
    assert "file: cannot be made a folder" in fails("demo", "--out", str(out / "file"))
    monkeypatch.setattr(demo, "DATA", out)
    assert "the demonstration model is not installed" in fails("demo", "--out", str(out / "made"))

    monkeypatch.setattr(demo, "DATA", bench.folder)
    honest = halotile.cli.spread.decode_alone
    monkeypatch.setattr("halotile.cli.spread.decode_alone", lambda *given: honest(*given) + 1e-3)
    assert in_process("demo", "--ranks", "1", "--out", str(out / "made")) == 1
    assert capsys.readouterr().out.count("NOT EQUAL") == 2


def rows_of(table: str) -> dict[str, str]:
    """The cells of a table of two columns."""
    lines = [line.strip("│┃ \n").split("│") for line in table.splitlines() if line.startswith("│")]
    return {cells[0].strip(): cells[1].strip() for cells in lines}

"""`halotile plan`, `bench`, and windows and profiles of `decode` and `verify`."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from test_cli import Bench, bench, fails, in_process, on_the_pool, out, spawned  # noqa: F401 - fixtures

from halotile.cli.plan import bytes_of, size_of
from halotile.errors import PlanError

EIGHTH = (8, 8, 8, 8)


@pytest.fixture(scope="module")
def eighth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny AutoencoderKL with 8 pixels a latent."""
    folder = tmp_path_factory.mktemp("plan") / "vae"
    torch.manual_seed(0)
    diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=EIGHTH,
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path_factory.mktemp("cache")))


def planned(capsys, *arguments: str) -> list[dict]:
    capsys.readouterr()
    assert in_process("plan", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def picture(vae: str, *more: str) -> tuple[str, ...]:
    return ("--vae", vae, "--height", "1024", "--width", "1024", "--ranks", "4", *more)


def test_the_worked_example(eighth: str, capsys) -> None:
    (strips,) = planned(capsys, *picture(eighth, "--window", "344x1024", "--overlap", "88x0"))
    (tiles,) = planned(capsys, *picture(eighth, "--window", "432x296", "--overlap", "72x72"))
    told = ("decoded_ratio", "window_share", "seams", "imbalance")
    assert [round(strips[name], 3) for name in told] == [1.258, 0.336, 3, 0.068]
    assert [round(tiles[name], 3) for name in told] == [1.461, 0.122, 22, 0.004]
    assert (strips["rows"], strips["columns"], tiles["rows"], tiles["columns"]) == (4, 1, 3, 5)
    assert strips["exact"] == {"decoded_ratio": "161/128", "window_share": "43/128", "imbalance": "11/161"}


def test_proposals_as_a_table_as_json_and_as_pictures(eighth: str, capsys, out: Path) -> None:  # noqa: F811
    svg, html = out / "plan.svg", out / "plan.html"
    assert in_process("plan", *picture(eighth, "--svg", str(svg), "--html", str(html))) == 0
    shown = capsys.readouterr().out
    plans = planned(capsys, *picture(eighth))
    assert [plan["name"] for plan in plans] == ["coarse", "balanced", "fine"]
    for plan in plans:
        assert plan["name"] in shown
        assert "{} x {}".format(*plan["window_px"]) in shown
        assert plan["predicted_bytes"] > 0
        assert plan.keys() >= {"tiles", "loads", "idle_ranks", "imbalance", "overlap_px", "seams"}
    assert svg.read_text().count("coarse")
    assert "344" in html.read_text()


def test_a_budget_leaves_what_fits_and_says_what_the_least_is(eighth: str, capsys, fails) -> None:  # noqa: F811
    plans = planned(capsys, *picture(eighth))
    middle = plans[1]["predicted_bytes"]
    within = planned(capsys, *picture(eighth, "--memory", f"{middle}"))
    assert max(plan["predicted_bytes"] for plan in within) <= middle
    assert "the least is" in fails("plan", *picture(eighth, "--memory", "1kB"))
    line = fails("plan", *picture(eighth, "--memory", "1kB", "--window", "432x296", "--overlap", "72x72"))
    assert "more than --memory 1000 bytes" in line


def test_a_clip(bench: Bench, capsys, fails) -> None:  # noqa: F811
    clip = ("--vae", bench.video_vae, "--height", "1024", "--width", "768", "--ranks", "3")
    plans = planned(capsys, *clip, "--frames", "9")
    assert {plan["frames"] for plan in plans} == {3}
    assert plans[0]["predicted_bytes"] > 2 * planned(capsys, *clip)[0]["predicted_bytes"]
    assert "8 frames are not one and a multiple of 4; 5 or 9 would be" in fails("plan", *clip, "--frames", "8")


def test_what_cannot_be_planned_is_one_line(eighth: str, fails, out: Path) -> None:  # noqa: F811
    bad = {
        ("--window", "430x296"): "not whole latents",
        ("--window", "432"): "is not HxW",
        ("--window", "432x296x8"): "is not HxW",
        ("--window", "-8x296"): "is not HxW",
        ("--window", "432x296", "--overlap", "432x72"): "overlap of 432 px",
        ("--overlap", "72x72"): "--overlap 72x72 needs --window",
        ("--memory", "lots"): "--memory 'lots' is no size",
        ("--memory", "0"): "is no size",
        ("--scheduler", "fair"): "--scheduler 'fair' is not known",
        ("--frames", "9"): "decodes pictures, not clips",
        ("--svg", str(out)): "is a folder",
    }
    for arguments, said in bad.items():
        assert said in fails("plan", *picture(eighth, *arguments)), arguments
    small = ("--vae", eighth, "--height", "1020", "--width", "1024")
    assert "a height of 1020 px is not whole latents of 8 px; 1016 or 1024 would be" in fails("plan", *small)
    tiny = ("--vae", eighth, "--height", "64", "--width", "64", "--ranks", "8")
    assert "decode it whole" in fails("plan", *tiny)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("800MB", 800 * 10**6), ("1.5k", 1500), ("4096", 4096), ("2 TiB", 2 * 2**40), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 GiBB", "-1GB", "1e9", "12XB", "0.1b"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(PlanError, match="no size"):
        bytes_of(text)


def test_sizes_in_words() -> None:
    assert [size_of(size) for size in (7, 2048, 3 << 20, 3 << 29)] == ["7 bytes", "2.0 KiB", "3.0 MiB", "1.5 GiB"]


@pytest.mark.usefixtures("on_the_pool")
def test_decode_and_verify_take_a_window_for_each_axis(bench: Bench, out: Path, capsys) -> None:  # noqa: F811
    """The picture is 64 x 48 px of 4 px a latent; AutoencoderKL by itself knows only squares."""
    window = ("--window", "40x32", "--overlap", "8x16")
    common = (bench.photo_latent, "--vae", bench.image_vae)
    assert in_process("decode", *common, "-o", str(out / "one.png"), "--strategy", "tile", *window) == 0
    two = ("-o", str(out / "two.png"), "--ranks", "2")
    assert in_process("decode", *common, *two, "--strategy", "tile", *window) == 0
    assert (out / "one.png").read_bytes() == (out / "two.png").read_bytes()
    capsys.readouterr()
    assert in_process("verify", *common, "--strategy", "tile", *window) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "bitwise equal │ yes" in shown
    # 40 every 32 of 64 rows are 2, 32 every 16 of 48 columns are 3
    assert "tiles │ 6" in shown


def test_decode_takes_a_profile(eighth: str, out: Path, capsys, fails) -> None:  # noqa: F811
    latent = out / "latent.safetensors"
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file({"latents": torch.randn(1, 4, 48, 40)}, latent)
    common = (str(latent), "--vae", eighth)
    (fine,) = (
        plan
        for plan in planned(capsys, "--vae", eighth, "--height", "384", "--width", "320", "--ranks", "1")
        if plan["name"] == "fine"
    )
    assert in_process("verify", *common, "--strategy", "tile", "--profile", "fine") == 0
    assert f"tiles │ {fine['tiles']} " in " ".join(capsys.readouterr().out.split()) + " "
    decode = ("decode", *common, "-o", str(out / "a.png"))
    assert "--tile 64 and --profile fine are different windows" in fails(*decode, "--profile", "fine", "--tile", "64")
    assert "--profile fine would be ignored" in fails(*decode, "--profile", "fine", "--strategy", "shard")


def test_bench_measures_each_proposal(eighth: str) -> None:
    done = spawned("bench", "--vae", eighth, "--height", "320", "--width", "256", "--ranks", "2", "--rounds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "seconds" in done.stdout
    assert "coarse" in done.stdout
    assert "fine" in done.stdout


def test_verify_compares_a_rectangle_of_autoencodertiny_with_the_same_rectangle(tmp_path, capsys) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8), num_encoder_blocks=(1,) * 4,
        num_decoder_blocks=(1,) * 4,
    ).save_pretrained(tmp_path / "vae")  # fmt: skip
    save_file({"latents": torch.randn(1, 4, 24, 20)}, tmp_path / "z.safetensors")
    window = ("--strategy", "tile", "--window", "64x96", "--overlap", "16x24")
    assert in_process("verify", str(tmp_path / "z.safetensors"), "--vae", str(tmp_path / "vae"), *window) == 0
    assert "bitwise equal │ yes" in " ".join(capsys.readouterr().out.split())

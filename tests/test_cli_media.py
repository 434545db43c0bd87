"""Pictures, clips and latent files on disk: what goes in comes out, and nothing half-written stays."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from halotile.cli.files import FileError, check_readable, check_writable, kind_of_input, kind_of_output, staged
from halotile.cli.latents import Source, crop_to_source, pad_to_ratio, read_latents, read_source, write_latents
from halotile.cli.media import from_bytes, read_image, read_video, to_bytes, write_image, write_media, write_video
from halotile.cli.vaes import Ratio
from halotile.errors import PlanError, UnsupportedError


def gradient(*sizes: int) -> torch.Tensor:
    """A smooth `1 3 [F] H W` in [-1, 1] that no two rows, columns or channels share."""
    axes = [torch.linspace(-1, 1, size) for size in sizes]
    grids = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([grids[-1], grids[-2], sum(grids) / len(grids)])[None]


def test_every_byte_comes_back_as_itself() -> None:
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_bytes(from_bytes(every)), every)
    assert to_bytes(torch.tensor([-7.0, -1.0, 1.0, 7.0])).tolist() == [0, 0, 255, 255]


def test_a_png_keeps_every_pixel_and_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    pixels = from_bytes(np.random.default_rng(0).integers(0, 256, (13, 7, 3), dtype=np.uint8)).permute(2, 0, 1)[None]
    write_image(tmp_path / "a.png", pixels)
    write_image(tmp_path / "b.PNG", pixels[:, :, None])
    assert torch.equal(read_image(tmp_path / "a.png"), pixels)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".bmp", ".tiff"])
def test_other_kinds_of_picture(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_image(path, gradient(24, 32))
    # lossy kinds: a hundredth of the range is far below a missing row or a swapped channel
    assert (read_image(path) - gradient(24, 32)).abs().mean() < 0.02


def test_a_picture_is_turned_upright_and_grey_becomes_rgb(tmp_path: Path) -> None:
    picture = Image.new("L", (4, 2), 200)
    exif = picture.getexif()
    exif[0x0112] = 6  # "rotate 90 degrees to the right to show"
    picture.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (1, 3, 4, 2)


@pytest.mark.parametrize(("suffix", "fps"), [(".mp4", Fraction(25)), (".mkv", Fraction(30000, 1001))])
def test_a_clip_keeps_frames_size_rate_and_colour(tmp_path: Path, suffix: str, fps: Fraction) -> None:
    path = tmp_path / f"a{suffix}"
    write_video(path, gradient(9, 32, 48), fps)
    found, rate = read_video(path)
    assert (found.shape, rate) == ((1, 3, 9, 32, 48), fps)
    # 4:2:0 chroma and the coder: a frame off by one would show as 0.25 / 3
    assert (found - gradient(9, 32, 48)).abs().mean() < 0.04
    assert read_video(path, max_frames=4)[0].shape[2] == 4
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")


def test_an_odd_clip_is_made_even_by_its_last_row_and_column(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", gradient(3, 31, 47), Fraction(10))
    assert read_video(tmp_path / "a.mp4")[0].shape == (1, 3, 3, 32, 48)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.mp4"])
@pytest.mark.parametrize("content", [b"", b"no picture, no clip", None], ids=["empty", "text", "cut short"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is None:
        write_media(path, gradient(*([8] * name.endswith("mp4")), 64, 64), Fraction(8))
        content = path.read_bytes()[: path.stat().st_size // 3]
    path.write_bytes(content)
    with pytest.raises(FileError, match=name) as caught:
        read_image(path) if name != "a.mp4" else read_video(path)
    assert "\n" not in str(caught.value)


def test_deep_pictures_are_refused_rather_than_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 2), 40000, dtype=np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(FileError, match="more than 8 bits"):
        read_image(tmp_path / "a.png")


def test_what_no_picture_can_show_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with pytest.raises(PlanError, match="3 frames do not fit a picture"):
        write_image(path, gradient(3, 4, 4))
    with pytest.raises(PlanError, match="1 of 48 pixel values are not finite"):
        write_image(path, gradient(4, 4).index_put((torch.tensor(0),) * 4, torch.tensor(float("nan"))))
    with pytest.raises(UnsupportedError, match="one RGB picture"):
        write_image(path, gradient(4, 4).repeat(2, 1, 1, 1))
    with pytest.raises(UnsupportedError, match="one RGB picture"):
        write_image(path, gradient(4, 4)[:, :1])
    assert not any(tmp_path.iterdir())


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.anything"
    path.write_text("before")

    class Stop(Exception):
        pass

    def write(text: str, error: Exception | None) -> None:
        with staged(path) as part:
            assert (part.parent, part.suffix) == (path.parent, path.suffix)
            part.write_text(text)
            assert path.read_text() == "before"
            if error:
                raise error

    with pytest.raises(Stop):
        write("half", Stop())
    with pytest.raises(FileError, match="cannot be written: full"):
        write("half", OSError(28, "full"))
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("before", [path.name])
    write("whole", None)
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("whole", [path.name])


def test_a_clip_that_fails_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([to_bytes(torch.zeros(4, 4, 3))])
    monkeypatch.setattr("halotile.cli.media.to_bytes", lambda frame: next(given))
    with pytest.raises(StopIteration):
        write_video(tmp_path / "a.mp4", gradient(3, 4, 4), Fraction(8))
    assert not any(tmp_path.iterdir())


def test_paths_are_checked_before_work(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    for path, reason in (
        (tmp_path / "none.png", "no such file"),
        (tmp_path, "not a file"),
        (tmp_path / "empty.png", "is empty"),
    ):
        with pytest.raises(FileError, match=reason):
            check_readable(path)
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "a.png", "does not exist"),
        (Path("/proc/a.png"), "cannot be written"),
    ):
        with pytest.raises(FileError, match=reason):
            check_writable(path)
    check_writable(tmp_path / "a.png")
    assert [each.name for each in tmp_path.iterdir()] == ["empty.png"]


def test_kinds_follow_from_suffixes() -> None:
    assert (kind_of_input(Path("a.JPG")), kind_of_input(Path("a.webm"))) == ("picture", "clip")
    with pytest.raises(FileError, match=r"\.webm is neither a picture's nor a clip's; known: \.png"):
        kind_of_output(Path("a.webm"))
    with pytest.raises(FileError, match=r"\(none\)"):
        kind_of_output(Path("a"))


def test_padding_repeats_the_edge_and_cropping_takes_it_off() -> None:
    picture = gradient(9, 15)
    padded = pad_to_ratio(picture, Ratio(8, None, 4))
    assert padded.shape == (1, 3, 16, 16)
    assert torch.equal(padded[..., 9:, :15], picture[..., -1:, :].expand(1, 3, 7, 15))
    assert torch.equal(crop_to_source(padded, Source.of("picture", picture, Fraction(1))), picture)

    clip = gradient(7, 8, 9)
    padded = pad_to_ratio(clip, Ratio(8, 4, 16))
    assert padded.shape == (1, 3, 9, 8, 16)  # 9 = 1 + 2 * 4
    assert torch.equal(padded[:, :, 7:, :, :9], clip[:, :, -1:].expand(1, 3, 2, 8, 9))
    assert torch.equal(crop_to_source(padded, Source.of("clip", clip, Fraction(1))), clip)

    fits = gradient(9, 16, 16)
    assert pad_to_ratio(fits, Ratio(8, 4, 16)) is fits


def test_a_decoded_picture_that_is_too_small_is_not_passed_off() -> None:
    with pytest.raises(PlanError, match="smaller than the source"):
        crop_to_source(gradient(8, 8), Source("picture", None, 9, 8))


def test_a_latent_file_keeps_latents_and_source(tmp_path: Path) -> None:
    path, source = tmp_path / "a.safetensors", Source("clip", "AutoencoderKLWan", 31, 47, 9, Fraction(30000, 1001))
    for dtype in (torch.float32, torch.bfloat16):
        latents = torch.randn(1, 4, 3, 4, 6).to(dtype)
        write_latents(path, latents, source)
        found, read = read_latents(path)
        assert torch.equal(found, latents)
        assert read == source == read_source(path)


def test_latents_of_another_program_are_not_cropped(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"whatever": torch.zeros(1, 4, 8, 8)}, path)
    assert read_source(path) == Source("picture")
    save_file({"whatever": torch.zeros(1, 4, 2, 8, 8)}, path)
    assert read_source(path) == Source("clip")


def test_what_is_no_latent_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("not tensors at all")
    with pytest.raises(FileError, match="not a readable safetensors file"):
        read_latents(path)
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, path)
    with pytest.raises(FileError, match="holds 2 tensors and none is named latents"):
        read_latents(path)
    save_file({"a": torch.zeros(3, 3)}, path)
    with pytest.raises(FileError, match=r"shape \(3, 3\)"):
        read_latents(path)
    save_file({"latents": torch.zeros(1, 4, 8, 8)}, path, metadata={"height_px": "tall"})
    with pytest.raises(FileError, match="damaged metadata"):
        read_source(path)

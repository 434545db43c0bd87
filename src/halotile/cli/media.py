"""Pictures through Pillow and clips through PyAV, as RGB tensors in [-1, 1].

A picture is `B C H W`, a clip `B C F H W`, both float32 with B = 1 and C = 3. Eight bits in and out round the same way
on every machine, so equal tensors make equal PNG files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from halotile.cli.files import CLIP_SUFFIXES, PICTURE_SUFFIXES, FileError, check_readable, kind_of_output, staged
from halotile.errors import PlanError, UnsupportedError

CLIP_QUALITY = "14"  # x264's constant rate factor: hard to tell from the frames themselves


def read_image(path: Path) -> Tensor:
    """The picture as `1 3 H W`, turned upright by its EXIF orientation; transparency is dropped."""
    check_readable(path)
    try:
        with Image.open(path) as picture:
            if picture.mode.startswith(("I", "F")):  # Pillow clips these to 8 bits instead of scaling them
                raise FileError(f"{path}: pictures of mode {picture.mode} (more than 8 bits) are not read")
            pixels = np.array(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileError:
        raise
    except UnidentifiedImageError:
        raise FileError(f"{path}: not a picture") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FileError(f"{path}: not a readable picture: {error}") from error
    return from_bytes(pixels).permute(2, 0, 1)[None].contiguous()


def write_image(path: Path, pixels: Tensor) -> None:
    """Write `1 3 H W` (or `1 3 1 H W`) as a picture of the kind that the suffix names."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise FileError(f"{path}: a picture needs one of the suffixes {' '.join(PICTURE_SUFFIXES)}")
    frames = _frames(pixels)
    if len(frames) != 1:
        raise PlanError(f"{path}: {len(frames)} frames do not fit a picture; name a clip ({' '.join(CLIP_SUFFIXES)})")
    picture = Image.fromarray(to_bytes(frames[0]))
    options: dict[str, Any] = {"quality": 95} if path.suffix.lower() in (".jpg", ".jpeg", ".webp") else {}
    with staged(path) as part:
        picture.save(part, **options)


def read_video(path: Path, max_frames: int | None = None) -> tuple[Tensor, Fraction]:
    """The clip as `1 3 F H W` and its frames per second; sound is dropped."""
    av = _pyav()
    check_readable(path)
    frames: list[Any] = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise FileError(f"{path}: holds no video")
            stream = container.streams.video[0]
            fps = stream.average_rate or stream.guessed_rate or Fraction(24)
            for frame in container.decode(stream):
                frames.append(np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame)))
                if len(frames) == max_frames:
                    break
    except FileError:
        raise
    except (OSError, ValueError) as error:  # every error of PyAV is one of the two
        raise FileError(f"{path}: not a readable clip: {getattr(error, 'strerror', None) or error}") from error
    if not frames:
        raise FileError(f"{path}: holds no frame")
    return from_bytes(np.stack(frames)).permute(3, 0, 1, 2)[None].contiguous(), Fraction(fps)


def write_video(path: Path, pixels: Tensor, fps: Fraction) -> None:
    """Write `1 3 F H W` as H.264 (yuv420p); an odd height or width repeats its last row or column to become even."""
    with clip_writer(path, fps) as write:
        write(pixels)


@contextmanager
def clip_writer(path: Path, fps: Fraction) -> Iterator[Callable[[Tensor], None]]:
    """A function that appends frames `1 3 f H W` to a clip; see `write_video`. The file appears when it is complete."""
    av = _pyav()
    if path.suffix.lower() not in CLIP_SUFFIXES:
        raise FileError(f"{path}: a clip needs one of the suffixes {' '.join(CLIP_SUFFIXES)}")
    with staged(path) as part, av.open(str(part), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": CLIP_QUALITY})
        sized = False

        def write(pixels: Tensor) -> None:
            frames = _frames(pixels)
            height, width = frames.shape[1:3]
            nonlocal sized
            if not sized:
                sized = True
                stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
            for frame in frames:
                even = np.pad(to_bytes(frame), ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))

        yield write
        container.mux(stream.encode())


def write_media(path: Path, pixels: Tensor, fps: Fraction) -> None:
    """Write a picture or a clip, as the suffix says."""
    if kind_of_output(path) == "picture":
        write_image(path, pixels)
    else:
        write_video(path, pixels if pixels.dim() == 5 else pixels[:, :, None], fps)


def from_bytes(pixels: np.ndarray[Any, Any]) -> Tensor:
    """uint8 0..255 to float32 -1..1, any shape."""
    return torch.from_numpy(np.ascontiguousarray(pixels)).float() / 127.5 - 1


def to_bytes(pixels: Tensor) -> np.ndarray[Any, Any]:
    """-1..1 to uint8 0..255, any shape: clipped, then rounded half to even in float32."""
    array: np.ndarray[Any, Any] = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
    return array


def _pyav() -> Any:
    """PyAV, which only clips need."""
    try:
        import av  # noqa: PLC0415
    except ImportError as error:
        raise UnsupportedError(f"clips need PyAV, the extra halotile[video]: {error}") from error
    return av


def _frames(pixels: Tensor) -> Tensor:
    """`F H W 3` on the CPU, of `1 3 H W` or `1 3 F H W`; refuses what no picture can show."""
    if pixels.shape[0] != 1 or pixels.shape[1] != 3:
        raise UnsupportedError(
            f"one RGB picture or clip a file; the pixels are {tuple(pixels.shape)} (batch, channels, ...)"
        )
    if not torch.isfinite(pixels).all():
        bad = int((~torch.isfinite(pixels)).sum())
        raise PlanError(
            f"{bad} of {pixels.numel()} pixel values are not finite; a float16 overflow? try another --dtype"
        )
    clip = pixels if pixels.dim() == 5 else pixels[:, :, None]
    return clip[0].detach().cpu().permute(1, 2, 3, 0)


def _quarter_turns(frame: Any) -> int:
    """Counter-clockwise quarter turns that show the frame upright: telephones store clips lying on their side."""
    return int(getattr(frame, "rotation", 0)) // 90 % 4

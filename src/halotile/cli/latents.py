"""The latent file: one safetensors tensor, with what is needed to give the source's size back.

Sizes that the VAE's ratio does not divide are padded before encoding by repeating the last row, column or frame, and
the decoded picture is cropped to the source again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from halotile.cli.files import FileError, Kind, check_readable, staged
from halotile.errors import PlanError

if TYPE_CHECKING:
    from halotile.cli.vaes import Ratio

FORMAT = "halotile.latents.1"
DEFAULT_FPS = Fraction(24)


@dataclass(frozen=True)
class Source:
    """What was encoded: sizes in pixels and frames before padding (None: unknown, nothing is cropped)."""

    kind: Kind
    vae_class: str | None = None
    height_px: int | None = None
    width_px: int | None = None
    frames: int | None = None
    fps: Fraction = DEFAULT_FPS

    @classmethod
    def of(cls, kind: Kind, pixels: Tensor, fps: Fraction, vae_class: str | None = None) -> Source:
        """Of the pixels `B C [F] H W` before padding."""
        frames = pixels.shape[2] if pixels.dim() == 5 else None
        return cls(kind, vae_class, pixels.shape[-2], pixels.shape[-1], frames, fps)


def pad_to_ratio(pixels: Tensor, ratio: Ratio) -> Tensor:
    """`B C [F] H W` grown to H and W that are multiples of the ratio, and to F of the form 1 + k * its `temporal`."""
    clip = pixels if pixels.dim() == 5 else pixels[:, :, None]
    frames, height, width = clip.shape[2:]
    grow = (0, -width % ratio.spatial, 0, -height % ratio.spatial, 0, (1 - frames) % (ratio.temporal or 1))
    padded = functional.pad(clip, grow, mode="replicate") if any(grow) else clip
    return padded if pixels.dim() == 5 else padded[:, :, 0]


def crop_to_source(pixels: Tensor, source: Source) -> Tensor:
    """`B C [F] H W` cut to the source's frames, height and width; raises `PlanError` where the pixels are smaller."""
    frames = source.frames if pixels.dim() == 5 else None
    wanted = (frames, source.height_px, source.width_px)[5 - pixels.dim() :]
    for dim, size in enumerate(wanted, start=2):
        if size is None:
            continue
        if pixels.shape[dim] < size:
            raise PlanError(f"decoded to {tuple(pixels.shape)}, smaller than the source's (F, H, W) = {wanted}")
        pixels = pixels.narrow(dim, 0, size)
    return pixels


def write_latents(path: Path, latents: Tensor, source: Source) -> None:
    """Write the unscaled latents `B C [F] H W` with the source's data."""
    fields = {"format": FORMAT, "kind": source.kind, "vae_class": source.vae_class, "fps": source.fps}
    sizes = {"height_px": source.height_px, "width_px": source.width_px, "frames": source.frames}
    metadata = {name: str(value) for name, value in (fields | sizes).items() if value is not None}
    with staged(path) as part:
        # not save_file, whose file only its owner may read
        part.write_bytes(save({"latents": latents.detach().cpu().contiguous()}, metadata))


def read_latents(path: Path) -> tuple[Tensor, Source]:
    """The latents and their source; a safetensors file of another program may hold one tensor and no metadata."""
    with _opened(path, "pt") as file:
        return file.get_tensor(_tensor_name(path, file)), _source(path, file)


def read_source(path: Path) -> Source:
    """The source's data alone, from the file's header."""
    with _opened(path, "np") as file:
        return _source(path, file)


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    check_readable(path)
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from error


def _source(path: Path, file: Any) -> Source:
    name = _tensor_name(path, file)
    shape = file.get_slice(name).get_shape()
    if len(shape) not in (4, 5):
        raise FileError(f"{path}: the tensor {name} has shape {tuple(shape)}; latents are B C H W or B C F H W")
    data = file.metadata() or {}
    try:
        height, width, frames = (int(data[key]) if key in data else None for key in ("height_px", "width_px", "frames"))
        fps = Fraction(data.get("fps", DEFAULT_FPS))
    except (ValueError, ZeroDivisionError) as error:
        raise FileError(f"{path}: damaged metadata: {error}") from error
    kind: Kind = "picture" if data.get("kind") == "picture" or len(shape) == 4 else "clip"
    return Source(kind, data.get("vae_class"), height, width, frames, fps)


def _tensor_name(path: Path, file: Any) -> str:
    names = list(file.keys())
    if "latents" in names:
        return "latents"
    if len(names) != 1:
        raise FileError(f"{path}: holds {len(names)} tensors and none is named latents")
    return str(names[0])

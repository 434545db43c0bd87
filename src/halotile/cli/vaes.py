"""A VAE folder in diffusers' `save_pretrained` layout, checked first, then loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.cli.files import FileError
from halotile.decode.door import tensor_of
from halotile.errors import PlanError, UnsupportedError

PROBE_PX, PROBE_FRAMES = 64, 49  # 1 + 48: 4, 6 and 8 frames a latent frame divide it
DECODE_TIMESTEP = 0.05  # what the pipelines of the timestep-conditioned LTX-Video decoders recommend


def class_of(folder: Path) -> str:
    """The diffusers class that `folder` holds, from its config.json; raises `FileError` where there is none."""
    if not folder.is_dir():
        raise FileError(f"{folder}: not a folder; --vae names a folder made by save_pretrained")
    config = folder / "config.json"
    try:
        name = json.loads(config.read_text(encoding="utf-8")).get("_class_name")
    except FileNotFoundError:
        raise FileError(f"{folder}: no config.json in it; --vae names a folder made by save_pretrained") from None
    except (OSError, ValueError, AttributeError) as error:
        raise FileError(f"{config}: not a readable VAE configuration: {error}") from error
    if not isinstance(name, str):
        raise FileError(f"{config}: names no _class_name")
    return name


def load_vae(folder: Path, device: torch.device, dtype: str) -> Any:
    """The VAE on `device` in the named dtype, for inference.

    Raises `UnsupportedError` for a class that is no autoencoder, `FileError` for weights that are missing or damaged.
    """
    name = class_of(folder)
    cls = getattr(diffusers, name, None)
    if cls is None:
        raise UnsupportedError(f"{folder}: diffusers {diffusers.__version__} has no class {name}")
    if not (hasattr(cls, "encode") and hasattr(cls, "decode") and hasattr(cls, "from_pretrained")):
        raise UnsupportedError(f"{folder}: {name} is not an autoencoder (it has no encode and decode)")
    logging.set_verbosity_error()
    try:
        # not to(dtype) afterwards: some classes keep a part of themselves in float32
        vae, found = cls.from_pretrained(
            folder, torch_dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # diffusers, safetensors and pickle each raise their own kinds
        needs_accelerate = getattr(cls, "_keep_in_fp32_modules", None) and find_spec("accelerate") is None
        hint = (
            "diffusers loads this class only where the package accelerate is installed" if needs_accelerate else error
        )
        raise FileError(f"{folder}: cannot be loaded as {name}: {hint}") from error
    if found["missing_keys"]:
        raise FileError(f"{folder}: {len(found['missing_keys'])} weights are missing, {found['missing_keys'][0]} first")
    return vae.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Ratio:
    """Pixels a latent (`spatial`) and frames a latent frame after the first (`temporal`; None for an image VAE).

    `channels` are those of its latents.
    """

    spatial: int
    temporal: int | None
    channels: int

    def latent_shape(self, height_px: int, width_px: int, frames: int | None = None) -> tuple[int, ...]:
        """The latents `B C [F] H W` of one picture or clip; the first frame of a clip is a latent frame by itself.

        Raises `PlanError` for pixels or frames that are not whole latents, with the nearest that are.
        """
        for axis, pixels in (("height", height_px), ("width", width_px)):
            if pixels % self.spatial:
                low = pixels // self.spatial * self.spatial
                raise PlanError(
                    f"a {axis} of {pixels} px is not whole latents of {self.spatial} px; "
                    f"{max(low, self.spatial)} or {low + self.spatial} would be"
                )
        sides = (height_px // self.spatial, width_px // self.spatial)
        if self.temporal is None:
            if frames is not None:
                raise PlanError(f"--frames {frames}: this VAE decodes pictures, not clips")
            return (1, self.channels, *sides)
        more = (1 if frames is None else frames) - 1
        if more % self.temporal:
            low = more // self.temporal * self.temporal + 1
            raise PlanError(
                f"{frames} frames are not one and a multiple of {self.temporal}; "
                f"{low} or {low + self.temporal} would be"
            )
        return (1, self.channels, more // self.temporal + 1, *sides)


def ratio_of(vae: Any) -> Ratio:
    """The VAE's ratios, found by encoding fake pixels with a copy without weights, as classes name them differently."""
    frames = [PROBE_FRAMES] if is_video_vae(vae) else []
    with FakeTensorMode(), torch.no_grad():
        copy = type(vae).from_config(vae.config).eval()
        try:
            latents = tensor_of(copy.encode(torch.empty(1, 3, *frames, PROBE_PX, PROBE_PX)))
        except Exception as error:
            raise UnsupportedError(f"{type(vae).__name__} does not encode an RGB picture or clip: {error}") from error
    assert latents is not None
    spatial = PROBE_PX // latents.shape[-1]
    if not frames:
        return Ratio(spatial, None, latents.shape[1])
    return Ratio(spatial, round((PROBE_FRAMES - 1) / max(1, latents.shape[2] - 1)), latents.shape[1])


def is_video_vae(vae: torch.nn.Module) -> bool:
    """Whether the VAE takes `B C F H W`: video VAEs convolve over time."""
    return any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())


def fit_dims(vae: torch.nn.Module, pixels: Tensor) -> Tensor:
    """A picture becomes a clip of one frame for a video VAE; a clip does not fit an image VAE."""
    if is_video_vae(vae):
        return pixels if pixels.dim() == 5 else pixels[:, :, None]
    if pixels.dim() == 5:
        raise UnsupportedError(f"{type(vae).__name__} takes pictures; this is a clip of {pixels.shape[2]} frames")
    return pixels


def check_latents(vae: Any, latents: Tensor) -> None:
    """Raise `PlanError` for latents of another number of dims or channels than the VAE decodes."""
    dims = 5 if is_video_vae(vae) else 4
    channels = vae.config.get("latent_channels", vae.config.get("z_dim", latents.shape[1]))
    if latents.dim() != dims or latents.shape[1] != channels:
        wanted = ("B", str(channels), *("F H W" if dims == 5 else "H W").split())
        raise PlanError(f"{type(vae).__name__} decodes latents {' x '.join(wanted)}, not {_size(latents)}")


def _size(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def decode_arguments(vae: Any, latents: Tensor) -> dict[str, Tensor]:
    """What the VAE's decode needs beside the latents `B C [F] H W`."""
    if not vae.config.get("timestep_conditioning"):
        return {}
    return {"temb": torch.full((latents.shape[0],), DECODE_TIMESTEP, device=latents.device, dtype=latents.dtype)}

"""What the commands need to know of a VAE: its ratios, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.decode.door import tensor_of
from halotile.errors import PlanError, UnsupportedError
from halotile.families import takes_timestep

PROBE_PX, PROBE_FRAMES = 64, 49  # 1 + 48: 4, 6 and 8 frames a latent frame divide it
DECODE_TIMESTEP = 0.05  # what the pipelines of the timestep-conditioned LTX-Video decoders recommend


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
    if not takes_timestep(vae):
        return {}
    return {"temb": torch.full((latents.shape[0],), DECODE_TIMESTEP, device=latents.device, dtype=latents.dtype)}

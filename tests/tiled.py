"""The tiny autoencoders with a small tile window, and inputs that need several tiles: shared by the tile tests."""

from __future__ import annotations

import tiny_vaes as tiny
import torch

from halotile.families import FAMILIES, set_window

WINDOW_LAT, STRIDE_LAT = 6, 4
HEIGHT_LAT, WIDTH_LAT = 10, 7
"""Neither divides: the last tiles of both axes are clipped, and there are 3 x 2 of them (2 x 2 for MiniMax-H3)."""

# what the class's own loop cannot do at all; halotile says so instead
NO_TILED_ENCODE = {"AutoencoderKLHunyuanImage", "AutoencoderKLMagvit"}
CASES = [
    (name, half)
    for name in tiny.CONFIGS
    for half in ("decode", "encode")
    if half == "decode" or name not in NO_TILED_ENCODE
]


def build_tiled(name: str):
    """A fresh tiny VAE of this kind, tiling on, with a window of 6 latents every 4."""
    vae = tiny.build(name)
    ratio = FAMILIES[type(vae).__name__].ratio(vae)
    set_window(vae, WINDOW_LAT * ratio, STRIDE_LAT * ratio)
    return vae


def tiled_input(name: str, half: str, batch: int = 1, height: int = HEIGHT_LAT, width: int = WIDTH_LAT) -> torch.Tensor:
    """Latents or pixels of this kind that need several tiles."""
    shape, scale, frames_scale = list(tiny.CONFIGS[name][2]), tiny.CONFIGS[name][3], tiny.CONFIGS[name][4]
    generator = torch.Generator().manual_seed(7)
    if half == "decode":
        return torch.randn(batch, *shape[1:-2], height, width, generator=generator)
    frames = [tiny.ENCODE_FRAMES.get(name, (shape[2] - 1) * frames_scale + 1)] if len(shape) == 5 else []
    return torch.randn(batch, 3, *frames, height * scale, width * scale, generator=generator)


def call(vae, name: str, half: str, x: torch.Tensor) -> torch.Tensor:
    """The VAE's own `decode` or `encode`, as a pipeline calls it, from a fixed seed; the tensor in its output."""
    torch.manual_seed(11)
    return tiny.decode(vae, name, x) if half == "decode" else tiny.encode(vae, name, x)


def count_calls(vae, half: str) -> list[int]:
    """A list that grows by one at each call of the network."""
    calls: list[int] = []
    network = vae.decoder if half == "decode" else vae.encoder
    network.register_forward_pre_hook(lambda module, args: calls.append(len(calls)))
    return calls

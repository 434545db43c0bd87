"""The tiny autoencoders with a small tile window, and inputs that need several tiles: shared by the tile tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import tiny_vaes as tiny
import torch

from halotile.families import FAMILIES, set_window


class Size(NamedTuple):
    """A window, its stride and a picture, all in latents."""

    window: int
    stride: int
    height: int
    width: int


SIZE = Size(6, 4, 10, 7)
"""Neither divides: the last tiles of both axes are clipped, and there are 3 x 2 of them (2 x 2 for MiniMax-H3)."""


def small(name: str) -> Size:
    """As many tiles of half the area, clipped as those: for tests that go through all kinds."""
    if name == "AutoencoderTiny":
        # its ramps want two rows
        return SIZE
    # MiniMax-H3 spreads its tiles, so that a stride of 3 would make more of them
    return Size(4, 2, 6, 6) if name == "AutoencoderKLMiniMaxH3" else Size(4, 3, 8, 5)


# what the class's own loop cannot do at all; halotile says so instead
NO_TILED_ENCODE = {"AutoencoderKLHunyuanImage", "AutoencoderKLMagvit"}
CASES = [
    (name, half)
    for name in tiny.CONFIGS
    for half in ("decode", "encode")
    if half == "decode" or name not in NO_TILED_ENCODE
]


def build_tiled(name: str, size: Size = SIZE):
    """A fresh tiny VAE of this kind, tiling on, with a window of 6 latents every 4 or as in `size`."""
    vae = tiny.build(name)
    ratio = FAMILIES[type(vae).__name__].ratio(vae)
    set_window(vae, size.window * ratio, size.stride * ratio)
    return vae


@cache
def built_small(name: str):
    """The one VAE of this kind and process with a small window: what was foreseen of its calls stays known."""
    return build_tiled(name, small(name))


def small_input(name: str, half: str, batch: int = 1) -> torch.Tensor:
    """Latents or pixels for a VAE with a small window."""
    return tiled_input(name, half, batch, *small(name)[2:])


def tiled_input(
    name: str, half: str, batch: int = 1, height: int = SIZE.height, width: int = SIZE.width
) -> torch.Tensor:
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


@contextmanager
def counted_calls(vae, half: str) -> Iterator[list[int]]:
    """A list that grows by one at each call of the network."""
    calls: list[int] = []
    network = vae.decoder if half == "decode" else vae.encoder
    hook = network.register_forward_pre_hook(lambda module, args: calls.append(len(calls)))
    yield calls
    hook.remove()

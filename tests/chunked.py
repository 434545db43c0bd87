"""The tiny autoencoders that can be decoded in chunks, and clips for them: shared by the tests of chunks."""

from __future__ import annotations

import tiny_vaes as tiny
import torch

from halotile.families import FAMILIES, set_window

FRAMES = {
    "AutoencoderKLWan_2.1": 4,
    "AutoencoderKLWan_2.2": 4,
    "AutoencoderKLQwenImage": 4,
    "AutoencoderKLCogVideoX": 5,
    "AutoencoderKLMagvit": 4,
    "AutoencoderKLHunyuanVideo": 5,
    "AutoencoderKLLTXVideo_0.9.0": 5,
    "AutoencoderKLLTX2Video": 5,
    "AutoencoderKLMiniMaxH3": 13,
}
"""Latent frames: two chunks of state or more, and two windows and a part of one."""
CAUSAL = list(FRAMES)[:5]
WINDOWED = list(FRAMES)[5:]
HEIGHT, WIDTH = 5, 3
"""Two tiles of 4 latents every 3, one above the other."""
# a sharded norm or attention adds up in another order than one rank does; the results are within -1 and 1, about
ROUNDING = 1e-4


def build(name, tiled=False):
    """A tiny VAE whose loop over frames, if it has one, has windows of 3 (+ 1) latent frames every 2."""
    vae = tiny.build(name)
    if hasattr(vae, "use_framewise_decoding"):
        vae.use_framewise_decoding = True
        ratio = vae.temporal_compression_ratio
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 3 * ratio, 2 * ratio
    if tiled:
        ratio = FAMILIES[type(vae).__name__].ratio(vae)
        set_window(vae, 4 * ratio, 3 * ratio)
    return vae


def clip(name, frames=None, batch=1, dtype=torch.float32):
    shape = (batch, tiny.CONFIGS[name][2][1], frames or FRAMES[name], HEIGHT, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def cut(frames, sizes):
    """Chunks of one size, or of the given ones in turn."""
    sizes = [sizes] if isinstance(sizes, int) else sizes
    chunks = []
    while sum(chunks) < frames:
        chunks.append(min(sizes[len(chunks) % len(sizes)], frames - sum(chunks)))
    return chunks


def in_chunks(decoder, x, sizes):
    """What each push gave, and `finish`."""
    parts = [decoder.push(part) for part in x.split(cut(x.shape[2], sizes), dim=2)]
    return [*parts, decoder.finish()]


def whole(vae, x):
    with torch.no_grad():
        return vae.decode(x).sample


def joined(parts):
    return torch.cat(parts, dim=2)

"""Tokens with positions, and small models of tokens, for the tests of tiled denoising."""

from __future__ import annotations

import torch
from torch import nn

from halotile import DimensionTilingConfig, TileCountConfig


def tiling(*dims):
    """(tiles, overlap) along frames, height and width."""
    return TileCountConfig(*(DimensionTilingConfig(*dim) for dim in dims))


def places(grid, extra=(), batch=1, scale=(1.0, 1.0, 1.0)):
    """Positions `B 3 N 2` of a grid whose cells are `scale` long, and of conditioning tokens `extra` of one cell."""
    corners = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    starts = torch.stack(corners).flatten(1)
    if len(extra):
        starts = torch.cat([starts, torch.tensor(extra, dtype=torch.float32).T], 1)
    size = torch.tensor(scale)[:, None]
    return torch.stack([starts * size, (starts + 1) * size], -1)[None].repeat(batch, 1, 1, 1)


def values(grid, extra=0, batch=1, depth=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(grid) + extra)
    total = grid[0] * grid[1] * grid[2] + extra
    return torch.randn(batch, total, depth, generator=generator).to(dtype)


def identity(tokens, positions, **_):
    return tokens


def where(tokens, positions, **_):
    """The positions themselves: tokens have 6 numbers."""
    return positions.movedim(1, 2).flatten(2).expand(tokens.shape[0], -1, -1)


def affine(tokens, positions, timesteps=None, **_):
    slope = torch.linspace(-1, 2, tokens.shape[-1])
    return tokens * slope + 0.5 if timesteps is None else tokens * slope * timesteps[..., None] + 0.5


def placed(tokens, positions, **_):
    """Depends on where a token is: tiles with positions of their own disagree."""
    return tokens + positions.sum((1, 3))[..., None] / 8


class DiT(nn.Module):
    """Blocks of attention between tokens at most `reach` cells apart (None: all), and of a layer for each token."""

    def __init__(self, depth=4, layers=2, reach=None, heads=1, width=16):
        super().__init__()
        torch.manual_seed(3)
        self.reach, self.heads = reach, heads
        self.inside, self.outside = nn.Linear(depth, width), nn.Linear(width, depth)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}) for _ in range(layers)
        )

    def forward(self, tokens, positions, **_):
        mask = None
        if self.reach is not None:
            centres = positions.mean(-1)
            apart = (centres[:, :, :, None] - centres[:, :, None]).abs().amax(1)
            mask = (apart <= self.reach + 0.25)[:, None]
        x = self.inside(tokens)
        for block in self.blocks:
            heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in block["qkv"](x).chunk(3, -1))
            seen = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
            x = x + block["out"](torch.tanh(seen.transpose(1, 2).flatten(2)))
        return self.outside(x)

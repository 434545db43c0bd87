"""The small diffusion transformer that halotile ships, and the latents of `photo_vae` as its tokens.

It upscales: beside each noisy token it may be given a guide, the latent of a smaller picture brought to size.
`tools/train_demo_dit.py` trains it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halotile.errors import PlanError

PATCH = 2  # latents along each side of a token
TRAINED_GRID = (1, 16, 16)  # tokens along frames, height and width of every training crop
ROTARY_BASE, ABSOLUTE_BASE = 100.0, 1000.0
PAIRS = (2, 7, 7)  # rotated pairs of a head's 32 channels along frames, height and width
Positions = Literal["rotary", "absolute"]


@dataclass(frozen=True)
class DiTConfig:
    """The model's sizes and the statistics of its training latents, one number a latent channel.

    `positions`: how it knows where a token is. "rotary" turns queries and keys, so that only differences of positions
    count; "absolute" adds an embedding of the position to the token. `guide_std`: of the latent minus its guide, both
    in units of `latent_std`.
    """

    positions: Positions
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]
    guide_std: tuple[float, ...]
    width: int = 128
    heads: int = 4
    depth: int = 6

    def __post_init__(self) -> None:
        if self.positions not in ("rotary", "absolute"):
            raise PlanError(f"positions={self.positions!r}: 'rotary' or 'absolute'")
        if self.width != self.heads * 2 * sum(PAIRS):
            raise PlanError(f"width={self.width} with heads={self.heads}: a head has {2 * sum(PAIRS)} channels")


class PhotoDiT(nn.Module):
    """Velocity (noise minus latent) of the flow `(1 - sigma) * latent + sigma * noise`, token by token.

    `model(tokens, positions, sigma, guide)`: `tokens` are `B N D` noisy ones, D = 64 (16 channels of 2 x 2 latents);
    `positions` `B 3 N 2` are half-open intervals along frames, height and width, in tokens; `sigma` is in (0, 1], one
    number or one an item; `guide`, `B N D` tokens without noise, may be left out. Returns `B N D`. Raises `PlanError`
    for tokens of another width.
    """

    guide_std: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = len(config.latent_std) * PATCH**2
        self.embed = nn.Linear(2 * self.channels + 1, config.width)
        self.place = nn.Linear(2 * sum(PAIRS), config.width) if config.positions == "absolute" else None
        self.time = nn.Sequential(nn.Linear(64, config.width), nn.SiLU(), nn.Linear(config.width, 6 * config.width))
        self.blocks = nn.ModuleList(_Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, self.channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("guide_std", torch.tensor(config.guide_std).repeat(PATCH**2), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, sigma: float | Tensor, guide: Tensor | None = None) -> Tensor:
        """The velocity, `B N D`."""
        if tokens.shape[-1] != self.channels:
            raise PlanError(f"tokens {tuple(tokens.shape)}: their last dim must be {self.channels}")
        guided = guide is not None
        guide = torch.zeros_like(tokens) if guide is None else guide
        s = self.guide_std if guided else torch.ones_like(self.guide_std)
        sigmas = torch.as_tensor(sigma, dtype=tokens.dtype, device=tokens.device).expand(tokens.shape[0])[:, None, None]
        # What the best linear guess leaves to the network, as Karras et al. 2022 (arXiv 2206.00364) do it: less its
        # guide a noisy token is (1 - sigma) * r + sigma * noise, with r of deviation s; the least-squares guess of
        # noise - r is a multiple of that, and misses by a known deviation.
        rest = tokens - (1 - sigmas) * guide
        power = (1 - sigmas) ** 2 * s**2 + sigmas**2
        guess = (sigmas - (1 - sigmas) * s**2) / power * rest
        learned = self._learned(torch.cat([rest * power.rsqrt(), guide], dim=-1), positions, sigmas, guided)
        return guess - guide + s * power.rsqrt() * learned

    def _learned(self, tokens: Tensor, positions: Tensor, sigma: Tensor, guided: bool) -> Tensor:
        x = self.embed(torch.cat([tokens, tokens.new_full((*tokens.shape[:2], 1), float(guided))], dim=-1))
        middles = positions.to(x.dtype).mean(-1)  # B 3 N
        turns = None
        if self.place is None:
            turns = _angles(middles, ROTARY_BASE)[:, None]
        else:
            angles = _angles(middles, ABSOLUTE_BASE)
            x = x + self.place(torch.cat([angles.cos(), angles.sin()], dim=-1))
        modulation = self.time(_sigma_waves(sigma)).unflatten(-1, (6, -1)).unbind(-2)
        for block in self.blocks:
            x = block(x, turns, modulation)
        out: Tensor = self.out(self.norm(x))
        return out


class _Block(nn.Module):
    """Attention and a multilayer perceptron, both modulated by sigma: one modulation for all blocks, offset by each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.offsets = nn.Parameter(torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.1])[:, None].repeat(1, width))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, turns: Tensor | None, modulation: tuple[Tensor, ...]) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = (m + o for m, o in zip(modulation, self.offsets, strict=True))
        y = self.query_key_value(_layer_norm(x) * (1 + scale) + shift)
        query, key, value = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.project(attended)
        y = self.widen(_layer_norm(x) * (1 + scale_2) + shift_2)
        out: Tensor = x + gate_2 * self.narrow(F.gelu(y, approximate="tanh"))
        return out


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _angles(middles: Tensor, base: float) -> Tensor:
    """`B N 16`: each dim's position times its share of frequencies, from 1 down towards 1 / base."""
    return torch.cat(
        [
            middles[:, dim, :, None]
            * base ** (-torch.arange(pairs, dtype=middles.dtype, device=middles.device) / pairs)
            for dim, pairs in enumerate(PAIRS)
        ],
        dim=-1,
    )


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (i, i + 16) of a head's channels, turned by its angle."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _sigma_waves(sigma: Tensor) -> Tensor:
    waves = sigma * 2 ** torch.linspace(0, 8, 32, dtype=sigma.dtype, device=sigma.device)
    return torch.cat([waves.cos(), waves.sin()], dim=-1)


def load_dit(folder: Path) -> PhotoDiT:
    """The model of `folder` (config.json, model.safetensors in half precision), in float32, to be used as it is."""
    from safetensors.torch import load_file  # noqa: PLC0415

    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in config.items() if isinstance(value, list)}
    model = PhotoDiT(DiTConfig(**{**config, **lists}))
    model.load_state_dict({key: value.float() for key, value in load_file(folder / "model.safetensors").items()})
    return model.eval().requires_grad_(False)


def save_dit(model: PhotoDiT, folder: Path) -> None:
    """Write what `load_dit` reads."""
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=2) + "\n", encoding="utf-8")
    save_file({key: value.half() for key, value in model.state_dict().items()}, folder / "model.safetensors")


def to_tokens(latents: Tensor, config: DiTConfig) -> Tensor:
    """`B C H W` latents of `photo_vae` as `B N 4C` tokens, row by row, of mean 0 and deviation 1."""
    mean, std = (latents.new_tensor(each)[:, None, None] for each in (config.latent_mean, config.latent_std))
    batch, channels, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = ((latents - mean) / std).reshape(batch, channels, rows, PATCH, columns, PATCH)
    return patches.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, PATCH**2 * channels)


def from_tokens(tokens: Tensor, grid: tuple[int, int, int], config: DiTConfig) -> Tensor:
    """The latents that `to_tokens` took; `grid` is the token grid (1, H / 2, W / 2)."""
    mean, std = (tokens.new_tensor(each)[:, None, None] for each in (config.latent_mean, config.latent_std))
    batch, channels, (_, rows, columns) = tokens.shape[0], tokens.shape[2] // PATCH**2, grid
    patches = tokens.reshape(batch, rows, columns, PATCH, PATCH, channels).permute(0, 5, 1, 3, 2, 4)
    return patches.reshape(batch, channels, rows * PATCH, columns * PATCH) * std + mean


def grid_positions(grid: tuple[int, int, int]) -> Tensor:
    """`1 3 N 2` float32: each token's interval along frames, height and width; all one token long."""
    starts = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij")).flatten(1).float()
    return torch.stack([starts, starts + 1], dim=-1)[None]

"""The autoencoders that the benches of the sharded decode time: random weights, block types as released, eval mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch


@dataclass(frozen=True)
class Case:
    """A model and the latents to decode, without their batch: `C H W` or `C F H W`."""

    title: str
    model: Callable[[], Any]
    latents: tuple[int, ...]

    def build(self, batch: int, side: int | None = None) -> tuple[Any, torch.Tensor]:
        """The model and latents, the same ones in every process; `side` x `side` latents for a short trial."""
        torch.manual_seed(0)
        vae = self.model().eval().requires_grad_(False)
        shape = (batch, *self.latents) if side is None else (batch, *self.latents[:-2], side, side)
        return vae, torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _kl() -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(64, 128, 256, 256),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=32,
    )


def _wan() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=32)


def _ltx2() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        block_out_channels=(64, 128, 256, 512),
        decoder_block_out_channels=(64, 128, 256),
        decoder_causal=False,
    )


def _hunyuan_video() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(32, 64, 128, 128))


CASES = {
    "kl": Case("AutoencoderKL (64, 128, 256, 256)", _kl, (4, 64, 64)),
    "wan": Case("AutoencoderKLWan (base 32)", _wan, (16, 3, 32, 32)),
    "ltx2": Case("AutoencoderKLLTX2Video (base 64)", _ltx2, (128, 3, 16, 16)),
    "hunyuan": Case("AutoencoderKLHunyuanVideo (32, 64, 128, 128)", _hunyuan_video, (16, 3, 20, 20)),
}

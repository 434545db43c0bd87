"""Tiled data parallel denoising: a transformer on tiles of its tokens, dealt to ranks and blended."""

from halotile.denoise.builder import TiledDataParallelBuilder
from halotile.denoise.options import FIRST_SIGMA_LIMIT
from halotile.denoise.protocol import ModelCall
from halotile.denoise.report import DenoiseReport
from halotile.denoise.tiled import TiledDenoiser
from halotile.denoise.tokens import TokenPlan, TokenTile, plan_tokens

__all__ = [
    "FIRST_SIGMA_LIMIT",
    "DenoiseReport",
    "ModelCall",
    "TiledDataParallelBuilder",
    "TiledDenoiser",
    "TokenPlan",
    "TokenTile",
    "plan_tokens",
]

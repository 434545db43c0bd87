"""Calls of a model that takes tokens and positions: whatever follows the protocol of `TiledDenoiser`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halotile.denoise.positions import shift_time, start_of
from halotile.denoise.protocol import Prediction
from halotile.denoise.tokens import Grid, TokenTile
from halotile.errors import PlanError, UnsupportedError

PER_TOKEN = ("timesteps", "keyframes_mask", "denoise_mask", "segment_ids", "guide")
"""Arguments that hold something for each token along dim 1, `B N` or `B N ...`."""
MASKS = ("attention_mask",)
"""Arguments that hold something for pairs of tokens, or for the tokens as keys: `... N N`, `... 1 N`, `B N`."""


@dataclass(frozen=True)
class PlainCall:
    """The call `model(tokens, positions, **keywords)`; `audio` and `audio_positions` are among the keywords."""

    model: Callable[..., Any]
    tokens: torch.Tensor
    positions: torch.Tensor
    grid: Grid
    prediction: Prediction
    normalize_positions: bool
    keywords: dict[str, Any]

    def __post_init__(self) -> None:
        if self.tokens.dim() != 3:
            raise PlanError(f"tokens must be B N D, got {tuple(self.tokens.shape)}")
        batch, total = self.tokens.shape[:2]
        if self.positions.dim() != 4 or self.positions.shape[0] not in (1, batch):
            raise PlanError(f"positions of {batch} x {total} tokens must be B 3 N 2, got {tuple(self.positions.shape)}")
        if tuple(self.positions.shape[1:]) != (3, total, 2):
            raise PlanError(f"positions of {total} tokens must be B 3 {total} 2, got {tuple(self.positions.shape)}")

    @property
    def total(self) -> int:
        return self.tokens.shape[1]

    @property
    def sigma(self) -> float | None:
        return sigma_of(self.keywords.get("sigma"), self.keywords.get("timesteps"))

    def own(self) -> torch.Tensor:
        return self.tokens

    def own_audio(self) -> torch.Tensor | None:
        return self.keywords.get("audio")

    def run(self, tile: TokenTile, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        keywords = {name: tokens_of(name, value, tile, self.total) for name, value in self.keywords.items()}
        if self.normalize_positions and keywords.get("audio_positions") is not None:
            seconds = start_of(self.positions, tile)[:, 0]
            keywords["audio_positions"] = shift_time(keywords["audio_positions"], seconds)
        made = self.model(self.tokens[:, tile.kept], positions, **keywords)
        if self.own_audio() is None:
            return made, None
        if not isinstance(made, tuple) or len(made) != 2:
            raise UnsupportedError(f"a model that is given audio returns (video, audio), but it returned {type(made)}")
        return made

    def plain(self) -> Any:
        return self.model(self.tokens, self.positions, **self.keywords)

    def finish(self, video: torch.Tensor, audio: torch.Tensor | None) -> Any:
        own = self.own_audio()
        return video if own is None else (video, own if audio is None else audio)


def tokens_of(name: str, value: Any, tile: TokenTile, total: int) -> Any:
    """The part of an argument that belongs to the kept tokens of `tile`.

    Only arguments whose name says that they are about tokens are looked at (`PER_TOKEN`, `MASKS`): a text of as many
    tokens as the video has, say, must stay whole. Of those, a dim of 1 is left alone, for it is broadcast, and a tensor
    of one dim is one value a sample. Raises PlanError for another shape.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    kept = tile.kept.to(value.device)
    if name in PER_TOKEN:
        return _select(name, value, 1, kept, total)
    if name not in MASKS:
        return value
    if value.dim() == 2 and value.shape[0] != total:
        # one a sample and key
        return _select(name, value, 1, kept, total)
    return _select(name, _select(name, value, value.dim() - 2, kept, total), value.dim() - 1, kept, total)


def _select(name: str, value: torch.Tensor, dim: int, kept: torch.Tensor, total: int) -> torch.Tensor:
    if value.shape[dim] == total:
        return value.index_select(dim, kept)
    if value.shape[dim] == 1:
        return value
    raise PlanError(
        f"{name} of shape {tuple(value.shape)} has {value.shape[dim]} along dim {dim}, where {total} tokens, or 1, "
        "were expected"
    )


def sigma_of(sigma: Any, timesteps: Any) -> float | None:
    """The noise of a call, 0 to 1: its sigma, else the largest timestep where all are at most 1; None if unknown."""
    for value in (sigma, timesteps):
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel()):
            most = float(value.max()) if isinstance(value, torch.Tensor) else float(value)
            return most if most <= 1 else None
    return None

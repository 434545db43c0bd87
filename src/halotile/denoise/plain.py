"""Calls of a model that takes tokens and positions: whatever follows the protocol of `TiledDenoiser`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.decode.door import arguments_fact
from halotile.denoise.layout import Grid, require_whole
from halotile.denoise.options import DenoiseOptions
from halotile.denoise.positions import shift_time, start_of
from halotile.denoise.protocol import Prediction
from halotile.denoise.tokens import TokenTile
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
    keywords: dict[str, Any]
    options: DenoiseOptions

    def __post_init__(self) -> None:
        if self.tokens.dim() != 3:
            raise PlanError(f"tokens must be B N D, got {tuple(self.tokens.shape)}")
        batch, total = self.tokens.shape[:2]
        require_positions("positions", self.positions, batch, total)
        require_whole(self.grid, self.positions)
        audio = self.own_audio()
        if audio is not None and not isinstance(audio, torch.Tensor):
            raise PlanError(f"audio must be a tensor B A D, got {type(audio).__name__}")

    @property
    def prediction(self) -> Prediction:
        return self.options.prediction

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
        more = self.options.per_token
        keywords = {name: tokens_of(name, value, tile, self.total, more) for name, value in self.keywords.items()}
        if self.options.normalize_positions and keywords.get("audio_positions") is not None:
            seconds = start_of(self.positions, tile)[:, 0]
            keywords["audio_positions"] = shift_time(keywords["audio_positions"], seconds)
        made = self.model(self.tokens[:, tile.kept], positions, **keywords)
        if self.own_audio() is None:
            return made, None
        return video_of(made), made[1]

    def plain(self) -> Any:
        return self.model(self.tokens, self.positions, **self.keywords)

    def given_fact(self) -> str:
        return arguments_fact((), {"positions": self.positions, **self.keywords})

    def finish(self, video: torch.Tensor, audio: torch.Tensor | None) -> Any:
        return video if audio is None else (video, audio)

    def with_audio(self, output: Any, audio: torch.Tensor) -> Any:
        return video_of(output), audio


def video_of(output: Any) -> Any:
    """The first of (video, audio). Raises UnsupportedError for what is no such pair."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise UnsupportedError(
            f"a model that may be given audio must return (video, audio) predictions, but this one returned a "
            f"{type(output).__name__}"
        )
    return output[0]


def require_positions(name: str, positions: torch.Tensor, batch: int, total: int) -> None:
    """Raise PlanError unless positions are `B 3 N 2`, for all samples or alike for each."""
    shape = tuple(positions.shape)
    if shape not in ((batch, 3, total, 2), (1, 3, total, 2)):
        raise PlanError(f"{name} of {total} tokens must be B 3 {total} 2, with {batch} or 1 for B, got {shape}")


def tokens_of(name: str, value: Any, tile: TokenTile, total: int, more: Sequence[str] = ()) -> Any:
    """The part of an argument that belongs to the kept tokens of `tile`.

    Only arguments whose name says that they are about tokens are looked at (`PER_TOKEN`, `more`, `MASKS`): a text of as
    many tokens as the video has, say, must stay whole. Of those, a dim of 1 is left alone, for it is broadcast, and a
    tensor of one dim is one value a sample. Of a list or tuple every tensor is cut. Raises PlanError for another shape.
    """
    if isinstance(value, (list, tuple)) and name in (*PER_TOKEN, *more, *MASKS):
        return type(value)([tokens_of(name, one, tile, total, more) for one in value])
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    kept = tile.kept.to(value.device)
    if name in PER_TOKEN or name in more:
        return _select(name, value, 1, kept, total)
    if name not in MASKS:
        return value
    if value.dim() == 2 and value.shape[0] != total:
        # one a sample and key; where there are as many samples as tokens, it is taken for one a pair
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
    """The noise of a call, 0 to 1: its largest sigma, else its largest timestep; None if unknown.

    Either may be a tensor, a number (of numpy as well) or a list of them. A largest one outside of 0 to 1, such as a
    timestep of 900, is of another scale: what noise it stands for is unknown. So it is with NaN.
    """
    for value in (sigma, timesteps):
        try:
            numbers = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            continue
        if numbers.numel():
            most = float(numbers.max())
            return most if 0 <= most <= 1 else None
    return None

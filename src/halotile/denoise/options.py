"""How a tiled forward is to be run: `DenoiseOptions`, checked when built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halotile.denoise.protocol import Prediction, References
from halotile.errors import PlanError, UnsupportedError
from halotile.planning.tilings import TileCountConfig

Audio = Literal["average", "frozen"]
Dealing = Literal["balanced", "round_robin"]

FIRST_SIGMA_LIMIT = 0.95
"""LTX-2's two-stage schedule starts its upscaling stage at 0.909375 (`STAGE_2_DISTILLED_SIGMA_VALUES` of diffusers), so
that is low enough to be meant; 1.0 is pure noise."""


@dataclass(frozen=True)
class DenoiseOptions:
    """How forwards are to be run; see `TiledDenoiser`. Raises PlanError and UnsupportedError for what cannot be."""

    tiling: TileCountConfig
    normalize_positions: bool = True
    reference_positions: References = "shift"
    prediction: Prediction = "velocity"
    audio: Audio = "average"
    scheduler: Dealing = "balanced"
    deterministic: bool = False
    first_sigma_limit: float = FIRST_SIGMA_LIMIT
    per_token: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tiling, TileCountConfig):
            raise UnsupportedError(
                f"tiling={self.tiling!r}: tokens are tiled by count; give a TileCountConfig, in tokens of the grid"
            )
        for name, known in (
            ("reference_positions", get_args(References)),
            ("prediction", get_args(Prediction)),
            ("audio", get_args(Audio)),
            ("scheduler", get_args(Dealing)),
        ):
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(known)}")
        for name in ("normalize_positions", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.per_token, (list, tuple)) or not all(isinstance(name, str) for name in self.per_token):
            raise PlanError(f"per_token={self.per_token!r} must be names of keywords, in a list or tuple")
        object.__setattr__(self, "per_token", tuple(self.per_token))
        if not isinstance(self.first_sigma_limit, (int, float)) or not self.first_sigma_limit > 0:
            raise PlanError(f"first_sigma_limit={self.first_sigma_limit!r} must be a positive sigma")

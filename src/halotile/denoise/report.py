"""What one tiled forward did: `DenoiseReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halotile.denoise.layout import Grid


@dataclass(frozen=True)
class DenoiseReport:
    """The account of one forward, as one rank sees it.

    grid: generated tokens along frames, height and width. tokens: of the whole sequence, conditioning included. tiles:
    how many; 1 is the plain forward, 0 one without video. ranks: of the group. loads: kept tokens that each rank's
    tiles have. unkept: conditioning tokens that no tile kept. drift: mean squared disagreement of tiles where they
    overlap, over pairs of tiles, each token counting with the product of the pair's blend weights; in squared units of
    the prediction, 0.0 where nothing overlaps, NaN where a prediction is not finite there. Less than about 1e-7 of the
    squared distance of the prediction from the tokens is rounding (float32), but with `deterministic`. sigma: how noisy
    the tokens were, None where unknown. all_reduces: how many there were. reduced_bytes: what that of the video
    carried. collectives: reductions and agreements. seconds: this rank's wall time.
    """

    grid: Grid
    tokens: int
    tiles: int
    ranks: int
    loads: tuple[int, ...]
    unkept: int
    drift: float
    sigma: float | None
    all_reduces: int
    reduced_bytes: int
    collectives: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)

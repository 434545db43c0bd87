"""Tiles' predictions on their way to one: what a rank adds up, and one `all_reduce` of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halotile.comm import Ranks
from halotile.denoise.tokens import TokenPlan, TokenTile


@dataclass(frozen=True)
class Blended:
    """The blend of all tiles, `B N D`, in the dtype of the sums, and how far tiles disagree: `DenoiseReport.drift`."""

    video: torch.Tensor
    drift: float


class RunningSums:
    """Each rank adds up its own tiles; the order of the sum over ranks is the group's.

    How far tiles disagree takes no second pass and no other message. Where the weights w_i of tiles x_i sum to 1, the
    sum over pairs of w_i * w_j * |x_i - x_j|^2 is the sum of w_i * |x_i|^2, less |sum of w_i * x_i|^2, and the latter
    is the blend. Both are taken of the distance from the tokens' own values, which all ranks know, so that little
    cancels where predictions are near them.
    """

    def __init__(self, plan: TokenPlan, own: torch.Tensor, dtype: torch.dtype) -> None:
        self._plan, self._own, self._dtype = plan, own, dtype
        self.buffer = torch.zeros(own.numel() + 2 * len(plan.tiles), dtype=dtype, device=own.device)

    def add(self, tile: TokenTile, video: torch.Tensor) -> None:
        """Add the prediction `B m D` for the kept tokens of `tile`."""
        video = video.to(self._dtype)
        sums, spreads = self._parts(self.buffer)
        sums.index_add_(1, tile.kept, video * tile.weights[:, None])
        within, tokens = tile.overlapped, tile.generated[tile.overlapped]
        weights = tile.weights[: len(tile.generated)][within]
        spread = (_squares(video[:, : len(within)][:, within] - self._own[:, tokens]) * weights).sum()
        # a float64 in two parts, which one rank fills: no digit of it is lost in a sum of float32
        spreads[tile.index, 0] = spread
        spreads[tile.index, 1] = spread - spreads[tile.index, 0].double()

    def reduce(self, ranks: Ranks) -> Blended:
        """The blend over all ranks: one `all_reduce`."""
        sums, spreads = self._parts(ranks.transport.all_reduce(self.buffer))
        shared = self._plan.shared
        around = spreads.double().sum() - _squares(sums[:, shared] - self._own[:, shared]).sum()
        return Blended(sums, _drift(around, self._plan, self._own))

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._own.numel()
        return buffer[:size].view(self._own.shape), buffer[size:].view(-1, 2)


class Slots:
    """Every tile has a place of its own, which one rank fills; each rank then sums them in the order of the tiles.

    A sum of one number and zeros is exact, so the result is the same bits for every number of ranks. It takes memory
    and traffic for all tiles whole.
    """

    def __init__(self, plan: TokenPlan, own: torch.Tensor, dtype: torch.dtype) -> None:
        self._plan, self._own, self._dtype = plan, own, dtype
        batch, _, depth = own.shape
        self._sizes = [batch * len(tile.kept) * depth for tile in plan.tiles]
        self.buffer = torch.zeros(sum(self._sizes), dtype=dtype, device=own.device)

    def add(self, tile: TokenTile, video: torch.Tensor) -> None:
        """Put the prediction `B m D` for the kept tokens of `tile` in its place."""
        torch.split(self.buffer, self._sizes)[tile.index].copy_(video.reshape(-1))

    def reduce(self, ranks: Ranks) -> Blended:
        """The blend over all ranks: one `all_reduce`."""
        batch, _, depth = self._own.shape
        slots = torch.split(ranks.transport.all_reduce(self.buffer), self._sizes)
        tiles = [slot.view(batch, -1, depth) for slot in slots]
        video = torch.zeros(self._own.shape, dtype=self._dtype, device=self._own.device)
        for tile, made in zip(self._plan.tiles, tiles, strict=True):
            video.index_add_(1, tile.kept, made * tile.weights[:, None])
        around = torch.zeros((), dtype=torch.float64, device=video.device)
        for tile, made in zip(self._plan.tiles, tiles, strict=True):
            within, tokens = tile.overlapped, tile.generated[tile.overlapped]
            weights = tile.weights[: len(tile.generated)][within]
            around += (_squares(made[:, : len(within)][:, within] - video[:, tokens]) * weights).sum()
        return Blended(video, _drift(around, self._plan, self._own))


def average_audio(
    made: dict[int, torch.Tensor], count: int, own: torch.Tensor, dtype: torch.dtype, deterministic: bool, ranks: Ranks
) -> torch.Tensor:
    """The mean over `count` tiles of the audio that each made, `made` being this rank's: one `all_reduce`."""
    slots = torch.zeros((count if deterministic else 1, *own.shape), dtype=dtype, device=own.device)
    for index, audio in sorted(made.items()):
        slots[index if deterministic else 0] += audio.to(dtype)
    total = torch.zeros(own.shape, dtype=dtype, device=own.device)
    for slot in ranks.transport.all_reduce(slots):
        total += slot
    return total / count


def _squares(distance: torch.Tensor) -> torch.Tensor:
    """The squared length of `B n D` for each token, `B n`, in float64."""
    return distance.square().sum(-1, dtype=torch.float64)


def _drift(around: torch.Tensor, plan: TokenPlan, own: torch.Tensor) -> float:
    # not max(), which would make 0 of NaN
    spread = 0.0 if around <= 0 else float(around)
    return spread / (plan.pairs * own.shape[0] * own.shape[2]) if plan.pairs else 0.0

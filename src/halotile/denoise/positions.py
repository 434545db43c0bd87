"""The positions that a tile's tokens are given: from zero, or where they are."""

from __future__ import annotations

import torch

from halotile.denoise.protocol import References
from halotile.denoise.tokens import TokenTile


def start_of(positions: torch.Tensor, tile: TokenTile) -> torch.Tensor:
    """Where the generated tokens of `tile` begin along time, height and width: `B 3`, of positions `B 3 N 2`."""
    return positions[:, :, tile.generated.to(positions.device), 0].amin(-1)


def positions_for(
    positions: torch.Tensor, tile: TokenTile, normalize: bool = True, references: References = "shift"
) -> torch.Tensor:
    """The positions `B 3 m 2` of the kept tokens of `tile`, out of all, `B 3 N 2`.

    With `normalize` they are moved so that the generated tokens start at zero in each dim; widths of intervals stay.
    Conditioning tokens move along, so that all relative positions of the tile stay true. With references="keep" those
    of negative time stay where they were: every tile then sees them at the same coordinates. Generated tokens always
    move.
    """
    own = positions[:, :, tile.kept.to(positions.device)]
    if not normalize:
        return own
    moved = own - start_of(positions, tile)[:, :, None, None]
    if references == "shift":
        return moved
    stays = own[:, :1, :, :1] < 0
    stays[:, :, : len(tile.generated)] = False
    return torch.where(stays, own, moved)


def shift_time(audio_positions: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
    """Positions of audio tokens, `B 1 A 2`, `B 1 A` or `B A`, `seconds` (one a sample) earlier, like their tile.

    Whole numbers become what `seconds` are, which may be fractions.
    """
    if not audio_positions.is_floating_point():
        audio_positions = audio_positions.to(torch.promote_types(audio_positions.dtype, seconds.dtype))
    return audio_positions - seconds.view(-1, *(1,) * (audio_positions.dim() - 1)).to(audio_positions)

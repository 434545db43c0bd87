"""What is looked at before any tile of a grid runs: the VAE's own loops inside of tiles, and further arguments."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from halotile.decode.choose import prepare
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Half, family_of, temporal_loop_runs, temporal_note
from halotile.planning.latent_grid import LatentGrid, Part


def source_shape(x: torch.Tensor, part: Part) -> tuple[int, ...]:
    """The shape of what a tile of `x` is made from."""
    sides = part.source if x.dim() == 5 else part.source[1:]
    return (*x.shape[:2], *map(len, sides))


def check_tiles(vae: Any, half: Half, x: torch.Tensor, grid: LatentGrid) -> str:
    """Raise for a tile that the VAE's own loops, where they are on, would treat wrong; what else they do, in words."""
    notes: dict[str, None] = {}
    for shape in dict.fromkeys(source_shape(x, part) for part in grid.parts(half)):
        if grid.shape[0] > 1 and temporal_loop_runs(vae, half, shape):
            family = family_of(vae)
            assert family is not None
            assert family.temporal is not None
            loop = family.temporal
            flag = loop.decode_flag if half == "decode" else loop.encode_flag
            raise PlanError(
                f"tiling= cuts the frames into {grid.shape[0]} tiles, and {type(vae).__name__}.{flag} would cut the "
                f"{shape[2]} frames of such a tile again ({loop.window}={getattr(vae, loop.window)}): two temporal "
                f"splits of a causal autoencoder do not go together; set vae.{flag} = False, or leave the frames of "
                "tiling= in one tile"
            )
        with ExitStack() as stack:
            notes[prepare(vae, half, shape, "serial", stack) + temporal_note(vae, half, shape)] = None
    return "".join(notes)


def refuse_spatial(values: Iterable[Any]) -> None:
    """Raise UnsupportedError for further arguments with a height and width: every tile would get the whole of them."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() >= 4 and max(value.shape[-2:]) > 1:
            raise UnsupportedError(
                f"a further argument of shape {tuple(value.shape)} has a height and width, and tiling= does not know "
                "how to cut it; leave tiling= out"
            )

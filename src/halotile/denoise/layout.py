"""Whether the generated tokens lie where the grid says, and whether the grid has all of them."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch

from halotile.errors import PlanError
from halotile.planning.tilings import DIMS

Grid = tuple[int, int, int]


def grid_from(value: Any) -> Grid | None:
    """Frames, height and width out of three positive integers of any kind; None for anything else."""
    try:
        frames, height, width = map(operator.index, value)
    except (TypeError, ValueError):
        return None
    return (frames, height, width) if min(frames, height, width) > 0 else None


def require_grid(grid: Grid, positions: torch.Tensor) -> None:
    """Raise PlanError unless the first F * H * W of the positions `B 3 N 2` are a grid in row-major order.

    Along each axis tokens of one frame (row, column) begin at the same place, and none begins before the last one.
    """
    starts = positions[:, :, : prod(grid), 0].reshape(-1, 3, *grid)
    for axis, name in enumerate(DIMS):
        along = starts[:, axis].movedim(1 + axis, -1)
        line = along[:, :1, :1]
        for wrong, what in (
            (along != line, "where others of the same one begin elsewhere"),
            (torch.cat([line[..., :1], line[..., :-1]], -1) > line, "before the last one"),
        ):
            if wrong.any():
                sample, *_, place = wrong.nonzero()[0].tolist()
                begins = sorted(set(along[sample, :, :, place].flatten().tolist()))[:4]
                raise PlanError(
                    f"the first {prod(grid)} positions are no grid of {grid} (frames, height, width) in row-major "
                    f"order: along {name}, tokens at {place} begin at {begins}, {what}; check the order of the three, "
                    "and that conditioning tokens come last"
                )


def continues(grid: Grid, positions: torch.Tensor) -> str | None:
    """Whether the tokens behind those of the grid are its next "row" or "frame", which then were left out of it."""
    count, (_, height, width) = prod(grid), grid
    starts, stops = positions[..., 0], positions[..., 1]
    for axis, size in ((1, width), (0, height * width)):
        behind, first, last = starts[:, :, count : count + size], starts[:, :, :size], count - 1
        if behind.shape[2] < size:
            continue
        expected = first.clone()
        expected[:, axis] = stops[:, axis, last, None]
        if axis == 1:
            expected[:, 0] = starts[:, 0, last, None]
        if torch.equal(behind, expected) and (expected[:, axis] > starts[:, axis, last, None]).all():
            return "row" if axis == 1 else "frame"
    return None


def require_whole(grid: Grid, positions: torch.Tensor) -> None:
    """Raise PlanError where the tokens behind those of the grid continue it."""
    if what := continues(grid, positions):
        raise PlanError(
            f"the tokens behind the {prod(grid)} of grid={grid} are its next {what}, which no tile would keep: they "
            f"begin where the last {what} ends; give the grid of all {positions.shape[2]} tokens if they are "
            "generated, or a negative time if they are a reference"
        )

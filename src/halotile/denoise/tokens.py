"""Which tokens a tile takes, and with which weight they count: decided once for a geometry."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import torch

from halotile.blend import windows
from halotile.denoise.layout import Grid, require_grid
from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, tile_by_count
from halotile.planning.tilings import DIMS, DimensionTilingConfig, TileCountConfig


@dataclass(frozen=True, eq=False)
class TokenTile:
    """The tokens of one tile.

    region: frames, rows and columns of the token grid. generated: their n tokens among the F * H * W generated ones,
    row-major. kept: m of all N tokens: the generated ones, then the conditioning tokens that the tile keeps, in order.
    weights: float32, one a kept token; over all tiles they sum to 1 for each token. A conditioning token counts
    1 / (number of tiles that keep it) in each.
    """

    index: int
    region: tuple[Interval, Interval, Interval]
    generated: torch.Tensor
    kept: torch.Tensor
    weights: torch.Tensor

    @cached_property
    def overlapped(self) -> torch.Tensor:
        """Which of the generated tokens other tiles have as well, a bool each."""
        return self.weights[: len(self.generated)] < 1

    @property
    def grid(self) -> Grid:
        """Frames, height and width of the tile in tokens."""
        frames, height, width = (len(side) for side in self.region)
        return frames, height, width


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """All tiles over one sequence of `total` tokens. unkept: conditioning tokens that no tile keeps."""

    grid: Grid
    tiles: tuple[TokenTile, ...]
    total: int
    unkept: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """What all ranks must have alike, in short."""
        seen = hashlib.sha256(repr((self.grid, self.total)).encode())
        for tile in self.tiles:
            seen.update(tile.kept.cpu().numpy().tobytes())
        return seen.hexdigest()[:16]

    @cached_property
    def shared(self) -> torch.Tensor:
        """The generated tokens that several tiles have."""
        several = torch.zeros(prod(self.grid), dtype=torch.bool, device=self.unkept.device)
        for tile in self.tiles:
            several[tile.generated[tile.overlapped]] = True
        return several.nonzero().flatten()

    @cached_property
    def pairs(self) -> float:
        """The summed weight w_i * w_j of all pairs of tiles at all tokens that they share; drift is relative to it."""
        weights = (tile.weights[: len(tile.generated)].double() for tile in self.tiles)
        # the weights of a token sum to 1, so that the sum of w_i * w_j over pairs is half of that of w_i * (1 - w_i)
        return sum(float((each * (1 - each)).sum()) for each in weights) / 2

    def to(self, device: torch.device) -> TokenPlan:
        """The plan with its tensors on `device`."""
        return self if self.unkept.device == device else _moved(self, device)


def plan_tokens(grid: Grid, tiling: TileCountConfig, positions: torch.Tensor | None, total: int) -> TokenPlan:
    """Lay `tiling` over `grid` (frames, height and width in tokens) and find what each tile keeps of `total` tokens.

    Tiles are in row-major order: those of early frames first. A tile keeps every conditioning token (those after the
    generated ones) whose interval overlaps the tile's in all three dims, or whose time is negative: references belong
    to all tiles. `positions` are `B 3 N 2`, half-open intervals; a token that is kept for one sample is kept for all.
    An interval without a width is a point, and a tile whose last interval is one includes it. The plans of the last few
    geometries are remembered.

    Raises PlanError for numbers that cannot be, for generated tokens whose positions are no grid in row-major order,
    and for conditioning tokens without positions.
    """
    generated = prod(grid)
    if total < generated:
        raise PlanError(f"{total} tokens are fewer than the {generated} of a grid of {grid}")
    if positions is None:
        if total == generated:
            return _without_conditioning(grid, tiling)
        raise PlanError(
            f"{total - generated} conditioning tokens after the {generated} of the grid have no positions, so that no "
            "tile can tell whether they are its own; give positions of the shape B 3 N 2"
        )
    if positions.dim() != 4 or positions.shape[1] != 3 or tuple(positions.shape[2:]) != (total, 2):
        raise PlanError(f"positions of {total} tokens must be B 3 {total} 2, got {tuple(positions.shape)}")
    return _remembered(grid, tiling, positions)


_Seen = tuple[tuple[object, ...], torch.Tensor, TokenPlan]
_SEEN: deque[_Seen] = deque(maxlen=8)


def _remembered(grid: Grid, tiling: TileCountConfig, positions: torch.Tensor) -> TokenPlan:
    """The positions themselves are compared: a program may change them in place."""
    key = (grid, tiling, positions.shape, positions.dtype, positions.device)
    for known, seen, plan in tuple(_SEEN):
        if known == key and torch.equal(seen, positions):
            return plan
    exact = positions.detach().cpu().double()
    require_grid(grid, exact)
    plan = _without_conditioning(grid, tiling)
    if positions.shape[2] > plan.total:
        plan = _with_conditioning(plan, exact)
    _SEEN.append((key, positions.detach().clone(), plan))
    return plan


@lru_cache(maxsize=32)
def _without_conditioning(grid: Grid, tiling: TileCountConfig) -> TokenPlan:
    # a program may have made its accelerator the device of all new tensors
    with torch.device("cpu"):
        return _lay(grid, tiling)


def _lay(grid: Grid, tiling: TileCountConfig) -> TokenPlan:
    dims = [_cut(name, getattr(tiling, name), length) for name, length in zip(DIMS, grid, strict=True)]
    along = [windows(dim) for dim in dims]
    places = product(*(range(dim.count) for dim in dims))
    order = torch.arange(prod(grid)).view(grid)
    tiles: list[TokenTile] = []
    for place in places:
        region = (dims[0].tiles[place[0]], dims[1].tiles[place[1]], dims[2].tiles[place[2]])
        generated = order[tuple(slice(side.start, side.stop) for side in region)].flatten()
        # windows of each dim sum to 1, and so do their products
        frames, rows, columns = (side[i] for side, i in zip(along, place, strict=True))
        weights = frames[:, None, None] * (rows[:, None] * columns)
        tiles.append(TokenTile(len(tiles), region, generated, generated, weights.flatten()))
    return TokenPlan(grid, tuple(tiles), prod(grid), torch.empty(0, dtype=torch.long))


def _cut(name: str, asked: DimensionTilingConfig, length: int) -> DimTiling:
    try:
        return tile_by_count(length, asked.num_tiles, asked.overlap)
    except PlanError as error:
        raise PlanError(f"{name} of {length} tokens: {error}") from None


def _with_conditioning(plan: TokenPlan, positions: torch.Tensor) -> TokenPlan:
    """`plan` with the conditioning tokens that its tiles keep; `positions` are on the CPU, in float64."""
    first = prod(plan.grid)
    starts, stops = positions[:, :, first:, 0], positions[:, :, first:, 1]
    reference = starts[:, 0] < 0
    keeps = torch.stack([(_near(positions, tile, starts, stops) | reference).any(0) for tile in plan.tiles])
    # not in the default dtype, which a program may have set to bfloat16
    share = (1 / keeps.sum(0).clamp(min=1).double()).float()
    tiles = tuple(
        replace(
            tile,
            kept=torch.cat([tile.generated, first + keep.nonzero().flatten()]),
            weights=torch.cat([tile.weights, share[keep]]),
        )
        for tile, keep in zip(plan.tiles, keeps, strict=True)
    )
    return TokenPlan(plan.grid, tiles, positions.shape[2], first + (~keeps.any(0)).nonzero().flatten())


def _near(positions: torch.Tensor, tile: TokenTile, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Which of the intervals overlap the tile's in all dims, `B K`; one without a width counts as a point."""
    own = positions[:, :, tile.generated]
    begin, end = own[..., 0].amin(-1, keepdim=True), own[..., 1].amax(-1, keepdim=True)
    # the half-open interval of a tile whose last one is a point would be without that
    closed = end == own[..., 0].amax(-1, keepdim=True)
    return (((starts < end) | (closed & (starts == end))) & ((stops > begin) | (starts >= begin))).all(1)


@lru_cache(maxsize=16)
def _moved(plan: TokenPlan, device: torch.device) -> TokenPlan:
    tiles = tuple(
        replace(
            tile,
            generated=tile.generated.to(device),
            kept=tile.kept.to(device),
            weights=tile.weights.to(device),
        )
        for tile in plan.tiles
    )
    return replace(plan, tiles=tiles, unkept=plan.unkept.to(device))

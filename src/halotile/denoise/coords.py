"""Calls of LTX and LTX-2, whose tokens lie where `video_coords` says: seconds, and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

import torch

from halotile.denoise.layout import Grid, continues, require_grid
from halotile.denoise.positions import shift_time, start_of
from halotile.denoise.sequences import SequenceCall
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError
from halotile.families.transformers import Transformer


class CoordsCall(SequenceCall):
    """A call with `video_coords`, `B 3 N 2` (intervals) or `B 3 N` (where tokens start), or with what makes them.

    The generated tokens are looked for in the coordinates, where there are any: the grid that begins at zero. Tokens
    before and behind them are conditioning. num_frames, height and width must agree with them, and then say where the
    frames end; 1, 1, 1, which the pipeline of long clips gives beside coordinates, says nothing.
    """

    def __init__(
        self,
        row: Transformer,
        cls: type,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        normalize_positions: bool,
    ) -> None:
        super().__init__(row, cls, model, args, kwargs)
        self.normalize_positions = normalize_positions
        self.total = self.tokens.shape[1]
        sizes = [self.given.get(name) for name in ("num_frames", "height", "width")]
        coords = self.given.get("video_coords")
        made = coords is None
        if made:
            if None in sizes or row.coords is None:
                raise PlanError(f"{row.name} needs video_coords, or num_frames, height and width; got {sizes}")
            coords = row.coords(self.inside, self.given)
        if not isinstance(coords, torch.Tensor):
            raise PlanError(f"video_coords must be a tensor, got {type(coords).__name__}")
        if coords.dim() not in (3, 4) or coords.shape[1] != 3 or coords.shape[2] < self.total:
            raise PlanError(
                f"video_coords of {self.total} tokens must be B 3 {self.total} 2 or B 3 {self.total}, got "
                f"{tuple(coords.shape)}"
            )
        starts = coords[..., 0] if coords.dim() == 4 else coords
        told = None if None in sizes or (not made and sizes == [1, 1, 1]) else self._grid_of(sizes)
        if told is None:
            first, self.grid = find_grid(starts[0], coords[0, ..., 1] if coords.dim() == 4 else None)
        else:
            first, self.grid = _first_at_zero(starts[0]) or 0, told
        if not made:
            _require_alike(starts)
        if told is not None and not made:
            self._require_agreement(coords, told, first)
        if first:
            places = torch.arange(self.total, device=self.tokens.device)
            stop = first + prod(self.grid)
            self.order = torch.cat([places[first:stop], places[:first], places[stop:]])
        self.points = coords.dim() == 3
        ordered = coords if self.order is None else coords.index_select(2, self.order.to(coords.device))
        self.positions = _intervals(ordered, self.grid) if self.points else ordered

    def _grid_of(self, sizes: list[Any]) -> Grid:
        frames, height, width = (
            -(-int(size) // patch) for size, patch in zip(sizes, self.row.patch(self.inside), strict=True)
        )
        if frames * height * width > self.total:
            grid = (frames, height, width)
            raise PlanError(f"{self.total} tokens are fewer than the {prod(grid)} of a grid of {grid}")
        return frames, height, width

    def _require_agreement(self, coords: torch.Tensor, grid: Grid, first: int) -> None:
        if first + prod(grid) > self.total:
            self._disagree(grid, f"they are {self.total} tokens, of which the first at zero is the one at {first}")
        try:
            own = coords[:, :, first : self.total]
            own = _intervals(own, grid) if coords.dim() == 3 else own
            require_grid(grid, own)
        except PlanError as error:
            self._disagree(grid, str(error))
        if continues(grid, own) == "row":
            self._disagree(grid, "they go on with another row")

    def _disagree(self, grid: Grid, why: str) -> NoReturn:
        raise PlanError(
            f"video_coords of {self.row.name} do not agree with num_frames, height and width, {grid} in tokens: {why}; "
            "leave the three out, or 1, to have the grid read from the coordinates"
        )

    def placed(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        assert positions is not None
        assert self.positions is not None
        changed: dict[str, Any] = {"video_coords": positions[..., 0] if self.points else positions}
        if self.row.audio:
            changed["audio_coords"] = self._audio_coords(self.positions, tile)
        return changed

    def _audio_coords(self, positions: torch.Tensor, tile: TokenTile) -> torch.Tensor:
        """The audio's coordinates, as many seconds earlier as the tile's video; whoever asks for none gets them."""
        coords: torch.Tensor | None = self.given.get("audio_coords")
        if coords is None:
            audio = self.given["audio_hidden_states"]
            rope = self.inside.audio_rope
            coords = rope.prepare_audio_coords(audio.shape[0], self.given.get("audio_num_frames"), audio.device)
        assert coords is not None
        return shift_time(coords, start_of(positions, tile)[:, 0]) if self.normalize_positions else coords


def find_grid(starts: torch.Tensor, stops: torch.Tensor | None = None) -> tuple[int, Grid]:
    """Where the generated tokens begin, and their grid, from where tokens start, and stop where that is known (`3 N`).

    The first token at zero in all dims is the first of them: LTX puts conditioning before, which starts later, LTX-2
    behind. From there on, a grid in row-major order goes as far as its frames follow each other. A keyframe behind it
    lies inside a frame, and does not start where the last one stops. Raises PlanError when there is no such grid.
    """
    first = _first_at_zero(starts)
    if first is None:
        raise PlanError(
            "no token of video_coords starts at zero in all dims, so that the generated ones cannot be told from the "
            "conditioning; give num_frames, height and width, too"
        )
    time, rows, columns = starts[:, first:]
    plane = _run(time == time[0])
    width = _run((rows == rows[0])[:plane])
    if plane % width:
        raise PlanError(f"a frame of {plane} tokens in video_coords is not of rows of {width}")
    count = len(time) // plane
    planes = starts[:, first : first + count * plane].reshape(3, count, plane)
    like_first = (planes[1:] == planes[1:, :1]).all(2).all(0) & (planes[0] == planes[0, :, :1]).all(1)
    if stops is None:
        like_first[1:] &= planes[0, 1:, 0] > planes[0, :-1, 0]
    else:
        ends = stops[0, first : first + count * plane].reshape(count, plane)
        like_first[1:] &= planes[0, 1:, 0] == ends[:-1, 0]
    frames = int(like_first.long().cumprod(0).sum())
    down, across = rows[:plane].view(-1, width), columns[:plane].view(-1, width)
    square = (down == down[:, :1]).all() and (across == across[:1]).all()
    if not (square and (down[1:, 0] > down[:-1, 0]).all() and (across[0, 1:] > across[0, :-1]).all()):
        raise PlanError(f"the first {plane} tokens of the generated ones are no grid in row-major order")
    return first, (frames, plane // width, width)


def _first_at_zero(starts: torch.Tensor) -> int | None:
    zeros = (starts == 0).all(0).nonzero().flatten()
    return int(zeros[0]) if len(zeros) else None


def _require_alike(starts: torch.Tensor) -> None:
    begins = (starts == 0).all(1).long().argmax(1)
    if (begins != begins[0]).any():
        raise PlanError(
            f"the samples of video_coords begin at zero at different tokens, {begins.tolist()}; call the model for "
            "each sample, or put their tokens in the same order"
        )


def _run(same: torch.Tensor) -> int:
    """How many are true before the first that is not."""
    return int(same.long().cumprod(0).sum())


def _intervals(starts: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`B 3 N` as intervals `B 3 N 2`: a generated token ends where the next begins, any other is as wide as the last.

    Only which conditioning tokens a tile keeps depends on the ends.
    """
    generated = prod(grid)
    cells = starts[:, :, :generated].reshape(-1, 3, *grid)
    ends = torch.empty_like(starts)
    for axis in range(3):
        along = cells[:, axis].movedim(1 + axis, -1)
        steps = along.diff(dim=-1) if along.shape[-1] > 1 else torch.ones_like(along)
        steps = torch.cat([steps, steps[..., -1:]], -1)[..., : along.shape[-1]]
        ends[:, axis, :generated] = (along + steps).movedim(-1, 1 + axis).flatten(1)
        ends[:, axis, generated:] = starts[:, axis, generated:] + steps.flatten(1)[:, -1:]
    return torch.stack([starts, ends], -1)

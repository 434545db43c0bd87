"""Calls of Qwen-Image, whose tokens are pictures one behind the other, of the shapes in `img_shapes`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch

from halotile.denoise.layout import Grid
from halotile.denoise.protocol import References
from halotile.denoise.sequences import SequenceCall
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError
from halotile.families.transformers import Transformer


class ShapesCall(SequenceCall):
    """A call with `img_shapes`: the first picture is generated, any further ones are references for every tile.

    The model counts rows and columns of each picture from its middle, and text from the greatest of them on. A tile
    with normalised positions is to the model a picture of the tile's own size: it is counted from the tile's middle,
    and text begins where such a picture's would. References move along with reference_positions="shift"; with "keep"
    they lie around the middle of every tile, as they do around that of the whole.
    """

    def __init__(
        self,
        row: Transformer,
        cls: type,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        normalize_positions: bool,
        reference_positions: References,
    ) -> None:
        super().__init__(row, cls, model, args, kwargs)
        self.normalize_positions, self.reference_positions = normalize_positions, reference_positions
        self.total = self.tokens.shape[1]
        self.shapes = [list(one) if isinstance(one, list) else [one] for one in self.given.get("img_shapes") or ()]
        if not self.shapes or any(one != self.shapes[0] for one in self.shapes):
            raise PlanError(f"img_shapes must be there and alike for all samples, got {self.given.get('img_shapes')}")
        self.pictures: list[Grid] = [(int(f), int(h), int(w)) for f, h, w in self.shapes[0]]
        if sum(map(prod, self.pictures)) != self.total:
            raise PlanError(
                f"pictures of {self.pictures} make {sum(map(prod, self.pictures))} tokens, not {self.total}"
            )
        self.grid = self.pictures[0]
        starts = torch.cat([_places(number, one, self.grid) for number, one in enumerate(self.pictures)], 1)
        starts = starts.to(self.tokens.device)
        self.positions = torch.stack([starts, starts + 1], -1).expand(self.tokens.shape[0], -1, -1, -1)

    def placed(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        own = self.given["img_shapes"]
        references = self.pictures[1:]
        shapes = [[tile.grid, *references] if isinstance(one, list) else tile.grid for one in own]
        return {"img_shapes": shapes}

    def around(self, tile: TokenTile) -> AbstractContextManager[None]:
        if not self.normalize_positions:
            return self.other_rope(partial(self._rows_of_whole, self.places_of(tile)))
        if len(self.pictures) > 1 and self.reference_positions == "shift" and any(_move(tile, self.grid)):
            return self.other_rope(partial(self._shifted_references, tile))
        return nullcontext()

    def _rows_of_whole(self, kept: torch.Tensor, rope: Any, args: Any, kwargs: Any, own: Any) -> Any:
        pictures, text = rope.forward(self.given["img_shapes"], *args[1:], **kwargs)
        return pictures.index_select(0, kept.to(pictures.device)), text

    def _shifted_references(self, tile: TokenTile, rope: Any, args: Any, kwargs: Any, own: Any) -> Any:
        down, across = _move(tile, self.grid)
        parts = [own[0][: len(tile.generated)]]
        for number, (frames, height, width) in enumerate(self.pictures[1:], 1):
            rows, columns = _around_zero(height, down), _around_zero(width, across)
            # one picture around zero that has all rows and columns asked for: the model's own numbers for them
            large = (frames, *(2 * max(abs(index) + 1 for index in indices) for indices in (rows, columns)))
            before = [(1, 1, 1)] * number
            made, _ = rope.forward([[*before, large]], *args[1:], **kwargs)
            cells = made[number:].reshape(*large, -1)
            first = (large[1] // 2 + rows[0], large[2] // 2 + columns[0])
            parts.append(cells[:, first[0] : first[0] + height, first[1] : first[1] + width].flatten(0, 2))
        return torch.cat(parts), own[1]


def _places(number: int, picture: Grid, first: Grid) -> torch.Tensor:
    """Where the tokens of a picture start, `3 N`, counted from the first row and column of the first picture."""
    frames, height, width = picture
    _, down, across = (side - side // 2 for side in first)
    time = torch.arange(frames) if number == 0 else torch.full((frames,), -number)
    rows = torch.arange(height) - (height - height // 2) + down
    columns = torch.arange(width) - (width - width // 2) + across
    return torch.stack(torch.meshgrid(time, rows, columns, indexing="ij")).flatten(1).float()


def _around_zero(side: int, move: int) -> range:
    return range(move - (side - side // 2), move + side // 2)


def _move(tile: TokenTile, grid: Grid) -> tuple[int, int]:
    """By how many rows and columns what the model counts for the tile's tokens differs from what it did before."""
    _, down, across = (
        (region.start + (len(region) - len(region) // 2)) - (side - side // 2)
        for region, side in zip(tile.region, grid, strict=True)
    )
    return -down, -across

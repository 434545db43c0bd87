"""Where the rows of a sharded dim are: `SpatialSpec`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halotile.errors import PlanError
from halotile.geometry import Extents


@dataclass(frozen=True, slots=True)
class SpatialSpec:
    """One sharded dim of a tensor.

    `dim` (counted from the front) consists of `blocks` blocks of `extents.total` rows; each rank owns the same rows
    of every block, those of `extents`. A plain sharded height has one block. More arise when outer dims are merged
    with it: a view of `B T H W C` as `B (T H W) C` has T blocks of H x W rows, and rank r owns its H x W part of each.

    A tensor that is cut along two dims would carry two of these; nothing in here takes it to be the only one.
    """

    dim: int
    extents: Extents
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.blocks < 1:
            raise PlanError(f"a sharded dim counts from the front and has 1 block or more, got {self}")

    @property
    def size(self) -> int:
        """The global size of the dim."""
        return self.blocks * self.extents.total

    def local_size(self, rank: int) -> int:
        """What `rank` has of it."""
        return self.blocks * self.extents.sizes[rank]

    def at(self, dim: int) -> SpatialSpec:
        """The same rows in another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def with_extents(self, extents: Extents) -> SpatialSpec:
        """The same dim, dealt to the ranks in another way."""
        return self if extents == self.extents else replace(self, extents=extents)

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """`rank`'s rows of a whole `tensor` whose `dim` is laid out like this one: a view for one block."""
        rows = self.extents.interval(rank)
        if self.blocks == 1:
            return tensor.narrow(dim, rows.start, len(rows))
        split: torch.Tensor = torch.unflatten(tensor, dim, (self.blocks, self.extents.total))
        return split.narrow(dim + 1, rows.start, len(rows)).flatten(dim, dim + 1)

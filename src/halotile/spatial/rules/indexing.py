"""`x[...] = value`, and elements picked by index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.spatial.move import even_spec, gather, pick_rows
from halotile.spatial.pointwise import rows_for
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


def set_item(x: SpatialTensor, index: Any, value: Any) -> None:
    """`x[index] = value`. One row of the sharded dim is written as a slice of one row, so that its owner writes it."""
    items = list(index) if isinstance(index, tuple) else [index]
    where = _row_number(x, items)
    if where is None:
        torch.Tensor.__setitem__(x, index, value)
        return
    if any(isinstance(item, (torch.Tensor, list, bool)) for item in items):
        # index tensors on both sides of a number change the order of dims
        whole = gather(x, "__setitem__")
        torch.Tensor.__setitem__(whole, index, gather(value, "__setitem__") if is_sharded(value) else value)
        x.copy_(whole)
        return
    row = int(items[where])
    size = x.shape[x.spec.dim]
    if not -size <= row < size:
        raise IndexError(f"index {row} is out of bounds for dimension {x.spec.dim} with size {size}")
    items[where] = slice(row % size, row % size + 1)
    behind = _dims_behind(x, items, where)
    if isinstance(value, torch.Tensor) and value.dim() > behind:
        value = value.unsqueeze(value.dim() - behind)
    torch.Tensor.__setitem__(x, tuple(items), value)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(op: Op, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Index tensors on dims that are not sharded, one on the sharded dim, or sharded ones into a plain tensor."""
    if not isinstance(x, SpatialTensor):
        return _indexed_by_sharded(op, x, indices)
    if any(is_sharded(item) for item in indices):
        return NotImplemented
    found = indexed_spec(x, indices)
    if found is not None:
        return x.like(run(op, x.local, indices), found)
    given = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if len(given) == 1 and given[0][0] == x.spec.dim and _row_list(given[0][1]):
        return index_select(aten.index_select.default, x, *given[0])
    return NotImplemented


@rule(aten.index_select.default)
def index_select(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    """Some indices of a dim. Rows of the sharded dim travel to an even dealing; on CUDA their numbers are not known."""
    dim %= max(x.dim(), 1)
    if not isinstance(x, SpatialTensor):
        if not isinstance(index, SpatialTensor) or index.dim() != 1:
            return NotImplemented
        return index.like(run(op, x, dim, index.local), index.spec.at(dim))
    if isinstance(index, SpatialTensor):
        return NotImplemented
    if dim != x.spec.dim:
        return x.like(run(op, x.local, dim, index))
    if x.spec.blocks > 1 or not _row_list(index):
        return NotImplemented
    size = x.spec.size
    rows = index.tolist()
    if any(not -size <= row < size for row in rows):
        raise IndexError(f"an index of {rows} is out of bounds for dimension {dim} with size {size}")
    picked = even_spec(dim, len(rows), x.ranks.size)
    wanted = [[row % size for row in rows[own.start : own.stop]] for own in picked.extents.intervals]
    return x.like(pick_rows(x, wanted), picked)


@rule(aten.gather.default)
def gather_along(op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool) -> Any:
    """One element for each of an index tensor, along another dim than the sharded one, or out of a plain tensor."""
    sharded = x if isinstance(x, SpatialTensor) else index
    assert isinstance(sharded, SpatialTensor)
    spec, dim = sharded.spec, dim % x.dim()
    if dim == spec.dim:
        if isinstance(x, SpatialTensor):
            return NotImplemented
        return sharded.like(run(op, x, dim, _local(index), sparse_grad))
    if index.shape[spec.dim] != spec.size or x.shape[spec.dim] < spec.size:
        return NotImplemented
    rows = x if isinstance(x, SpatialTensor) else x.narrow(spec.dim, 0, spec.size)
    numbers = rows_for(index, x.dim(), spec, str(op), sharded)
    return sharded.like(run(op, rows_for(rows, x.dim(), spec, str(op), sharded), dim, numbers, sparse_grad), spec)


@rule(aten.embedding.default)
def embedding(op: Op, weight: torch.Tensor, indices: torch.Tensor, *rest: Any) -> Any:
    """Rows of a plain table for sharded numbers."""
    if isinstance(weight, SpatialTensor) or not isinstance(indices, SpatialTensor):
        return NotImplemented
    return indices.like(run(op, weight, indices.local, *rest))


def _indexed_by_sharded(op: Op, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Sharded numbers into a plain tensor: each rank looks up its own."""
    given = [item for item in indices if item is not None]
    if any(item.dtype in (torch.bool, torch.uint8) for item in given):
        return NotImplemented
    sharded = [item for item in given if isinstance(item, SpatialTensor)]
    ndim = max(item.dim() for item in given)
    first = max(sharded, key=lambda item: item.spec.size)
    spec = first.spec.at(first.spec.dim + ndim - first.dim())
    rows = [None if item is None else rows_for(item, ndim, spec, str(op), first) for item in indices]
    dims = [dim for dim, item in enumerate(indices) if item is not None]
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return first.like(run(op, x, rows), spec.at(spec.dim + front))


def indexed_spec(x: SpatialTensor, indices: Sequence[torch.Tensor | None]) -> SpatialSpec | None:
    """Where the rows are in `x[indices]` when no index is on the sharded dim."""
    dims, broadcast = _indexed_dims(indices)
    if x.spec.dim in dims:
        return None
    if dims[-1] - dims[0] == len(dims) - 1:
        return x.spec if x.spec.dim < dims[0] else x.spec.at(x.spec.dim - len(dims) + broadcast)
    # index tensors that are not side by side put their dims in front
    return x.spec.at(x.spec.dim - sum(dim < x.spec.dim for dim in dims) + broadcast)


def _indexed_dims(indices: Sequence[torch.Tensor | None]) -> tuple[list[int], int]:
    """The dims that have an index, and how many dims they make together."""
    dims: list[int] = []
    broadcast, dim = 0, 0
    for item in indices:
        if item is None:
            dim += 1
            continue
        mask = item.dtype in (torch.bool, torch.uint8)
        broadcast = max(broadcast, 1 if mask else item.dim())
        dims += range(dim, dim + (item.dim() if mask else 1))
        dim += item.dim() if mask else 1
    return dims, broadcast


def result_dims(x: SpatialTensor, indices: Sequence[torch.Tensor | None]) -> int:
    """How many dims `x[indices]` has."""
    dims, broadcast = _indexed_dims(indices)
    return x.dim() - len(dims) + broadcast


def _row_list(index: torch.Tensor) -> bool:
    """Whether an index names rows one by one, in numbers that the host has: they decide what is sent."""
    return index.dim() == 1 and index.device.type == "cpu" and index.dtype in (torch.int64, torch.int32)


def _row_number(x: SpatialTensor, items: list[Any]) -> int | None:
    """Which of the items of `x[items]` is a number on the sharded dim, if one is."""
    dim = 0
    for place, item in enumerate(items):
        if item is None or isinstance(item, bool):
            continue
        if item is Ellipsis:
            dim = x.dim() - sum(map(_consumed, items[place + 1 :]))
            continue
        if dim == x.spec.dim and _is_number(item):
            return place
        dim += _consumed(item)
    return None


def _consumed(item: Any) -> int:
    """How many dims an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return int(item.dim()) if mask else 1


def _is_number(item: Any) -> bool:
    return isinstance(item, int) or (hasattr(item, "__index__") and not isinstance(item, torch.Tensor))


def _dims_behind(x: SpatialTensor, items: list[Any], where: int) -> int:
    """How many dims `x[items]` has behind the one of item `where`."""
    rest = items[where + 1 :]
    kept = sum(isinstance(item, slice) or item is None for item in rest)
    taken = sum(map(_consumed, rest))
    return kept + x.dim() - x.spec.dim - 1 - taken


def is_sharded(value: Any) -> bool:
    """Whether a value is a sharded tensor."""
    return isinstance(value, SpatialTensor)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.local if isinstance(value, SpatialTensor) else value

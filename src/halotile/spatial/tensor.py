"""`SpatialTensor`: a tensor of which this rank holds some rows, and which an unmodified model takes for a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from halotile.comm import Ranks
from halotile.errors import PlanError
from halotile.geometry import Extents
from halotile.spatial.ledger import Ledger
from halotile.spatial.spec import SpatialSpec


class Lazy(Protocol):
    """Rows that are made when something asks for them."""

    @property
    def like(self) -> torch.Tensor:
        """A part of what they are made from, of their dtype and device, with their order of dims in memory."""

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """All that they are made from."""

    def from_copy(self) -> Lazy:
        """The same, made from a copy of what they are made from."""

    def make(self) -> torch.Tensor:
        """This rank's rows. All ranks ask, or none: it may communicate."""


class SpatialTensor(torch.Tensor):
    """This rank's rows of one dim of a tensor, and the extents of all ranks. `.shape` is the global shape.

    Operations run through the rules of `halotile.spatial.rules`; one without a rule gathers the tensor, runs on every
    rank and is counted in the ledger. Every rank must run the same operations in the same order.

    >>> x = SpatialTensor.shard(torch.arange(10.0).view(5, 2), Ranks.alone(), dim=0)
    >>> (x + 1).full().sum()
    tensor(55.)
    """

    _local: torch.Tensor | None
    lazy: Lazy | None
    """how to make the rows, where nobody has asked for them yet"""
    spec: SpatialSpec
    ledger: Ledger

    # torch functions decompose as for a plain tensor; only what reaches the dispatcher is ours
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor | Lazy,
        spec: SpatialSpec,
        ledger: Ledger,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> SpatialTensor:
        """Wrap this rank's rows, or how to make them (then `shape` is the global shape).

        `strides` are the global ones of a view: they follow from those of what it shows. Else they are those of the
        local memory where all ranks have two rows or more; of fewer a tensor has no order of dims that all ranks could
        agree on, so it is made contiguous.
        """
        like = local if isinstance(local, torch.Tensor) else local.like
        size = list(local.shape if isinstance(local, torch.Tensor) else shape or ())
        size[spec.dim] = spec.size
        if strides is None and min(spec.extents.sizes) > 1:
            strides = _mirrored(tuple(like.shape), like.stride(), tuple(size))
        elif strides is None:
            strides = _contiguous(size)
            if isinstance(local, torch.Tensor):
                local = local.contiguous()
        tensor: SpatialTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=like.dtype, device=like.device, requires_grad=False
        )
        tensor.spec = spec
        tensor.ledger = ledger
        if isinstance(local, torch.Tensor):
            tensor._local, tensor.lazy = local, None
            assert local.shape[spec.dim] == spec.local_size(ledger.ranks.rank), (tuple(local.shape), spec)
        else:
            tensor._local, tensor.lazy = None, local
            ledger.unmade[id(tensor)] = tensor
        if spec.blocks == 1 and spec.extents.total > 1:
            ledger.layouts[len(size), spec.dim, size[spec.dim]] = spec.extents
        return tensor

    @classmethod
    def shard(
        cls, tensor: torch.Tensor, ranks: Ranks, dim: int = -2, extents: Extents | None = None, strict: bool = False
    ) -> SpatialTensor:
        """Shard a tensor that every rank has: `dim` (height by default) is dealt evenly, or by `extents`.

        Raises PlanError for a dim that is none, or extents of another total or number of ranks.
        """
        if not -tensor.dim() <= dim < tensor.dim():
            raise PlanError(f"dim {dim} is not one of a tensor of shape {tuple(tensor.shape)}")
        spec = _planned(dim % tensor.dim(), tensor.shape[dim], ranks, extents)
        local = spec.take(tensor.detach(), spec.dim, ranks.rank).clone()
        return cls(local, spec, Ledger(ranks, strict), None, copied_strides(tensor))

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows; shared memory, not a copy."""
        if self._local is None:
            assert self.lazy is not None
            made = self.lazy.make()
            self._local, self.lazy = made, None
            self.ledger.unmade.pop(id(self), None)
            assert self._local.shape[self.spec.dim] == self.spec.local_size(self.ranks.rank)
        return self._local

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold the rows."""
        return self.ledger.ranks

    def full(self) -> torch.Tensor:
        """The whole tensor, on every rank. All ranks must call it. Not counted as a gather: it was asked for."""
        from halotile.spatial.move import whole

        return whole(self)

    def redistribute(self, extents: Extents) -> SpatialTensor:
        """The same tensor with other rows on each rank; only rows that change hands travel. All ranks must call it.

        Raises PlanError for extents of another total or number of ranks.
        """
        from halotile.spatial.move import redistribute

        _planned(self.spec.dim, self.spec.extents.total, self.ranks, extents)
        return redistribute(self, extents)

    def like(
        self, local: torch.Tensor, spec: SpatialSpec | None = None, strides: Sequence[int] | None = None
    ) -> SpatialTensor:
        """Another tensor of the same ledger, by default sharded in the same way; with `strides`, a view of this one."""
        return SpatialTensor(local, self.spec if spec is None else spec, self.ledger, None, strides)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from halotile.spatial.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialTensor:
        """A copy of the rows, of the same ledger."""
        return self.like(self.local.clone(), None, copied_strides(self))

    def __setitem__(self, index: Any, value: Any) -> None:
        from halotile.spatial.rules.indexing import set_item

        set_item(self, index, value)

    def __repr__(self) -> str:  # type: ignore[override]
        """Never gathers: a debugger that prints on one rank must not wait for the others."""
        return (
            f"SpatialTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, dim={self.spec.dim}, "
            f"extents={self.spec.extents.sizes}, blocks={self.spec.blocks}, rank={self.ranks.rank})"
        )


def copied_strides(tensor: torch.Tensor, memory_format: torch.memory_format | None = None) -> tuple[int, ...]:
    """The global strides of a copy of `tensor`, as torch makes it: dense, with the same order of dims by default."""
    return _copied_strides(tuple(tensor.shape), tensor.stride(), memory_format or torch.preserve_format)


@lru_cache(maxsize=8192)
def _copied_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], memory_format: torch.memory_format
) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta"), memory_format=memory_format).stride()


def _planned(dim: int, total: int, ranks: Ranks, extents: Extents | None) -> SpatialSpec:
    planned = Extents.even(total, ranks.size) if extents is None else extents
    if planned.ranks != ranks.size or planned.total != total:
        raise PlanError(
            f"extents {planned.sizes} are {planned.total} rows on {planned.ranks} ranks; the tensor has {total} rows "
            f"along dim {dim}, the group {ranks.size} ranks"
        )
    return SpatialSpec(dim, planned)


@lru_cache(maxsize=8192)
def _mirrored(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Global strides with the order of dims in memory that local `sizes` and `strides` have.

    Claiming contiguous strides for a permuted local makes `.contiguous()` do nothing, and kernels read garbage. A
    local that is not dense stays not dense, so that `.contiguous()` and `view` see it, too.
    """
    order = sorted(range(len(sizes)), key=lambda d: (strides[d], -d))
    mirrored, dense, reached, expected = [0] * len(sizes), 1, 1, 1
    for d in order:
        if sizes[d] > 1 and strides[d] == 0:
            continue
        if sizes[d] > 1 and strides[d] > expected:
            # a gap: as many times larger as locally, rounded up
            dense = reached * -(-strides[d] // expected)
        mirrored[d] = dense
        dense *= max(shape[d], 1)
        reached = dense
        if sizes[d] > 1:
            expected = strides[d] * sizes[d]
    return mirrored


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]

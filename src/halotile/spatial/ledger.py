"""What the sharded tensors of one piece of work share: their ranks, and the account of what was gathered."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from halotile.comm import Ranks
from halotile.errors import UnsupportedError
from halotile.geometry import Extents
from halotile.spatial.spec import SpatialSpec

if TYPE_CHECKING:
    from halotile.spatial.tensor import SpatialTensor


class Ledger:
    """One a decode. With `strict`, an operation that would have to gather raises UnsupportedError, on every rank."""

    def __init__(self, ranks: Ranks, strict: bool = False) -> None:
        self.ranks = ranks
        self.strict = strict
        self.gathers: Counter[str] = Counter()
        """operation without a rule -> how often a whole tensor was gathered for it"""
        self.attention_gathers = 0
        """how often the keys and values of an attention were gathered"""
        self.unmade: WeakValueDictionary[int, SpatialTensor] = WeakValueDictionary()
        """tensors whose rows are yet to be made, by id"""
        self.inside = False
        """whether an operation on sharded tensors is under way: what it makes for itself is plain"""
        self.layouts: dict[tuple[int, int, int], Extents] = _LatestLast()
        """(dims, dim, size) -> how such a tensor was last sharded; for buffers that are made to hold one"""
        self.copies: WeakKeyDictionary[torch.UntypedStorage, weakref.ref[torch.UntypedStorage]] = WeakKeyDictionary()
        """memory of copies that stand for views -> that of what they should be views of"""
        self.stale: WeakSet[torch.UntypedStorage] = WeakSet()
        """memory of copies whose original has been written to since"""
        self.rounded = False
        """whether sums of several ranks went into the work: then its bits are no longer those of one rank"""
        self.closed = False
        """whether the call is over: then the ranks no longer run the same operations"""

    def gathered(self, operation: str, why: str = "has no rule for sharded rows") -> None:
        """Count one gather. Raises UnsupportedError under `strict`."""
        if self.strict:
            raise UnsupportedError(
                f"{operation} {why}, so the whole tensor would have to be gathered on every rank, and strict=True "
                "forbids that; without strict it is done, counted, and named in the report's gathers"
            )
        self.gathers[operation] += 1

    def keep_view(self, result: torch.Tensor | Sequence[torch.Tensor], original: torch.Tensor) -> None:
        """Remember that `result` is a copy that stands for a view of `original`, a rank's rows.

        What is written to it would be lost, and what is written to the original would not be seen in it.
        """
        for part in [result] if isinstance(result, torch.Tensor) else result:
            self.copies[part.untyped_storage()] = weakref.ref(original.untyped_storage())

    def outdate(self, written: torch.UntypedStorage) -> None:
        """`written` is about to be written to: copies of it that stand for views are not to be used any more."""
        self.stale.update(copy for copy, original in list(self.copies.items()) if original() is written)

    def spec_for(self, size: Sequence[int]) -> SpatialSpec | None:
        """How the last tensor like one of `size` was sharded; None when there was none, or for fewer than 3 dims."""
        dims = len(size)
        if dims < 3:
            return None
        known = [(dims, dim, rows) for dim, rows in enumerate(size) if (dims, dim, rows) in self.layouts]
        if not known:
            return None
        latest = known[0] if len(known) == 1 else next(key for key in reversed(self.layouts) if key in known)
        return SpatialSpec(latest[1], self.layouts[latest])

    def settle(self, written: torch.UntypedStorage) -> None:
        """Before `written` is written to: rows that are yet to be made from it are to be made from a copy.

        A copy, and not the rows: making them may take messages, and which tensors are still alive differs by rank.
        """
        for tensor in list(self.unmade.values()):
            lazy = tensor.lazy
            if lazy is not None and any(source.untyped_storage() is written for source in lazy.sources):
                tensor.lazy = lazy.from_copy()


class _LatestLast(dict[tuple[int, int, int], Extents]):
    """A dict whose order is that of the last writes."""

    def __setitem__(self, key: tuple[int, int, int], value: Extents) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)

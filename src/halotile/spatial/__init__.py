"""Sharded tensors: an unmodified model takes one for a whole tensor, and works on this rank's rows."""

from halotile.spatial import rules as _rules  # noqa: F401  # registers them
from halotile.spatial.ledger import Ledger
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

__all__ = ["Ledger", "SpatialSpec", "SpatialTensor"]

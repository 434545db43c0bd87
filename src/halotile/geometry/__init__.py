"""Integers only: which rows, tiles and shards there are. No tensors, no torch, no numpy."""

from __future__ import annotations

from halotile.geometry.extents import Extents
from halotile.geometry.field import field_rows, rows_by_source
from halotile.geometry.grid import Tile, TileGrid
from halotile.geometry.interval import Interval
from halotile.geometry.tiling import DimTiling, tile_by_count, tile_by_loop, tile_by_size

__all__ = [
    "DimTiling",
    "Extents",
    "Interval",
    "Tile",
    "TileGrid",
    "field_rows",
    "rows_by_source",
    "tile_by_count",
    "tile_by_loop",
    "tile_by_size",
]

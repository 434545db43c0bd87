"""The five paths: two ranks decode what one rank does, whichever way they share the work; and a way that must fail.

Tiled below the automatic threshold, tiled with sharding forced, height split, framewise, in chunks; and tiled above the
threshold. five_paths.py says what each is, and which class has no such path.
"""

from __future__ import annotations

import five_paths as paths
import pytest
import torch
from five_paths import CASES, HUNYUAN, KINDS, KL, LARGE, LTX2, MISSING, PATHS, RANKS, STRIDE, WAN, WINDOW
from ranks import run_ranks
from tiny_vaes import decode

from halotile.comm import Ranks
from halotile.geometry import Extents
from halotile.spatial import Ledger, SpatialSpec, SpatialTensor
from halotile.spatial.mode import SpatialMode


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_two_ranks_equal_one(kind, name):
    comparison, reports = paths.measure(kind, name)
    comparison.check(PATHS[name].bitwise)
    assert [report.strategy for report in reports] == [PATHS[name].runs] * RANKS
    tiles = {report.tiles for report in reports}
    assert tiles == {1} if PATHS[name].runs in ("shard", "serial") else min(tiles) > 1


def test_a_path_is_missing_only_where_the_class_has_no_frames():
    assert len(CASES) + len(MISSING) == len(KINDS) * len(PATHS)
    assert {kind for kind, _ in MISSING} == {KL}


# --- sharded layers inside of a tile loop, which must never be


def _mixed(group, kind, x):
    """Every rank runs the whole tile loop, while each layer takes the rank's whole tile for its own rows of two."""
    vae, ranks = paths.build(kind, True, False), Ranks.of(group)
    own = vae.decoder.forward

    def take_tiles_for_rows(tile, *args, **kwargs):
        spec = SpatialSpec(tile.dim() - 2, Extents((tile.shape[-2],) * ranks.size))
        ledger = Ledger(ranks, strict=True)
        with SpatialMode(ledger):
            return own(SpatialTensor(tile.clone(), spec, ledger), *args, **kwargs).local

    vae.decoder.forward = take_tiles_for_rows
    try:
        with torch.no_grad():
            return decode(vae, kind, x)
    finally:
        del vae.decoder.forward


@pytest.mark.parametrize("kind", [LTX2, KL, WAN, HUNYUAN])
def test_the_comparison_sees_sharded_layers_in_a_tile_loop(kind):
    """Not MiniMax-H3: its decoder gathers whole tiles, and so gives two of them."""
    x = paths.latents(kind, LARGE, clip=False)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) / 5
    # from dark to bright within a tile, so that its top and its bottom have little in common
    x += torch.linspace(-3, 3, WINDOW).repeat(LARGE // STRIDE)[:LARGE, None]
    with torch.no_grad():
        expected = decode(paths.build(kind, True, False), kind, x)
    outs = run_ranks(_mixed, RANKS, kind, x)
    comparison = paths.compare(outs, expected)
    with pytest.raises(AssertionError, match="the ranks have different results"):
        comparison.check(bitwise=False)
    half_of_range = float(expected.max() - expected.min()) / 2
    assert max(comparison.errors) * float(expected.abs().max()) > half_of_range
    assert min(comparison.errors) > 1000 * paths.TOLERANCE
    # a seam: rank 0 gave rank 1 the bottom of its copy of the first tile, as what is above rank 1's copy
    seam = expected.shape[-2] // LARGE
    assert float((outs[1] - expected)[..., :seam, :].abs().max()) > half_of_range

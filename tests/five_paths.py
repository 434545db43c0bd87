"""The five ways in which two ranks share a decode, for five kinds of autoencoder: what runs, and what it must equal.

Shared by tests/test_five_paths.py and tools/paths_report.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tiny_vaes as tiny
import torch
from ranks import run_ranks
from sharded import TOLERANCE, relative_error

import halotile
from halotile.families import FAMILIES, set_window

LTX2, KL, WAN = "AutoencoderKLLTX2Video", "AutoencoderKL", "AutoencoderKLWan_2.1"
HUNYUAN, MINIMAX = "AutoencoderKLHunyuanVideo", "AutoencoderKLMiniMaxH3"
KINDS = (LTX2, KL, WAN, HUNYUAN, MINIMAX)
RANKS = 2
WINDOW, STRIDE, WIDTH = 6, 4, 4
SMALL, LARGE = 8, 14
"""Latent rows. A tile has 6 x 4 latents: 4 rows of 4 are fewer, 7 rows of 4 are more."""
CLIP = {LTX2: 4, WAN: 3, HUNYUAN: 4, MINIMAX: 14}
"""Latent frames for the loop over frames: more than one of its windows, or of Wan's single frames."""


@dataclass(frozen=True)
class Path:
    """One way. `tiling`: of the VAE that is called. `against`: one rank's call is tiled. `runs`: what is to run."""

    strategy: str
    runs: str
    tiling: bool
    against: bool
    height: int = SMALL
    clip: bool = False
    chunks: bool = False
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def bitwise(self) -> bool:
        """Whether the same kernels run on the same shapes as on one rank."""
        return self.runs in ("serial", "tile")


PATHS = {
    "tiled, below the threshold": Path("auto", "shard", tiling=True, against=False),
    "tiled, above the threshold": Path("auto", "tile", tiling=True, against=True, height=LARGE),
    "tiled, sharding forced": Path("shard", "shard", tiling=True, against=False, height=LARGE),
    "tiled, hybrid forced": Path("hybrid", "hybrid", tiling=True, against=True, own={"shards_per_tile": 2}),
    "height split": Path("shard", "shard", tiling=False, against=False),
    "framewise, below the threshold": Path("auto", "shard", tiling=True, against=False, clip=True),
    "framewise, tile": Path("tile", "tile", tiling=True, against=True, clip=True),
    "framewise, shard": Path("shard", "shard", tiling=False, against=False, clip=True),
    "chunks, below the threshold": Path("auto", "shard", tiling=True, against=False, clip=True, chunks=True),
    "chunks, serial": Path("serial", "serial", tiling=False, against=False, clip=True, chunks=True),
    "chunks, tile": Path("tile", "tile", tiling=True, against=True, clip=True, chunks=True),
    "chunks, shard": Path("shard", "shard", tiling=False, against=False, clip=True, chunks=True),
}
MISSING = {(KL, name): "a picture has no frames" for name, path in PATHS.items() if path.clip}
"""(kind, path) -> why the class does not have it"""
CASES = [(kind, name) for kind in KINDS for name in PATHS if (kind, name) not in MISSING]


@dataclass(frozen=True)
class Comparison:
    """What the ranks got against one rank: `errors` over the largest value, a rank; `alike`: the same bits on all."""

    errors: tuple[float, ...]
    alike: bool

    def check(self, bitwise: bool) -> None:
        """Raise AssertionError unless all ranks have the result: its bits, or to float32 rounding (see TOLERANCE)."""
        assert self.alike, "the ranks have different results"
        assert max(self.errors) <= (0.0 if bitwise else TOLERANCE), f"errors {self.errors}"


def compare(results: list[torch.Tensor], expected: torch.Tensor) -> Comparison:
    """The comparison that every path must pass."""
    errors = tuple(relative_error(result, expected) for result in results)
    return Comparison(errors, all(torch.equal(result, results[0]) for result in results))


def measure(kind: str, name: str) -> tuple[Comparison, list[halotile.DecodeReport]]:
    """One path on two gloo ranks against one rank; and each rank's report (of chunks, the last one's)."""
    outs, reports = zip(*run_ranks(_on_a_rank, RANKS, kind, name), strict=True)
    path = PATHS[name]
    return compare(list(outs), alone(kind, path.against, path.height, path.clip)), list(reports)


@cache
def alone(kind: str, tiling: bool, height: int, clip: bool) -> torch.Tensor:
    """What one rank computes without halotile."""
    with torch.no_grad():
        return tiny.decode(build(kind, tiling, clip), kind, latents(kind, height, clip))


# a process follows a network with fake tensors once, and not once a test
@cache
def build(kind: str, tiling: bool, clip: bool) -> Any:
    """A tiny VAE of this kind; for clips, its loop over frames has windows of 3 (+ 1) latent frames every 2."""
    vae = tiny.build(kind)
    if hasattr(vae, "use_framewise_decoding"):
        vae.use_framewise_decoding = clip
        ratio = vae.temporal_compression_ratio
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 3 * ratio, 2 * ratio
    ratio = FAMILIES[type(vae).__name__].ratio(vae)
    set_window(vae, WINDOW * ratio, STRIDE * ratio)
    vae.use_tiling = tiling
    return vae


def latents(kind: str, height: int, clip: bool) -> torch.Tensor:
    """Latents of this kind, `B C H W` or `B C F H W`."""
    shape = list(tiny.CONFIGS[kind][2])
    shape[-2:] = [height, WIDTH]
    if clip:
        shape[2] = CLIP[kind]
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _on_a_rank(group: Any, kind: str, name: str) -> tuple[torch.Tensor, halotile.DecodeReport]:
    path = PATHS[name]
    vae, x = build(kind, path.tiling, path.clip), latents(kind, path.height, path.clip)
    if path.chunks:
        decoder = halotile.ChunkDecoder(vae, group, path.strategy, **path.own)
        parts = [decoder.push(part) for part in x.split(2, dim=2)]
        out, report = torch.cat([*parts, decoder.finish()], dim=2), decoder.report.last
    else:
        with torch.no_grad(), halotile.parallelize(vae, group, path.strategy, **path.own) as handle:
            out = tiny.decode(vae, kind, x)
        report = handle.report
    assert vae.use_tiling == path.tiling, "the VAE's tiling is not as it was"
    return out, report

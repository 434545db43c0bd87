"""Wall time of a tiled forward over ranks as a ratio of the whole-frame one, from interleaved runs.

    python bench/denoise_ratio.py [--ranks 2] [--rounds 7] [--side 96] [--tiles 4] [--overlap 4]

A transformer of random weights (blocks of full attention and of a layer for each token) runs on a square grid of
tokens. Every round times, on an otherwise idle machine and with one thread a process: the model on all tokens, on one
rank, and `TiledDenoiser` with tiles x tiles tiles over the ranks. Printed are the median, least and largest ratio of a
round; beside them the one that is predicted from multiplications, those of the rank with the most against those of the
whole, and the same of attention alone, the limit of many tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import halotile
from halotile.denoise import plan_tokens
from halotile.planning import deal, loads_of


class Transformer(nn.Module):
    """Blocks of attention between all tokens, and of a layer for each; positions are added at the start."""

    def __init__(self, depth: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.heads = heads
        self.inside, self.places, self.outside = nn.Linear(depth, width), nn.Linear(3, width), nn.Linear(width, depth)
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.after = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.single = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.inside(tokens) + self.places(positions.mean(-1).transpose(1, 2) / 32)
        for attention, after, single in zip(self.attention, self.after, self.single, strict=True):
            heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in attention(x).chunk(3, -1))
            x = x + after(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
            x = x + single(x)
        return self.outside(x)


def multiplications(tokens: int, args: argparse.Namespace) -> tuple[int, int]:
    """Of a block on `tokens` tokens: all, and those of attention between tokens alone."""
    attention = 2 * tokens**2 * args.width
    return attention + 12 * tokens * args.width**2, attention


def predicted(args: argparse.Namespace, kept: list[int]) -> tuple[float, float]:
    """The ratio of the rank with the most to the whole, by all multiplications and by those of attention."""
    owners = deal([tokens**2 for tokens in kept], args.ranks)
    whole = multiplications(args.side**2, args)
    ratios = []
    for kind in range(2):
        costs = [multiplications(tokens, args)[kind] for tokens in kept]
        ratios.append(max(loads_of(costs, owners, args.ranks)) / whole[kind])
    return ratios[0], ratios[1]


@torch.no_grad()
def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank's share of all rounds; rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(args.depth, args.width, args.heads, args.blocks).eval()
    grid = (1, args.side, args.side)
    tokens = torch.randn(1, args.side**2, args.depth)
    corners = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    starts = torch.stack(corners).flatten(1)[None]
    positions = torch.stack([starts, starts + 1], -1)
    dim = halotile.DimensionTilingConfig(args.tiles, args.overlap)
    tiling = halotile.TileCountConfig(height=dim, width=dim)
    denoiser = halotile.TiledDenoiser(model, tiling)
    rounds: list[tuple[float, float]] = []
    for _ in range(args.rounds + 1):
        whole = 0.0
        dist.barrier()
        if rank == 0:
            started = time.perf_counter()
            model(tokens, positions)
            whole = time.perf_counter() - started
        dist.barrier()
        started = time.perf_counter()
        denoiser(tokens, positions, grid=grid)
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rounds.append((float(slowest), whole))
    if rank == 0:
        kept = [len(tile.kept) for tile in plan_tokens(grid, tiling, None, args.side**2).tiles]
        show(args, rounds[1:], kept, denoiser.report)
    dist.destroy_process_group()


def show(
    args: argparse.Namespace, rounds: list[tuple[float, float]], kept: list[int], report: halotile.DenoiseReport
) -> None:
    """Print the ratios of all rounds but the first, which warms up."""
    ratios = [tiled / whole for tiled, whole in rounds]
    everything, attention = predicted(args, kept)
    print(
        f"{args.side**2} tokens; {len(kept)} tiles of {min(kept)} to {max(kept)} tokens on {args.ranks} ranks, loads "
        f"{report.loads}; width {args.width}, {args.blocks} blocks; {len(rounds)} rounds"
    )
    print("seconds of the whole frame: " + ", ".join(f"{whole:.3f}" for _, whole in rounds))
    print("seconds of the tiles: " + ", ".join(f"{tiled:.3f}" for tiled, _ in rounds))
    print(f"ratio: {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")
    print(f"predicted: {everything:.4f} by all multiplications, {attention:.4f} by those of attention")


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", type=int, default=96, help="tokens along height and width")
    parser.add_argument("--tiles", type=int, default=4, help="tiles along height and width")
    parser.add_argument("--overlap", type=int, default=4)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()

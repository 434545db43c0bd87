"""Wall time of a tiled decode over ranks as a ratio of the plain tiled decode, from interleaved runs.

    python bench/tile_ratio.py [--ranks 2] [--rounds 7] [--size 512] [--model kl|photo]

Every round times, one by one and on an otherwise idle machine: the VAE's own tiled decode on one rank with one thread,
the same with as many threads as there are ranks, and the decode over the ranks with one thread each. Printed are the
median, least and largest ratio of a round, CPU seconds, and the traffic beside the least that is possible: each rank's
results sent once to each other rank, in one message each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import halotile
from halotile.families import set_window


def build(model: str) -> Any:
    """The VAE to time: the one that ships with halotile, or a wider one with random weights."""
    if model == "photo":
        folder = os.path.join(os.path.dirname(halotile.__file__), "data", "photo_vae")
        return diffusers.AutoencoderKL.from_pretrained(folder).eval().requires_grad_(False)
    torch.manual_seed(0)
    return (
        diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(64, 128, 256, 256),
            latent_channels=4,
            norm_num_groups=32,
        )
        .eval()
        .requires_grad_(False)
    )


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank's share of all rounds; rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    vae = build(args.model)
    set_window(vae, args.tile, args.stride)
    side = args.size // 8
    latents = torch.randn(1, vae.config.latent_channels, side, side, generator=torch.Generator().manual_seed(0))
    rounds: list[dict[str, float]] = []
    reports = []
    for _ in range(args.rounds + 1):
        row: dict[str, float] = {}
        for name, threads in (("one", 1), ("many", args.ranks)):
            dist.barrier()
            if rank == 0:
                torch.set_num_threads(threads)
                row[name], row[f"{name} cpu"] = timed(lambda: plain.append(vae.decode(latents).sample))
        torch.set_num_threads(1)
        with halotile.parallelize(vae, strategy="tile") as handle:
            dist.barrier()
            row["ranks"], cpu = timed(lambda: dealt.append(vae.decode(latents).sample))
        total = torch.tensor([cpu], dtype=torch.float64)
        dist.all_reduce(total)
        row["ranks cpu"] = float(total)
        if rank == 0:
            assert torch.equal(dealt[-1], plain[0]), "not bitwise equal"
        plain.clear()
        dealt.clear()
        rounds.append(row)
        reports.append(handle.report)
    if rank == 0:
        show(args, rounds[1:], reports[-1], latents.dtype.itemsize)
    dist.destroy_process_group()


plain: list[torch.Tensor] = []
dealt: list[torch.Tensor] = []


def show(args: argparse.Namespace, rounds: list[dict[str, float]], report: Any, itemsize: int) -> None:
    """Print ratios of rounds (the first, which warms up, is left out) and the traffic of rank 0."""
    print(
        f"{args.model}: {args.size} x {args.size} px, window {args.tile}, stride {args.stride}: {report.tiles} tiles, "
        f"loads {report.loads}, heaviest over all {max(report.loads) / sum(report.loads):.3f}; {len(rounds)} rounds"
    )
    for title, over, under in (
        (f"wall, {args.ranks} ranks x 1 thread / plain, 1 thread", "ranks", "one"),
        (f"wall, {args.ranks} ranks x 1 thread / plain, {args.ranks} threads", "ranks", "many"),
        ("CPU seconds of all ranks / plain, 1 thread", "ranks cpu", "one cpu"),
    ):
        ratios = [row[over] / row[under] for row in rounds]
        print(f"{title}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print("seconds of the plain decode, 1 thread: " + ", ".join(f"{row['one']:.2f}" for row in rounds))
    others = args.ranks - 1
    least = report.loads[0] * 64 * 3 * itemsize * others
    print(
        f"rank 0 sent {report.messages} messages of at least {others}, {report.bytes_sent} bytes of at least {least}, "
        f"and took part in {report.collectives} agreements"
    )


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--tile", type=int, default=256)
    parser.add_argument("--stride", type=int, default=192)
    parser.add_argument("--model", choices=("kl", "photo"), default="kl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()

"""How good the choice of `strategy="auto"` is: every strategy that can run, measured on ten shapes, beside the choice.

    python bench/auto_choice.py [--ranks 2] [--rounds 3]

Ranks of one thread; first the class is calibrated, in a cache of this run's own. Every round runs every strategy once,
in turn; the least time of a strategy counts, of the slowest rank. Printed are the measured seconds of each (in brackets
where a rank would hold more than the window that is set), those that were predicted for the choice, and the choice's
time over that of the best one that may run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shard_cases import CASES

import halotile
from halotile.families import set_window


@dataclass(frozen=True)
class Shape:
    """A decode: the model, latents along height and width, and the window and stride in latents where tiling is on."""

    case: str
    height: int
    width: int
    window: tuple[int, int] | None = None


SHAPES = [
    Shape("kl", 4, 4),
    Shape("kl", 16, 16),
    Shape("kl", 32, 48),
    Shape("kl", 48, 32, (32, 24)),
    Shape("kl", 64, 32, (16, 12)),
    Shape("kl", 24, 64, (64, 48)),
    Shape("ltx2", 4, 6),
    Shape("ltx2", 12, 12),
    Shape("ltx2", 16, 16, (8, 6)),
    Shape("ltx2", 16, 12, (16, 12)),
]


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HALOTILE_CACHE"] = folder
        os.environ["OMP_NUM_THREADS"] = "1"
        mp.spawn(rank_main, (args, os.path.join(folder, "store")), nprocs=args.ranks)


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank's share; rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for name in dict.fromkeys(shape.case for shape in SHAPES):
        models[name], latents = CASES[name].build(1)
        rates = halotile.calibrate(models[name], tuple(latents.shape))
        if rank == 0:
            print(f"{CASES[name].title}: {rates}")
    good = 0
    if rank == 0:
        print("| latents | tiling | serial, s | shard, s | tile, s | chosen | predicted, s | over the best |")
        print("| --- " * 8 + "|")
    for shape in SHAPES:
        times, refused, chosen, predicted = measure(models[shape.case], shape, args)
        ratio = times[chosen] / min(seconds for name, seconds in times.items() if name not in refused)
        good += ratio <= 1.15
        if rank == 0:
            cells = [
                "" if name not in times else f"({times[name]:.2f})" if name in refused else f"{times[name]:.2f}"
                for name in ("serial", "shard", "tile")
            ]
            window = "off" if shape.window is None else f"{shape.window[0]}, every {shape.window[1]}"
            what = f"{shape.case}, {shape.height} x {shape.width}"
            print(f"| {what} | {window} | {' | '.join(cells)} | {chosen} | {predicted:.2f} | {ratio:.2f} |")
    if rank == 0:
        print(f"{good} of {len(SHAPES)} choices within 15 % of the best")
    dist.destroy_process_group()


def measure(vae: Any, shape: Shape, args: argparse.Namespace) -> tuple[dict[str, float], set[str], str, float]:
    """Seconds of each strategy, those whose rows are too many, what auto chose, and what was predicted for that."""
    lead = CASES["kl"].latents[:-2] if vae.__class__.__name__ == "AutoencoderKL" else CASES["ltx2"].latents[:-2]
    latents = torch.randn(1, *lead, shape.height, shape.width, generator=torch.Generator().manual_seed(2))
    vae.use_tiling = False
    if shape.window is not None:
        ratio = halotile.families.FAMILIES[type(vae).__name__].ratio(vae)
        set_window(vae, *(side * ratio for side in shape.window))
    found = halotile.explain(vae, tuple(latents.shape), args.ranks)
    refused = {each.name for each in found.predictions if "largest tile" in each.refused}
    strategies = ["serial", "shard"] + ["tile"] * vae.use_tiling
    times: dict[str, float] = {}
    with torch.no_grad():
        with halotile.parallelize(vae) as handle:
            vae.decode(latents)
        report = handle.report
        assert report is not None
        for number in range(args.rounds + 1):
            for strategy in strategies:
                dist.barrier()
                started = time.perf_counter()
                halotile.decode(vae, latents, strategy=strategy)
                taken = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                if number:
                    times[strategy] = min(float(taken), times.get(strategy, float("inf")))
    return times, refused, report.strategy, report.predicted_seconds or 0.0


if __name__ == "__main__":
    main()

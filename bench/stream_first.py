"""When the first frames of a streamed clip are there, as a share of the whole decode's wall time.

    python bench/stream_first.py [--ranks 2] [--rounds 5] [--tiles 4] [--overlap 1] [--height 40] [--width 48]

Every round, on ranks of one thread: a `stream` of the clip model that ships with halotile (13 latent frames), and the
same tiles by `decode(..., deliver="driver")`. Printed are medians, least and largest over rounds (one more warms up):
the time to the first batch and to each later one over the stream's whole, and the stream's whole over the decode's.
At 20 x 24 latents the first tile (4 frames) falls to torch's slow convolution kernel, as a plain decode of it does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import halotile

FOLDER = Path(halotile.__file__).parent / "data" / "video_vae"


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank's share of all rounds; rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    vae = diffusers.AutoencoderKLLTX2Video.from_pretrained(FOLDER, low_cpu_mem_usage=False).eval()
    latents = torch.randn(1, 32, 13, args.height, args.width, generator=torch.Generator().manual_seed(0))
    tiling = halotile.TileCountConfig(frames=halotile.DimensionTilingConfig(args.tiles, args.overlap))
    rounds = []
    for _ in range(args.rounds + 1):
        dist.barrier()
        started, seen, batches = time.perf_counter(), [], []
        with torch.no_grad():
            for batch in halotile.stream(vae, latents, tiling=tiling):
                seen.append(time.perf_counter() - started)
                batches.append(batch)
            dist.barrier()
            started = time.perf_counter()
            whole = halotile.decode(vae, latents, tiling=tiling, deliver="driver")
        if rank == 0:
            assert whole is not None
            assert torch.equal(torch.cat(batches, 2), whole), "not bitwise equal"
            rounds.append((*(at / seen[-1] for at in seen), seen[-1] / (time.perf_counter() - started), seen[-1]))
    if rank == 0:
        names = [f"batch {i}" for i in range(args.tiles)] + ["stream / decode", "seconds of the stream"]
        print(f"{args.ranks} ranks, {tuple(latents.shape)}, {args.tiles} tiles of frames, overlap {args.overlap}")
        for name, values in zip(names, zip(*rounds[1:], strict=True), strict=True):
            print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("rounds", 5), ("tiles", 4), ("overlap", 1), ("height", 40), ("width", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()

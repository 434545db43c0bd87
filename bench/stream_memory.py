"""Peak resident memory of each rank of a stream, for a clip and for one that is some times longer.

    python bench/stream_memory.py [--ranks 2] [--times 4] [--frames 13] [--height 80] [--width 96] [--carrier group]

Tiles of 16 frames, sharing 4, of the clip model that ships with halotile; rank 0 drives, and drops every batch once it
has it. Printed, for each rank and each length, is the highest VmHWM of the process (private and shared pages), in new
processes, less what it was before the stream, and the ratio of the two lengths. Linux only: VmHWM is read from /proc.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import halotile
from halotile.comm import Mailbox

FOLDER = Path(halotile.__file__).parent / "data" / "video_vae"


def high_water() -> int:
    """The most resident memory of this process since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def rank_main(
    rank: int, args: argparse.Namespace, frames: int, store: str, mailbox: Mailbox | None, out: Queue[Any]
) -> None:
    """One rank's share of the stream; puts its rank and bytes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    vae = diffusers.AutoencoderKLLTX2Video.from_pretrained(FOLDER, low_cpu_mem_usage=False).eval()
    latents = torch.randn(1, 32, frames, args.height, args.width, generator=torch.Generator().manual_seed(0))
    tiling = halotile.TileSizeConfig(frames=halotile.DimensionSizeConfig(16, 4))
    dist.barrier()
    # resets VmHWM, see proc_pid_clear_refs(5)
    Path("/proc/self/clear_refs").write_text("5")
    before, count = high_water(), 0
    for batch in halotile.stream(vae, latents, tiling=tiling, mailbox=mailbox):
        count += batch.shape[2]
        del batch
    dist.barrier()
    assert rank or count == 1 + 4 * (frames - 1), f"{count} frames"
    out.put((rank, high_water() - before))
    dist.destroy_process_group()


def peaks(args: argparse.Namespace, frames: int) -> list[int]:
    """The peak of each rank, in bytes."""
    context = mp.get_context("spawn")
    out: Queue[Any] = context.Queue()
    mailbox = Mailbox() if args.carrier == "mailbox" else None
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(rank_main, (args, frames, store, mailbox, out), nprocs=args.ranks)
        found = dict(out.get() for _ in range(args.ranks))
    return [found[rank] for rank in range(args.ranks)]


def main() -> None:
    """Parse the command line, run both lengths, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("times", 4), ("frames", 13), ("height", 80), ("width", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--carrier", choices=("group", "mailbox"), default="group")
    args = parser.parse_args()
    short, long = (peaks(args, frames) for frames in (args.frames, args.times * args.frames))
    for rank, (one, other) in enumerate(zip(short, long, strict=True)):
        print(f"rank {rank}: {one / 1e6:.0f} MB, {args.times} times as long {other / 1e6:.0f} MB: {other / one:.3f}")


if __name__ == "__main__":
    main()

"""Wan's video pipeline, whose autoencoder is shared by some ranks of the program.

    torchrun --nproc-per-node 4 examples/wan_video.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    torchrun --nproc-per-node 4 examples/wan_video.py --vae-group 2 3    # the first two ranks stop at latents
    torchrun --nproc-per-node 2 examples/wan_video.py --tiny --compare   # random weights, on a CPU

Every rank runs the same pipeline from the same seed. Those of the group share `vae.decode`, and all of them get the
clip; a rank outside of it never decodes. How the transformer is spread over ranks is the program's own affair.

With the VAE's tiling on, `--strategy auto` takes the untiled clip instead, cut into rows, where a rank's rows are no
more than one of the tiles; else it deals the tiles. `handle.report.reason` says which, and why.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import tiny_pipelines
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.utils import encode_video

import halotile


def main() -> None:
    """Make the clip; on one rank first if it is to be compared."""
    args = _arguments()
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    pipe, given = _load(args)
    if args.offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=rank > 0)
    pipe.vae.enable_tiling(**args.window)

    def make(output_type: str) -> Any:
        generator = torch.Generator().manual_seed(args.seed)
        return pipe(**given, guidance_scale=args.guidance, generator=generator, output_type=output_type).frames[0]

    # every rank of the program must take part in making a group, also those that are not to be in it
    group = dist.new_group(args.vae_group)
    if rank not in args.vae_group:
        latents = make("latent")
        print(f"rank {rank}: latents {tuple(latents.shape)}", flush=True)
    else:
        alone = make("np") if args.compare else None
        handle = halotile.parallelize(pipe.vae, group, strategy=args.strategy)
        frames = make("pil")
        report = handle.report
        print(f"rank {rank}: {report.strategy}, tiles {report.tiles}, ranks {report.ranks}", flush=True)
        if alone is not None:
            difference = np.abs(make("np") - alone).max()
            print(f"rank {rank}: largest difference from one rank {difference:.3g}", flush=True)
        handle.remove()
        if rank == args.vae_group[0]:
            encode_video(frames, fps=16, output_path=args.out)
    # a rank that ended early would close its connections while others still decode
    dist.barrier()
    dist.destroy_process_group()


def _load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    if args.tiny:
        return tiny_pipelines.wan()
    # Wan's autoencoder is to run in float32, says its model card
    vae = AutoencoderKLWan.from_pretrained(args.model, subfolder="vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(args.model, vae=vae, torch_dtype=torch.bfloat16)
    return pipe, {"prompt": args.prompt, "height": args.height, "width": args.width, "num_frames": args.frames}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="a name, or a folder")
    parser.add_argument("--prompt", default="a lighthouse on a cliff, waves, morning fog")
    parser.add_argument("--height", type=int, default=480, help="pixels")
    parser.add_argument("--width", type=int, default=832, help="pixels")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile", type=int, nargs=2, metavar=("WINDOW", "STRIDE"), help="pixels; else the VAE's own")
    parser.add_argument("--strategy", default="auto", choices=["auto", "tile", "shard", "serial"])
    parser.add_argument("--vae-group", type=int, nargs="+", metavar="RANK", help="ranks that decode; all, if not given")
    parser.add_argument("--offload", action="store_true", help="keep models in main memory when they do not run")
    parser.add_argument("--compare", action="store_true", help="make the clip on one rank, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny pipeline of random weights")
    parser.add_argument("--out", default="wan.mp4")
    args = parser.parse_args()
    args.vae_group = args.vae_group or list(range(int(os.environ["WORLD_SIZE"])))
    names = ("tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width")
    args.window = dict(zip(names, [size for size in args.tile or () for _ in range(2)], strict=False))
    return args


if __name__ == "__main__":
    main()

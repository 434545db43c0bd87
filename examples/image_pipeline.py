"""An image pipeline of diffusers whose autoencoder is shared by the ranks that torchrun starts.

    torchrun --nproc-per-node 4 examples/image_pipeline.py --model stabilityai/stable-diffusion-3.5-medium
    torchrun --nproc-per-node 2 examples/image_pipeline.py --tiny --compare    # random weights, on a CPU

Every rank runs the same pipeline from the same seed, so that all come to `vae.decode` with the same latents; there,
each decodes some of its tiles, and all get the whole picture. With `--strategy tile` it is one rank's, to the bit.

`--offload` is `pipe.enable_model_cpu_offload`. Without a device diffusers looks for a GPU, and raises where there is
none; it is given one here, so that this script takes the same steps on a CPU (where nothing is gained).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import tiny_pipelines
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch.distributed.device_mesh import init_device_mesh

import halotile


def main() -> None:
    """Make the picture; on one rank first if it is to be compared."""
    args = _arguments()
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    pipe, given = _load(args)
    if args.offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=dist.get_rank() > 0)
    pipe.vae.enable_tiling()

    def make(output_type: str) -> Any:
        # the same on all ranks: halotile compares shapes, not values
        generator = torch.Generator().manual_seed(args.seed)
        return pipe(**given, guidance_scale=args.guidance, generator=generator, output_type=output_type).images[0]

    alone = make("np") if args.compare else None

    # Who shares the autoencoder has nothing to do with who shares the transformer. Here, rows of a mesh have one
    # autoencoder each; along its other axis a program may lay out whatever it likes.
    rows = dist.get_world_size() // args.vae_ranks
    mesh = init_device_mesh(device.type, (rows, args.vae_ranks), mesh_dim_names=("transformer", "vae"))
    with halotile.parallelize(pipe.vae, mesh["vae"], strategy=args.strategy) as handle:
        image = make("pil")
        if alone is not None:
            difference = np.abs(make("np") - alone).max()
            print(f"rank {dist.get_rank()}: largest difference from one rank {difference:.3g}", flush=True)

    report = handle.report
    print(f"rank {dist.get_rank()}: {report.strategy}, tiles {report.tiles}, ranks {report.ranks}", flush=True)
    if dist.get_rank() == 0:
        image.save(args.out)
    dist.destroy_process_group()


def _load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    if args.tiny:
        return tiny_pipelines.sd3()
    pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    return pipe, {"prompt": args.prompt, "height": args.height, "width": args.width}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stabilityai/stable-diffusion-3.5-medium", help="a name, or a folder")
    parser.add_argument("--prompt", default="a lighthouse on a cliff, morning fog")
    parser.add_argument("--height", type=int, default=1440, help="pixels")
    parser.add_argument("--width", type=int, default=2048, help="pixels")
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="auto", choices=["auto", "tile", "shard", "serial"])
    parser.add_argument("--vae-ranks", type=int, help="ranks that share one autoencoder; all, if it is not given")
    parser.add_argument("--offload", action="store_true", help="keep models in main memory when they do not run")
    parser.add_argument("--compare", action="store_true", help="make the picture on one rank, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny pipeline of random weights")
    parser.add_argument("--out", default="image.png")
    args = parser.parse_args()
    args.vae_ranks = args.vae_ranks or int(os.environ["WORLD_SIZE"])
    return args


if __name__ == "__main__":
    main()

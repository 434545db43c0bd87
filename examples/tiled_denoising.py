"""A picture made larger by tiles: the transformer and the autoencoder of Flux, both shared by the ranks.

    torchrun --nproc-per-node 4 examples/tiled_denoising.py --model black-forest-labs/FLUX.1-dev
    torchrun --nproc-per-node 2 examples/tiled_denoising.py --tiny    # random weights, on a CPU

A first stage makes the picture at a size that the transformer was trained with, from one sequence of tokens. A second
stage takes it, enlarged and noised in part, through the transformer in tiles that overlap, each rank some of them. This
is an approximation: tiles agree because the picture beneath tells them what is where, so keep `--strength` below 1.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import tiny_pipelines
import torch
import torch.distributed as dist
from diffusers import FluxImg2ImgPipeline, FluxPipeline

import halotile
from halotile import DimensionTilingConfig, TileCountConfig


def main() -> None:
    """Make the picture, then a larger one."""
    args = _arguments()
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    pipe, given = _load(args)
    pipe.to(device)
    pipe.set_progress_bar_config(disable=rank > 0)
    pipe.vae.enable_tiling()

    # decode and encode, in both stages
    handle = halotile.parallelize(pipe.vae)
    small = pipe(**given, generator=torch.Generator().manual_seed(args.seed)).images[0]

    # the second pipeline has the same models, of which the transformer is put in tiles
    enlarge = FluxImg2ImgPipeline.from_pipe(pipe, torch_dtype=pipe.dtype)
    enlarge.set_progress_bar_config(disable=rank > 0)
    along = DimensionTilingConfig(num_tiles=args.tiles, overlap=args.overlap)
    model = enlarge.transformer
    enlarge.transformer = halotile.TiledDenoiser(model, TileCountConfig(height=along, width=along))
    size = {"height": args.scale * small.height, "width": args.scale * small.width}
    large = enlarge(
        **{**given, **size, "num_inference_steps": args.steps},
        image=small.resize((size["width"], size["height"])),
        strength=args.strength,
        generator=torch.Generator().manual_seed(args.seed),
    ).images[0]
    drift = enlarge.transformer.drift
    print(
        f"rank {rank}: {large.width} x {large.height}, drift {drift[0]:.3g} at first, {drift[-1]:.3g} at last",
        flush=True,
    )
    enlarge.transformer = model
    handle.remove()

    if rank == 0:
        large.save(args.out)
    dist.destroy_process_group()


def _load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    if args.tiny:
        return tiny_pipelines.flux()
    pipe = FluxPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    return pipe, {"prompt": args.prompt, "height": args.height, "width": args.width}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name, or a folder")
    parser.add_argument("--prompt", default="a lighthouse on a cliff, morning fog")
    parser.add_argument("--height", type=int, default=768, help="pixels of the first stage")
    parser.add_argument("--width", type=int, default=1024, help="pixels of the first stage")
    parser.add_argument("--scale", type=int, default=2, help="of the second stage over the first")
    parser.add_argument(
        "--strength", type=float, default=0.6, help="how much of the noise the second stage begins with"
    )
    parser.add_argument("--steps", type=int, default=28, help="of the second stage, of which it takes the last")
    parser.add_argument("--tiles", type=int, default=2, help="along height, and along width")
    parser.add_argument("--overlap", type=int, default=8, help="tokens that neighbours share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny pipeline of random weights")
    parser.add_argument("--out", default="large.png")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.overlap = 4, 2
    return args


if __name__ == "__main__":
    main()

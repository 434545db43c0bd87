"""LTX-2's pipeline of video with sound, whose video autoencoder is shared by the ranks that torchrun starts.

    torchrun --nproc-per-node 4 examples/ltx2_audio_video.py --model Lightricks/LTX-2 --offload
    torchrun --nproc-per-node 2 examples/ltx2_audio_video.py --tiny --compare    # random weights, on a CPU

Every rank runs the same pipeline from the same seed, and they share `vae.decode`. Sound is small: its autoencoder and
the vocoder run on every rank, as they are. `--strategy shard` decodes the clip untiled, each rank its rows: it has no
seams, and equals one rank's untiled clip to rounding, since sums over rows are added up in another order.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import tiny_pipelines
import torch
import torch.distributed as dist
from diffusers import LTX2Pipeline
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
        # an autoencoder that comes to the GPU only for its own decode is shared like any other
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=rank > 0)
    # in windows of frames, so that memory does not grow with the length of the clip
    pipe.vae.use_framewise_decoding = args.framewise
    if args.strategy == "tile":
        pipe.vae.enable_tiling()

    def make(output_type: str) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(args.seed)
        made = pipe(**given, guidance_scale=args.guidance, generator=generator, output_type=output_type)
        return made.frames[0], made.audio[0]

    alone = make("np") if args.compare else None
    handle = halotile.parallelize(pipe.vae, strategy=args.strategy)
    frames, audio = make("pil")
    report = handle.report
    print(f"rank {rank}: {report.strategy}, tiles {report.tiles}, ranks {report.ranks}", flush=True)
    if alone is not None:
        difference = np.abs(make("np")[0] - alone[0]).max()
        print(f"rank {rank}: largest difference from one rank {difference:.3g}", flush=True)
        print(f"rank {rank}: the same sound {torch.equal(audio, alone[1])}", flush=True)
    handle.remove()

    if rank == 0:
        encode_video(
            frames,
            fps=round(given["frame_rate"]),
            audio=audio.float().cpu(),
            audio_sample_rate=pipe.vocoder.config.output_sampling_rate,
            output_path=args.out,
        )
    dist.destroy_process_group()


def _load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    if args.tiny:
        return tiny_pipelines.ltx2()
    pipe = LTX2Pipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    size = {"height": args.height, "width": args.width, "num_frames": args.frames, "frame_rate": 24.0}
    return pipe, {"prompt": args.prompt, "negative_prompt": "worst quality, blurry, jittery", **size}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Lightricks/LTX-2", help="a name, or a folder")
    parser.add_argument("--prompt", default="waves break at the foot of a lighthouse; gulls cry")
    parser.add_argument("--height", type=int, default=512, help="pixels")
    parser.add_argument("--width", type=int, default=768, help="pixels")
    parser.add_argument("--frames", type=int, default=121)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="shard", choices=["auto", "tile", "shard", "serial"])
    parser.add_argument("--framewise", action="store_true", help="decode in windows of frames")
    parser.add_argument("--offload", action="store_true", help="keep models in main memory when they do not run")
    parser.add_argument("--compare", action="store_true", help="make the clip on one rank, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny pipeline of random weights")
    parser.add_argument("--out", default="ltx2.mp4")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What tiles cost in quality: PSNR of the shipped clip, decoded whole and in halotile's grids, by one rank.

    python bench/grid_quality.py [--width 512]

The clip is encoded whole. Printed are PSNR against the original frames and against the whole decode, the largest
difference from the whole decode (values are in -1..1), and how much is decoded again. Random numbers play no part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import diffusers
import torch

import halotile
from halotile.cli.media import read_video

DATA = Path(halotile.__file__).parent / "data"
GRIDS = [
    # frames, height, width: (tiles, overlap in latents)
    ((1, 0), (8, 4), (1, 0)),
    ((1, 0), (8, 2), (1, 0)),
    ((1, 0), (8, 0), (1, 0)),
    ((1, 0), (2, 4), (4, 4)),
    ((2, 2), (2, 4), (2, 4)),
    ((3, 0), (1, 0), (1, 0)),
    ((3, 1), (1, 0), (1, 0)),
    ((3, 2), (1, 0), (1, 0)),
    ((3, 3), (1, 0), (1, 0)),
]


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """In dB, for values in -1..1."""
    return float(10 * torch.log10(4 / (a.clamp(-1, 1) - b.clamp(-1, 1)).square().mean()))


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    vae = diffusers.AutoencoderKLLTX2Video.from_pretrained(DATA / "video_vae").eval()
    pixels, _ = read_video(DATA / "clip.mp4")
    pixels = pixels[..., : args.width]
    latents = vae.encode(pixels).latent_dist.mode()
    whole = vae.decode(latents).sample
    base = psnr(whole, pixels)
    print(f"latents {tuple(latents.shape)}; whole: {base:.2f} dB against the original")
    print("| frames x height x width, overlaps | dB against the original | loss | dB against whole | largest | again |")
    for grid in GRIDS:
        tiling = halotile.TileCountConfig(*(halotile.DimensionTilingConfig(*dim) for dim in grid))
        with halotile.parallelize(vae, halotile.Ranks.alone(), strategy="tile", tiling=tiling) as handle:
            out = vae.decode(latents).sample
        name = "x".join(str(dim[0]) for dim in grid) + ", " + "x".join(str(dim[1]) for dim in grid)
        again = sum(handle.report.loads) / latents[0, 0].numel()
        print(
            f"| {name} | {psnr(out, pixels):.2f} | {base - psnr(out, pixels):.2f} | {psnr(out, whole):.2f} | "
            f"{float((out - whole).abs().max()):.3f} | {again:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

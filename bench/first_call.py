"""Host seconds that recording a tile loop takes, at the first decode of a VAE and at later ones.

    python bench/first_call.py

The first recording follows the decoder with fake tensors, once for each state that its caches can be in; later ones,
also of other sizes, reuse that.
"""

from __future__ import annotations

import time

import diffusers
import torch

from halotile.decode.record import record
from halotile.families import family_of

CASES = {
    "AutoencoderKL (64, 128, 256, 256), 3 x 3 tiles": (
        lambda: diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(64, 128, 256, 256),
            layers_per_block=2,
            sample_size=256,
        ),
        (1, 4, 64, 64),
    ),
    "AutoencoderKLWan (base 32), 21 latent frames, 2 x 2 tiles": (
        lambda: diffusers.AutoencoderKLWan(base_dim=32),
        (1, 16, 21, 40, 40),
    ),
}


@torch.inference_mode()
def main() -> None:
    """Time each case."""
    torch.set_num_threads(1)
    for name, (build, shape) in CASES.items():
        vae = build().eval()
        vae.enable_tiling()
        seconds = []
        for _ in range(4):
            latents = torch.zeros(shape)
            started = time.perf_counter()
            recording = record(vae, "decode", family_of(vae), shape[-2:], lambda: vae.decode(latents))  # noqa: B023
            seconds.append(time.perf_counter() - started)
        print(
            f"{name}: {len(recording.calls)} calls in {len(recording.chains)} chains; first {seconds[0]:.2f} s, "
            f"then {min(seconds[1:]):.3f} to {max(seconds[1:]):.3f} s"
        )


if __name__ == "__main__":
    main()

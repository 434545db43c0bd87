"""Train the small diffusion transformers that `halotile demo --denoise` runs, on latents of the shipped photo_vae.

    python tools/train_demo_dit.py latents    # photographs, encoded: build/demo_dit/latents.pt
    python tools/train_demo_dit.py rotary     # writes src/halotile/data/photo_dit/rotary
    python tools/train_demo_dit.py absolute   # begins with the weights of rotary

The photographs and the held-out ones are those of tools/train_demo_vaes.py. A training pair is a crop's latent and its
guide: the latent of the same picture at half the size, made twice as large by bilinear interpolation. Training
takes one thread, in bfloat16 autocast, and resumes from its checkpoint in `--work`, with the batches an uninterrupted
run would have seen.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Generator, Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_demo_vaes import DATA, crop, fetch_sources, jitter, pick, to_unit, training_photos

from halotile.cli.demo_dit import TRAINED_GRID, DiTConfig, PhotoDiT, grid_positions, load_dit, save_dit, to_tokens

SEED, BATCH, PEAK_RATE = 20261130, 8, 1e-3
STEPS = {"rotary": 1600, "absolute": 600}
VIEWS, VIEW_PX = 360, 512  # pictures to encode, at most so large: many crops are cut from each
CROP = 2 * TRAINED_GRID[1]  # latents along a training crop's side


def view(photos: list[Tensor], rng: Generator) -> Tensor:
    """A photograph, scaled down a little, cut to at most VIEW_PX a side, mirrored and recoloured: 1 3 H W, -1..1."""
    photo = to_unit(photos[pick(rng, len(photos))])[None]
    least = max(8 * CROP / min(photo.shape[-2:]), 0.5)
    scale = least + (1 - least) * torch.rand((), generator=rng).item()
    sides = [max(int(side * scale), 8 * CROP) for side in photo.shape[-2:]]
    photo = F.interpolate(photo, sides, mode="bilinear", antialias=True)
    height, width = (min(side // 16 * 16, VIEW_PX) for side in sides)
    top, left = pick(rng, sides[0] - height + 1), pick(rng, sides[1] - width + 1)
    return jitter(photo[0, :, top : top + height, left : left + width], rng)[None]


@torch.no_grad()
def make_latents(sources: Path, work: Path) -> None:
    """Encode VIEWS views and their halves; save pairs of latent and guide, each 16 H W in half precision."""
    vae = AutoencoderKL.from_pretrained(DATA / "photo_vae")
    photos = [photo for photo in training_photos(sources) if min(photo.shape[-2:]) >= 8 * CROP]
    pairs = []
    for index in range(VIEWS):
        pixels = view(photos, Generator().manual_seed(SEED * 1_000 + index))
        latent = vae.encode(pixels).latent_dist.mode()
        small = vae.encode(F.interpolate(pixels, scale_factor=0.5, mode="area")).latent_dist.mode()
        guide = F.interpolate(small, scale_factor=2, mode="bilinear")
        pairs.append((latent[0].half(), guide[0].half()))
        if (index + 1) % 60 == 0:
            print(f"{index + 1} of {VIEWS} views", flush=True)
    torch.save(pairs, work / "latents.pt")


def statistics(pairs: list[tuple[Tensor, Tensor]], positions: str) -> DiTConfig:
    """What the model must know of its latents, from all pairs."""
    latents, guides = (
        torch.cat([each.float().flatten(1) for each in side], dim=1) for side in zip(*pairs, strict=True)
    )
    std = latents.std(dim=1)
    rounded = [
        tuple(round(x, 4) for x in t.tolist()) for t in (latents.mean(dim=1), std, (latents - guides).std(dim=1) / std)
    ]
    return DiTConfig(positions, *rounded)


def batch(pairs: list[tuple[Tensor, Tensor]], config: DiTConfig, rng: Generator) -> tuple[Tensor, Tensor]:
    """Tokens of BATCH latents and of their guides, B N D each."""
    items = [crop(torch.stack(pairs[pick(rng, len(pairs))]), CROP, rng).float() for _ in range(BATCH)]
    latents, guides = torch.stack(items, dim=1)
    return to_tokens(latents, config), to_tokens(guides, config)


def loss_of(model: PhotoDiT, pairs: list[tuple[Tensor, Tensor]], rng: Generator) -> tuple[Tensor, bool]:
    """Mean squared error of the velocity, in units of what a linear guess would miss; and whether it was guided."""
    latents, guides = batch(pairs, model.config, rng)
    guided = pick(rng, 3) > 0
    sigma = (torch.randperm(BATCH, generator=rng) + torch.rand(BATCH, generator=rng)) / BATCH
    sigma = sigma.clamp(0.02, 1)[:, None, None]
    noise = torch.randn(latents.shape, generator=rng)
    noisy = (1 - sigma) * latents + sigma * noise
    positions = grid_positions(TRAINED_GRID).expand(BATCH, -1, -1, -1)
    with torch.autocast("cpu", torch.bfloat16):
        velocity = model(noisy, positions, sigma[:, 0, 0], guides if guided else None)
    s = model.guide_std if guided else torch.ones_like(model.guide_std)
    weight = ((1 - sigma) ** 2 * s**2 + sigma**2) / s**2
    return (weight * (velocity.float() - (noise - latents)).square()).mean(), guided


def train(positions: str, work: Path, steps: int) -> PhotoDiT:
    """Fit the model, saving to and resuming from a checkpoint; returns the averaged weights' model."""
    pairs, checkpoint = torch.load(work / "latents.pt"), work / f"{positions}.pt"
    torch.manual_seed(SEED)
    model = PhotoDiT(statistics(pairs, positions))
    if positions == "absolute":  # the same network, which has to learn only where tokens are in another way
        model.load_state_dict(load_dit(DATA / "photo_dit" / "rotary").state_dict(), strict=False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=1e-2)
    parts = {"model": model, "average": average, "optimizer": optimizer}
    first, cpu = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        first, cpu = state["step"], state["cpu"]
    cpu -= time.process_time()
    losses: dict[bool, list[float]] = {True: [], False: []}
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss, guided = loss_of(model, pairs, Generator().manual_seed(SEED * 1_000_000 + step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        losses[guided].append(loss.item())
        if (step + 1) % 200 == 0 or step + 1 == steps:
            states = {key: part.state_dict() for key, part in parts.items()}
            spent = round(cpu + time.process_time())
            torch.save({"step": step + 1, "cpu": spent, **states}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
            means = [sum(each) / max(1, len(each)) for each in losses.values()]
            print(f"step {step + 1}/{steps}: guided {means[0]:.4f}, free {means[1]:.4f}, cpu {spent} s", flush=True)
            losses = {True: [], False: []}
    return average.module.eval()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("latents", "rotary", "absolute"))
    parser.add_argument("--sources", type=Path, help="folder where the two packages are unpacked; else downloaded")
    parser.add_argument("--work", type=Path, default=Path("build/demo_dit"), help="latents, checkpoints and downloads")
    parser.add_argument("--steps", type=int, help=f"training steps, in place of {STEPS}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if args.command == "latents":
        make_latents(fetch_sources(args.sources or args.work / "sources"), args.work)
    else:
        model = train(args.command, args.work, args.steps or STEPS[args.command])
        save_dit(model, DATA / "photo_dit" / args.command)
    print(f"{args.command} done in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()

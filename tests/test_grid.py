"""halotile's own grid of tiles, on real ranks: the same bits for every number of ranks, and the promises."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks, run_world
from torch import nn

import halotile
from halotile import (
    DimensionSizeConfig,
    DimensionTilingConfig,
    MismatchError,
    MissingRankError,
    PlanError,
    Ranks,
    RemoteRankError,
    TileCountConfig,
    TileSizeConfig,
    UnsupportedError,
)
from halotile.comm import run_virtual

D, S = DimensionTilingConfig, DimensionSizeConfig
LTX2, KL, WAN, NOISY = (
    "AutoencoderKLLTX2Video", "AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLLTXVideo_0.9.1",
)  # fmt: skip
HUNYUAN = "AutoencoderKLHunyuanVideo"
GRIDS = {
    "1x8x1": TileCountConfig(height=D(8, 4)),
    "1x2x4": TileCountConfig(height=D(2, 2), width=D(4, 1)),
    "2x2x2": TileCountConfig(D(2, 1), D(2, 2), D(2, 2)),
    "3x1x1": TileCountConfig(frames=D(3, 0)),
}


def latents(name: str = LTX2, batch: int = 1, frames: int = 3, height: int = 12, width: int = 5) -> torch.Tensor:
    shape = tiny.CONFIGS[name][2]
    size = (frames, height, width) if len(shape) == 5 else (height, width)
    return torch.randn(batch, shape[1], *size, generator=torch.Generator().manual_seed(5))


def digest(tensor: torch.Tensor | None) -> str:
    """Enough to compare bits without sending a clip between processes."""
    if tensor is None:
        return "nothing"
    return (
        f"{tuple(tensor.shape)} {hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()}"
    )


def decode(vae, z, tiling, group=None, **options) -> torch.Tensor | None:
    with torch.no_grad():
        return halotile.decode(vae, z, group, "tile", tiling, **options)


def alone(name: str, tiling, z: torch.Tensor | None = None, **own) -> torch.Tensor:
    out = decode(tiny.build(name), latents(name) if z is None else z, tiling, Ranks.alone(), **own)
    assert out is not None
    return out


# --- the same bits, however many ranks and whenever tiles arrive


def _all_grids(group):
    vae, z, out = tiny.build(LTX2), latents(), {}
    for slow, (name, tiling) in enumerate(GRIDS.items()):
        late = torch.distributed.get_rank(group) == slow % torch.distributed.get_world_size(group)
        hook = vae.decoder.register_forward_pre_hook(lambda module, args, late=late: time.sleep(0.05 * late))
        out[name] = digest(decode(vae, z, tiling, group))
        hook.remove()
    return out


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return {name: digest(alone(LTX2, tiling)) for name, tiling in GRIDS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_of_ranks_makes_the_same_bits(ranks: int, expected) -> None:
    for of_rank in run_ranks(_all_grids, ranks):
        assert of_rank == expected


def trained() -> tuple[object, torch.Tensor]:
    """The clip autoencoder that ships with halotile, and a latent of a few frames."""
    import diffusers

    folder = Path(halotile.__file__).parent / "data" / "video_vae"
    vae = diffusers.AutoencoderKLLTX2Video.from_pretrained(folder, low_cpu_mem_usage=False).eval()
    return vae.requires_grad_(False), torch.randn(1, 32, 3, 8, 6, generator=torch.Generator().manual_seed(1))


def _trained(group):
    vae, z = trained()
    return digest(decode(vae, z, TileCountConfig(D(2, 1), D(2, 2), D(1, 0)), group))


def test_the_trained_clip_model_makes_the_same_bits_on_two_ranks_as_on_one() -> None:
    vae, z = trained()
    whole = digest(decode(vae, z, TileCountConfig(D(2, 1), D(2, 2), D(1, 0)), Ranks.alone()))
    assert run_ranks(_trained, 2) == [whole, whole]


def _variant(group, how):
    z, tiling, options = latents(), GRIDS["2x2x2"], {}
    vae = tiny.build(LTX2)
    if how == "batch of 2":
        z = latents(batch=2)
    elif how == "bfloat16 model":
        vae, z = vae.to(torch.bfloat16), z.bfloat16()
    elif how == "bfloat16 latents":
        z = z.bfloat16()
    elif how == "round robin":
        options = {"scheduler": "round_robin"}
    elif how == "picture":
        vae, z, tiling = tiny.build(KL), latents(KL), TileCountConfig(height=D(3, 2), width=D(2, 2))
    elif how == "picture by size":
        vae, z, tiling = tiny.build(KL), latents(KL), TileSizeConfig(height=S(40, 16))
    if how == "inference mode":
        with torch.inference_mode():
            out = halotile.decode(vae, z, group, tiling=tiling)
    else:
        out = decode(vae, z, tiling, group, **options)
    assert out is not None
    assert out.dtype == z.dtype
    return digest(out)


@pytest.mark.parametrize(
    "how",
    ["batch of 2", "bfloat16 model", "bfloat16 latents", "inference mode", "round robin", "picture", "picture by size"],
)
def test_variants_make_the_same_bits_on_three_ranks_as_on_one(how: str) -> None:
    assert set(run_ranks(_variant, 3, how)) == {_variant(Ranks.alone(), how)}


def test_a_sample_of_a_batch_is_what_it_is_alone() -> None:
    both = alone(LTX2, GRIDS["1x2x4"], latents(batch=2))
    torch.testing.assert_close(both[:1], alone(LTX2, GRIDS["1x2x4"], latents(batch=2)[:1]), atol=1e-5, rtol=0)


def test_one_tile_is_the_untiled_decode() -> None:
    vae = tiny.build(LTX2)
    with torch.no_grad(), halotile.parallelize(vae, Ranks.alone(), tiling=TileCountConfig()) as handle:
        out = vae.decode(latents()).sample
    assert torch.equal(out, vae.decode(latents()).sample)
    assert handle.report.exactness == "bitwise"


# --- fewer tiles than ranks, other groups, what is delivered, the report (H2)


def _few(group, tiles):
    vae = tiny.build(KL)
    tiling = TileCountConfig(height=D(tiles, 2))
    with torch.no_grad(), halotile.parallelize(vae, group, strategy="tile", tiling=tiling) as handle:
        output = vae.decode(latents(KL))
    return digest(output.sample), type(output).__name__, handle.report


@pytest.mark.parametrize("tiles", [1, 2])
def test_one_or_two_tiles_over_four_ranks(tiles: int) -> None:
    whole = digest(alone(KL, TileCountConfig(height=D(tiles, 2))))
    results = run_ranks(_few, 4, tiles)
    assert [made for made, _, _ in results] == [whole] * 4
    # ranks without a tile return what the class returns, too
    assert {kind for _, kind, _ in results} == {"DecoderOutput"}
    report = results[3][2]
    assert (report.strategy, report.tiles, report.calls, report.ranks) == ("tile", tiles, tiles, 4)
    assert report.loads == ((60, 0, 0, 0) if tiles == 1 else (35, 35, 0, 0))
    assert report.messages == 0
    owner = results[0][2]
    tile_bytes = 3 * 64 * (60 if tiles == 1 else 35) * 4
    assert (owner.messages, owner.bytes_sent) == (3, 3 * tile_bytes)
    assert owner.exactness == ("bitwise" if tiles == 1 else "approximate")
    assert f"1x{tiles}x1 tiles (frames, height, width)" in owner.reason


def _by_group(group):
    return digest(decode(tiny.build(LTX2), latents(), GRIDS["2x2x2"], group))


def test_a_group_without_the_first_global_rank(expected) -> None:
    assert run_ranks(_by_group, 3, members=(1, 2, 3)) == [expected["2x2x2"]] * 3
    assert run_world(_by_group) == [expected["2x2x2"]] * 4


def _delivered(group):
    vae, z = tiny.build(LTX2), latents()
    handed = decode(vae, z, GRIDS["2x2x2"], group, deliver="driver", driver=2)
    with torch.no_grad(), halotile.parallelize(vae, group, tiling=GRIDS["2x2x2"], deliver="sharded") as handle:
        rows = vae.decode(z).sample
    return digest(handed), rows, handle.report.extents


def test_the_driver_alone_or_each_its_rows(expected) -> None:
    results = run_ranks(_delivered, 3)
    assert [handed for handed, _, _ in results] == ["nothing", "nothing", expected["2x2x2"]]
    assert digest(torch.cat([rows for _, rows, _ in results], -2)) == expected["2x2x2"]
    assert results[0][2] == (128, 128, 128)


# --- encode


def _encoded(group, name):
    vae, shape = tiny.build(name), tiny.CONFIGS[name]
    frames = [1 + 2 * shape[4]] if len(shape[2]) == 5 else []
    x = torch.randn(1, 3, *frames, 8 * shape[3], 6 * shape[3], generator=torch.Generator().manual_seed(2))
    tiling = TileCountConfig(D(2 if frames else 1, 1 if frames else 0), D(2, 2), D(2, 2))
    with torch.no_grad(), halotile.parallelize(vae, group, strategy="tile", tiling=tiling):
        output = vae.encode(x)
    return digest(output.latent_dist.parameters), digest(output.latent_dist.mode())


@pytest.mark.parametrize("name", [KL, LTX2, "AutoencoderKLMochi"])
def test_encode_in_tiles_of_whole_latents(name: str) -> None:
    whole = _encoded(Ranks.alone(), name)
    assert set(run_ranks(_encoded, 3, name)) == {whole}


def test_pixels_that_are_no_whole_latents_are_refused() -> None:
    with pytest.raises(PlanError, match=r"100 cells along height are not whole latents; .* a multiple of 8"):
        halotile.encode(tiny.build(KL), torch.zeros(1, 3, 100, 64), tiling=TileCountConfig(height=D(2, 2)))
    with pytest.raises(PlanError, match=r"16 cells along frames .* must be 1 \+ n \* 8"):
        halotile.encode(tiny.build(LTX2), torch.zeros(1, 3, 16, 64, 64), tiling=TileCountConfig(frames=D(2, 0)))


# --- what a tile is


@pytest.mark.parametrize("name", [WAN, "AutoencoderKLWan_2.2", "AutoencoderKLQwenImage", "AutoencoderKLMagvit"])
def test_frames_that_share_a_cache_are_never_decoded_without_it(name: str) -> None:
    """T3."""
    vae = tiny.build(name)
    for tiling in (TileCountConfig(frames=D(2, 0)), TileSizeConfig(frames=S(8))):
        with pytest.raises(UnsupportedError, match="hands a cache from frame to frame"):
            halotile.parallelize(vae, Ranks.alone(), tiling=tiling)
        with pytest.raises(UnsupportedError, match="hands a cache from frame to frame"):
            halotile.stream(vae, latents(name, frames=5), Ranks.alone(), tiling=tiling)


def test_the_cache_of_a_tile_with_all_frames_is_its_own() -> None:
    z = latents(WAN, frames=5, height=6, width=2)
    out = alone(WAN, TileCountConfig(height=D(2, 2)), z)
    vae = tiny.build(WAN)
    with torch.no_grad():
        first, second = vae.decode(z[..., :4, :]).sample, vae.decode(z[..., 2:, :]).sample
    assert torch.equal(out[..., :16, :], first[..., :16, :])
    assert torch.equal(out[..., 32:, :], second[..., 16:, :])


def test_seventeen_latent_frames_make_65_and_two_tiles_make_the_ramp_between_them() -> None:
    """T4: a later tile is the class's own decode of one latent more, without the frame that this one makes."""
    z = latents(HUNYUAN, frames=17, height=2, width=2)
    vae = tiny.build(HUNYUAN)
    vae.use_framewise_decoding = False
    out = decode(vae, z, TileCountConfig(frames=D(2, 3)), Ranks.alone())
    assert out is not None
    assert out.shape[2] == 65
    with torch.no_grad():
        first, second = vae.decode(z[:, :, :10]).sample, vae.decode(z[:, :, 6:]).sample[:, :, 1:]
    assert torch.equal(out[:, :, :25], first[:, :, :25])
    assert torch.equal(out[:, :, 37:], second[:, :, 12:])
    weights = ((torch.arange(12) + 1) / 13)[:, None, None]
    torch.testing.assert_close(out[:, :, 25:37], first[:, :, 25:] * (1 - weights) + second[:, :, :12] * weights)


def test_tiles_are_never_thinner_than_the_class_takes() -> None:
    # reflect padding needs two latents: 9 rows at 4 + 4 + 1 would leave one, which crashes in the class's own loop
    vae, z = tiny.build(LTX2), latents(frames=1, height=9, width=2)
    with pytest.raises(RuntimeError, match=r"[Pp]adding size"), torch.no_grad():
        vae.decode(z[..., :1, :])
    out = decode(vae, z, TileSizeConfig(height=S(128)), Ranks.alone())
    assert out is not None
    assert out.shape[-2:] == (288, 64)
    with pytest.raises(PlanError, match=r"height, 9 latents in 7 tiles with overlap 0: the thinnest tile would have 1"):
        decode(vae, z, TileCountConfig(height=D(7, 0)), Ranks.alone())


class _Constant:
    """The mean of its latents everywhere: of a constant latent a constant picture."""

    def decode(self, z):
        return z.mean((-2, -1), keepdim=True).expand(*z.shape[:-2], z.shape[-2] * 8, z.shape[-1] * 8)


@pytest.mark.parametrize("overlap", [0, 1, 7, 16, 31])
def test_a_constant_latent_makes_a_constant_picture(overlap: int) -> None:
    """G12."""
    tiling = TileSizeConfig(height=S(256, overlap * 8), width=S(256, overlap * 8))
    out = decode(_Constant(), torch.full((1, 4, 64, 72), 3.0), tiling, Ranks.alone())
    assert out is not None
    assert out.shape == (1, 4, 512, 576)
    # with 31 of 32, 1024 tiles are summed up at every cell, in float32
    torch.testing.assert_close(out, torch.full_like(out, 3.0), atol=5e-5 if overlap == 31 else 3e-6, rtol=0)


def _steps(ranks, z, tiling):
    return decode(_Constant(), z, tiling, ranks)


def test_tiles_that_differ_meet_in_a_ramp_on_virtual_ranks() -> None:
    """B1 and D5, through the whole decode: 2 x 2 tiles of different means."""
    z = torch.zeros(1, 1, 56, 56)
    z[..., 28:, :] += 2
    z[..., 28:] += 1
    tiling = TileSizeConfig(height=S(256, 64), width=S(256, 64))
    outs = run_virtual(3, lambda transport: _steps(Ranks(transport), z, tiling))
    assert all(torch.equal(outs[0], out) for out in outs)
    out = outs[0][0, 0]
    assert out.diff(dim=0).abs().max() < 2 / 64
    assert out.diff(dim=1).abs().max() < 1 / 64
    torch.testing.assert_close(float(out[223:225, 223:225].mean()), float(z.mean()), atol=1e-4, rtol=0)


def _convolutions(layers: int, upsampled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    if upsampled:
        parts += [nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*parts).requires_grad_(False)


@pytest.mark.parametrize(("layers", "upsampled", "field"), [(1, False, 3), (2, False, 5), (3, False, 7), (2, True, 7)])
def test_convolutions_are_exact_with_an_overlap_of_their_receptive_field_and_not_with_less(
    layers: int, upsampled: bool, field: int
) -> None:
    """B4."""
    network, z = _convolutions(layers, upsampled), torch.randn(1, 4, 33, 30)
    whole = network(z)
    enough = decode(network, z, TileCountConfig(height=D(3, field), width=D(2, field)), Ranks.alone())
    torch.testing.assert_close(enough, whole, atol=1e-6, rtol=1e-5)
    less = decode(network, z, TileCountConfig(height=D(3, 1), width=D(2, 1)), Ranks.alone())
    assert less is not None
    assert less.shape == whole.shape
    assert (less - whole).abs().max() > 1e-3


def test_volumes_of_a_model_from_elsewhere_are_cut_along_all_three_dims() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.Upsample(scale_factor=2)).requires_grad_(False)
    z = torch.randn(1, 2, 12, 11, 10)
    out = decode(network, z, TileCountConfig(D(2, 3), D(2, 3), D(2, 3)), Ranks.alone())
    torch.testing.assert_close(out, network(z), atol=1e-6, rtol=1e-5)


# --- the VAE's own tiling inside of a tile, and the guard


def test_the_own_tiling_bounds_memory_inside_of_a_tile() -> None:
    vae, z = tiny.build(KL), latents(KL, height=20)
    halotile.families.set_window(vae, 48, 32)
    tiling = TileCountConfig(height=D(2, 4))
    calls = []
    vae.decoder.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape[-2:])))
    out = decode(vae, z, tiling, Ranks.alone())
    assert max(max(size) for size in calls) == 6
    with torch.no_grad():
        first, second = vae.decode(z[..., :12, :]).sample, vae.decode(z[..., 8:, :]).sample
    assert out is not None
    assert torch.equal(out[..., :64, :], first[..., :64, :])
    assert torch.equal(out[..., 96:, :], second[..., 32:, :])


def _guard(group):
    vae = tiny.build(LTX2)
    vae.use_framewise_decoding = True
    vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 16, 8
    calls = []
    vae.decoder.register_forward_pre_hook(lambda module, args: calls.append(1))
    with halotile.parallelize(vae, group, strategy="tile", tiling=TileCountConfig(frames=D(2, 2))) as handle:
        before = handle.ranks.counters.snapshot()
        with pytest.raises(PlanError) as caught:
            vae.decode(latents(frames=6, height=4))
        assert handle.ranks.counters.since(before).collectives == 0
    assert not calls
    vae.use_framewise_decoding = False
    return str(caught.value), digest(decode(vae, latents(), GRIDS["2x2x2"], group))


def test_two_temporal_splits_are_refused_on_every_rank_before_any_work(expected) -> None:
    for message, after in run_ranks(_guard, 2):
        assert "tiling= cuts the frames into 2 tiles" in message
        assert "use_framewise_decoding would cut the 4 frames of such a tile again" in message
        assert "tile_sample_min_num_frames=16" in message
        assert after == expected["2x2x2"]


@pytest.mark.parametrize(
    ("name", "tiling", "said"),
    [
        ("AutoencoderKLCogVideoX", TileCountConfig(frames=D(2, 0)), "an odd number of latent frames"),
        ("AutoencoderKLMiniMaxH3", TileCountConfig(frames=D(2, 0)), "clips of a fixed number of latent frames"),
    ],
)
def test_classes_whose_frames_cannot_be_decoded_apart_say_so_at_once(name, tiling, said) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} .*a tiling= that cuts frames: .*{said}"):
        halotile.parallelize(tiny.build(name), Ranks.alone(), tiling=tiling)


@pytest.mark.parametrize("frames", [3, 4, 7])
@pytest.mark.parametrize("name", ["AutoencoderKLCogVideoX", "AutoencoderKLMiniMaxH3"])
def test_their_frames_go_through_whole_in_tiles_along_height(name: str, frames: int) -> None:
    z = latents(name, frames=frames, height=6, width=3)
    out = alone(name, TileCountConfig(height=D(2, 2)), z)
    with torch.no_grad():
        whole = tiny.decode(tiny.build(name), name, z)
    assert out.shape == whole.shape


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(PlanError, match="strategy='shard' would ignore"):
        halotile.parallelize(tiny.build(KL), Ranks.alone(), strategy="shard", tiling=TileCountConfig())
    with pytest.raises(UnsupportedError, match=r"tiling=\(1, 2, 2\) is not a tiling; give a TileCountConfig"):
        halotile.decode(tiny.build(KL), latents(KL), tiling=(1, 2, 2))


def test_a_further_argument_with_a_height_and_width_is_refused() -> None:
    def guided(z, condition):
        return z + condition

    with pytest.raises(UnsupportedError, match=r"a further argument of shape \(1, 4, 12, 5\) has a height and width"):
        decode(guided, latents(KL), TileCountConfig(height=D(2, 2)), Ranks.alone(), condition=latents(KL))


def test_the_report_says_that_the_class_ran_its_own_loop_over_the_frames_of_a_tile() -> None:
    vae = tiny.build(HUNYUAN)
    vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 8, 4
    z = latents(HUNYUAN, height=4, width=2)
    with torch.no_grad(), halotile.parallelize(vae, Ranks.alone(), tiling=TileCountConfig(height=D(2, 1))) as handle:
        vae.decode(z)
    assert "the class's loop over frames ran, too" in handle.report.reason


# --- noise


def _noisy(group, seed_of_rank):
    rank = group.rank if isinstance(group, Ranks) else torch.distributed.get_rank(group)
    torch.manual_seed(seed_of_rank if rank == 0 else rank + 100)
    vae, z = tiny.build(NOISY), latents(NOISY, height=8)
    torch.manual_seed(seed_of_rank if rank == 0 else rank + 100)
    temb = torch.full((1,), 0.05)
    tiling = TileCountConfig(height=D(3, 2), width=D(2, 2))
    first = digest(decode(vae, z, tiling, group, temb=temb))
    state = torch.get_rng_state()
    return first, digest(state), digest(decode(vae, z, tiling, group, temb=temb))


def test_noise_is_that_of_the_first_ranks_generator_for_every_number_of_ranks() -> None:
    one = _noisy(Ranks.alone(), 9)
    assert one[0] != one[2]
    assert _noisy(Ranks.alone(), 10)[0] != one[0]
    for ranks in (2, 3):
        assert set(run_ranks(_noisy, ranks, 9)) == {one}


def test_a_decoder_that_draws_nothing_leaves_the_generator_as_it_was() -> None:
    vae, z = tiny.build(KL), latents(KL)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    decode(vae, z, TileCountConfig(height=D(3, 2)), Ranks.alone())
    assert torch.equal(torch.get_rng_state(), before)


# --- fail together, agree beforehand


class _BrokenTileError(Exception):
    pass


def _broken(group):
    rank = torch.distributed.get_rank(group)
    vae = tiny.build("AutoencoderKLMagvit")
    z = latents("AutoencoderKLMagvit", height=8, width=4)
    attributes = set(vars(vae))

    def fail(module, args, output):
        if rank == 1:
            raise _BrokenTileError("the tile is broken")

    tiling = TileCountConfig(height=D(4, 2))
    hook = vae.decoder.register_forward_hook(fail)
    with pytest.raises(RemoteRankError, match="rank 1 failed with _BrokenTileError: the tile is broken"):
        decode(vae, z, tiling, group)
    hook.remove()
    assert set(vars(vae)) == attributes
    return digest(decode(vae, z + 1, tiling, group))


def test_a_rank_whose_tile_raises_makes_all_raise_and_the_next_call_is_right() -> None:
    name = "AutoencoderKLMagvit"
    expected = digest(alone(name, TileCountConfig(height=D(4, 2)), latents(name, height=8, width=4) + 1))
    assert run_ranks(_broken, 3) == [expected] * 3


def _other_size(group):
    rank = torch.distributed.get_rank(group)
    vae = tiny.build(KL)
    tiling = TileCountConfig(height=D(4, 2))
    hook = vae.decoder.register_forward_hook(lambda module, args, out: out[..., 1:] if rank == 0 else None)
    with pytest.raises(RemoteRankError, match=r"rank 0 failed with RuntimeError: tile \(0, 0, 0\) .* planned \(1, 32,"):
        decode(vae, latents(KL, height=10), tiling, group)
    hook.remove()
    return digest(decode(vae, latents(KL), tiling, group))


def test_a_tile_of_another_size_than_planned_fails_everywhere() -> None:
    assert set(run_ranks(_other_size, 2)) == {digest(alone(KL, TileCountConfig(height=D(4, 2))))}


def _disagree(group, how, given_up):
    rank = torch.distributed.get_rank(group)
    vae, z, tiling = tiny.build(KL), latents(KL), TileCountConfig(height=D(3, 2))
    if how == "missing":
        while rank == 1 and not given_up.exists():
            time.sleep(0.05)
        with pytest.raises(MissingRankError, match=r"ranks 1 \(global rank 1\)|waited 1 s"):
            decode(vae, z, tiling, group, timeout_s=1)
        given_up.touch()
    else:
        with pytest.raises(MismatchError, match=r"plan: rank 0 has 1x3x1 tiles.*rank 1 has 1x3x1 tiles"):
            decode(vae, z, TileCountConfig(height=D(3, 3)) if rank else tiling, group)
    return digest(decode(vae, z, tiling, group))


@pytest.mark.parametrize("how", ["plans", "missing"])
def test_ranks_that_disagree_or_do_not_come(how: str, tmp_path: Path) -> None:
    expected = digest(alone(KL, TileCountConfig(height=D(3, 2))))
    assert run_ranks(_disagree, 2, how, tmp_path / "given up") == [expected] * 2


def test_a_gradient_is_refused() -> None:
    with pytest.raises(halotile.GradientError):
        halotile.decode(tiny.build(KL), latents(KL).requires_grad_(), tiling=TileCountConfig(height=D(2, 2)))

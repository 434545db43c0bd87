"""The defects of diffusers' own tile loops, and the geometry cases from the field: refused with numbers, or mended."""

from __future__ import annotations

import diffusers
import pytest
import tiled
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile.errors import HalotileError, PlanError, UnsupportedError
from halotile.families import FAMILIES, check_loop, family_of, set_window, sync_window


def _kl(sample_size: int):
    torch.manual_seed(0)
    _, kwargs, *_ = tiny.CONFIGS["AutoencoderKL"]
    return diffusers.AutoencoderKL(**{**kwargs, "sample_size": sample_size}).eval().requires_grad_(False)


def _tiled(name: str, **attributes):
    vae = tiny.build(name)
    vae.use_tiling = True
    for key, value in attributes.items():
        assert hasattr(vae, key), key
        setattr(vae, key, value)
    return vae


# --- the table of defects: what the class would do wrong is refused, with every number that matters

DEFECTS = [
    ("AutoencoderKL", {"tile_overlap_factor": 0.3}, "decode", (1, 4, 160, 160), PlanError, ["712", "717", "0.3"]),
    (
        "AutoencoderKLCogVideoX",
        {
            "tile_sample_min_height": 128, "tile_sample_min_width": 128, "tile_latent_min_height": 16,
            "tile_latent_min_width": 16,
        },
        "decode", (1, 4, 3, 40, 40), PlanError, ["128", "104", "107"],
    ),
    ("AutoencoderDC", {"tile_sample_stride_height": 400}, "decode", (1, 8, 32, 32), PlanError, ["400", "384"]),
    ("AutoencoderKLWan_2.1", {"tile_sample_stride_height": 100}, "decode", (1, 4, 3, 40, 40), PlanError, ["100", "96"]),
    ("AutoencoderKLWan_2.1", {"tile_sample_stride_width": 100}, "encode", (1, 3, 9, 320, 320), PlanError, ["12.5"]),
    (
        "AutoencoderKLHunyuanVideo15", {"tile_sample_min_height": 128}, "decode", (1, 8, 2, 40, 10), PlanError,
        ["128", "192", "96"],
    ),
    ("AutoencoderKLMagvit", {}, "encode", (1, 3, 9, 640, 640), UnsupportedError, ["repeated", "640"]),
    ("AutoencoderKLHunyuanImage", {}, "encode", (1, 3, 640, 640), UnsupportedError, ["five dims"]),
    ("AutoencoderKLMiniMaxH3", {}, "decode", (1, 8, 2, 20, 20), UnsupportedError, ["at least 3", "got 2"]),
    ("AutoencoderKLMiniMaxH3", {}, "decode", (1, 8, 1, 20, 20), UnsupportedError, ["at least 3", "got 1"]),
    (
        "AutoencoderKLMiniMaxH3", {"tile_sample_min_overlap_height": 256}, "decode", (1, 8, 7, 20, 20),
        UnsupportedError, ["256", "never ends"],
    ),
    (
        "AutoencoderKLMiniMaxH3", {"tile_sample_min_overlap_width": 60}, "decode", (1, 8, 7, 20, 20), PlanError,
        ["60", "196"],
    ),
    ("AutoencoderKLMochi", {"use_framewise_decoding": True}, "decode", (1, 4, 2, 40, 9), UnsupportedError, ["crashes"]),
    (
        "AutoencoderKLWan_2.1", {"tile_sample_min_height": 100, "tile_sample_stride_height": 96}, "decode",
        (1, 4, 3, 40, 9), PlanError, ["100", "overlap and blend disagree", "4 are blended"],
    ),
    # stored strides of 192 and a window set without them (G2), a stride beyond the window (G9)
    ("AutoencoderKLWan_2.1", {"tile_sample_min_height": 64}, "decode", (1, 4, 3, 32, 32), PlanError, ["64", "192"]),
    ("AutoencoderKLWan_2.1", {"tile_sample_stride_height": 320}, "decode", (1, 4, 3, 99, 9), PlanError, ["256", "320"]),
    ("AutoencoderKLLTX2Video", {"tile_sample_stride_width": 0}, "decode", (1, 8, 2, 20, 20), PlanError, ["at least 1"]),
    (
        "AutoencoderKLLTX2Video",
        {"use_framewise_decoding": True, "tile_sample_min_num_frames": 16, "tile_sample_stride_num_frames": 24},
        "decode", (1, 8, 9, 4, 4), PlanError, ["16", "24", "lost"],
    ),
    (
        "AutoencoderKLHunyuanVideo", {"tile_sample_stride_num_frames": 10}, "decode", (1, 4, 9, 4, 4), PlanError,
        ["10", "multiples of 4"],
    ),
    (
        "AutoencoderKLMagvit",
        {
            "tile_sample_min_height": 64, "tile_sample_stride_height": 48, "tile_sample_min_width": 128,
            "tile_sample_stride_width": 100,
        },
        "decode", (1, 4, 3, 6, 14), PlanError, ["100", "96"],
    ),
    (
        "AutoencoderDC", {"tile_sample_min_height": 131, "tile_sample_stride_height": 96}, "encode", (1, 3, 448, 64),
        UnsupportedError, ["131", "32"],
    ),
    (
        "AutoencoderKLMiniMaxH3", {"tile_sample_min_overlap_height": 0}, "decode", (1, 8, 7, 20, 20), PlanError,
        ["without an overlap"],
    ),
    (
        "AutoencoderKL", {"tile_sample_min_size": 64, "tile_latent_min_size": 8}, "encode", (1, 3, 100, 96), PlanError,
        ["0 latents"],
    ),
    ("AutoencoderKLLTX2Video", {}, "decode", (1, 8, 2, 1, 20), PlanError, ["height has 1", "fewer than 2"]),
    ("AutoencoderTiny", {"tile_overlap_factor": 0.0}, "decode", (1, 4, 70, 70), UnsupportedError, ["overlap of 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attributes", "half", "shape", "error", "said"), DEFECTS)
def test_what_a_loop_would_get_wrong_is_refused_with_its_numbers(name, attributes, half, shape, error, said) -> None:
    vae = _tiled(name, **attributes)
    before = dict(vars(vae))
    with pytest.raises(error) as caught:
        check_loop(vae, half, shape)
    assert type(vae).__name__ in str(caught.value)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    for strategy in ("tile", "serial"):
        with torch.no_grad(), halotile.parallelize(vae, strategy=strategy), pytest.raises(error):
            getattr(vae, half)(torch.zeros(shape))
    assert dict(vars(vae)) == before


def test_tiny_with_sixteen_latent_channels_is_refused_where_its_loop_crashes() -> None:
    torch.manual_seed(0)
    _, kwargs, *_ = tiny.CONFIGS["AutoencoderTiny"]
    vae = diffusers.AutoencoderTiny(**{**kwargs, "latent_channels": 16}).eval().requires_grad_(False)
    set_window(vae, 64, 48)
    x = torch.zeros(1, 3, 80, 80)
    with pytest.raises(RuntimeError):
        vae.encode(x)
    with halotile.parallelize(vae, strategy="tile"), pytest.raises(UnsupportedError, match="16"):
        vae.encode(x)


def test_hunyuan_video_15_gets_both_windows() -> None:
    vae = tiny.build("AutoencoderKLHunyuanVideo15")
    assert halotile.enable_tiling(vae, tile_sample_min_height=128, tile_sample_min_width=128) is None
    assert (vae.tile_latent_min_height, vae.tile_latent_min_width) == (8, 8)
    x = torch.randn(1, 8, 1, 10, 8)
    with torch.no_grad():
        assert vae.decode(x).sample.shape[-2:] == (160, 128)
        assert torch.equal(halotile.decode(vae, x, strategy="tile"), vae.decode(x).sample)


# --- LTX-480: the default window of LTX-2 leaves one latent row at 480 x 832 px


def _ltx(group):
    vae = tiny.build("AutoencoderKLLTX2Video")
    vae.enable_tiling()
    x = torch.randn(1, 8, 1, 15, 26, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with halotile.parallelize(vae, group, strategy="tile") as handle:
            out = vae.decode(x).sample
        stride_after = vae.tile_sample_stride_height
        with pytest.raises(RuntimeError, match="Padding size"):
            vae.decode(x)
        vae.tile_sample_stride_height = 512
        return out, vae.decode(x).sample, stride_after, handle.report


def test_ltx_480_has_no_tile_thinner_than_two_rows() -> None:
    for out, plain, stride_after, report in run_ranks(_ltx, 2):
        assert out.shape == (1, 3, 1, 480, 832)
        assert torch.equal(out, plain)
        assert stride_after == 448
        assert report.tiles == 2
        assert "tile_sample_stride_height set to 512" in report.reason


@pytest.mark.parametrize("length", range(2, 70))
def test_every_height_of_ltx2_has_tiles_of_two_rows_at_least(length: int) -> None:
    vae = _tiled("AutoencoderKLLTX2Video")
    for key, value in check_loop(vae, "decode", (1, 8, 1, length, 20)).items():
        setattr(vae, key, value)
    loop, _ = FAMILIES["AutoencoderKLLTX2Video"].layout.axes(vae, "decode", length, 20, 32)
    assert loop.fault() is None
    assert loop.thinnest >= 2
    assert check_loop(vae, "decode", (1, 8, 1, length, 20)) == {}


# --- pictures keep their size, and constants stay constant


def test_g2_and_g6_keep_the_size_of_the_picture() -> None:
    vae = _kl(768)
    vae.enable_tiling()
    assert vae.tile_latent_min_size == 96
    x = torch.randn(1, 4, 88, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        assert vae.decode(x[..., :88, :4]).sample.shape == (1, 3, 704, 32)
        x = torch.randn(1, 4, 112, 4)
        assert vae.decode(x).sample.shape == (1, 3, 896, 32)
        # tiles at 0 and 72: the last has 40 latents, then 16
        assert handle.report.loads == (96 * 4 + 40 * 4,)
        assert vae.decode(x[..., :88, :]).sample.shape == (1, 3, 704, 32)


class _Constant(torch.nn.Module):
    """A network that returns the constant it is given, at the right size."""

    def __init__(self, channels: int, scale: float, frames, companions: int) -> None:
        super().__init__()
        self.channels, self.scale, self.frames, self.companions = channels, scale, frames, companions

    def forward(self, x, *args, **kwargs):
        value = x.mean()
        rows, columns = (int(cells * self.scale) for cells in x.shape[-2:])
        middle = [self.frames(x.shape[2], kwargs.get("first_chunk"))] if x.dim() == 5 else []
        out = value.expand(x.shape[0], self.channels, *middle, rows, columns).clone()
        return (out, {}) if self.companions else out


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderDC", "AutoencoderTiny", "AutoencoderKLMochi"])
@pytest.mark.parametrize(("height", "width", "stride"), [(64, 72, 16), (64, 72, 24), (64, 72, 31), (33, 40, 20)])
def test_g12_a_constant_stays_constant(name: str, height: int, width: int, stride: int) -> None:
    vae = tiny.build(name)
    ratio = family_of(vae).ratio(vae)
    set_window(vae, 32 * ratio, stride * ratio)
    companions = 1 if name == "AutoencoderKLMochi" else 0
    vae.decoder = _Constant(3, ratio, lambda frames, first: 6 * frames, companions)
    if getattr(vae, "post_quant_conv", None) is not None:
        vae.post_quant_conv = torch.nn.Identity()
    middle = [2] if companions else []
    x = torch.full((1, vae.config.latent_channels, *middle, height, width), 0.625)
    out = halotile.decode(vae, x, strategy="tile")
    assert out.shape[-2:] == (height * ratio, width * ratio)
    # ramps y / n and 1 - y / n add up to 1 within a rounding (6e-8 at 0.625), once for each of up to four tiles
    assert torch.allclose(out, torch.full_like(out, 0.625), rtol=0, atol=2.4e-7)


@pytest.mark.parametrize(("size", "tiles"), [((16, 16), 1), ((24, 16), 2), ((24, 24), 4), ((96, 168), 112)])
def test_h3_n_tile_counts_of_minimax(size: tuple[int, int], tiles: int) -> None:
    vae = tiny.build("AutoencoderKLMiniMaxH3")
    vae.use_tiling = True
    # one channel and one frame: 112 tiles are 1536 x 2688 pixels
    vae.decoder = _Constant(1, 16, lambda frames, first: 1, 0)
    vae.post_quant_conv = torch.nn.Conv3d(8, 8, 1).requires_grad_(False)
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        out = vae.decode(torch.zeros(1, 8, 3, *size)).sample
    assert handle.report.tiles == tiles
    assert out.shape[-2:] == (size[0] * 16, size[1] * 16)


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.1", "AutoencoderKLLTX2Video"])
def test_t4_causal_clips_have_one_frame_and_then_a_factor_of_them(name: str) -> None:
    vae = tiled.build_tiled(name)
    factor = tiny.CONFIGS[name][4]
    frames = 17 if factor == 4 else 9
    x = torch.zeros(1, *tiny.CONFIGS[name][2][1:2], frames, 7, 4)
    assert halotile.decode(vae, x, strategy="tile").shape[2] == 1 + factor * (frames - 1)


# --- a window, exactly


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_set_window_sets_exactly_what_is_asked_or_leaves_the_vae_alone(name: str) -> None:
    vae = tiny.build(name)
    ratio = family_of(vae).ratio(vae)
    accepted = 0
    for window in range(2, 20):
        for stride in range(1, window + 1):
            before = dict(vars(vae))
            try:
                set_window(vae, window * ratio, stride * ratio)
            except HalotileError:
                assert dict(vars(vae)) == before
                continue
            accepted += 1
            for half in ("decode", "encode"):
                cells = 40 * (ratio if half == "encode" else 1)
                for loop in family_of(vae).layout.axes(vae, half, cells, cells, ratio):
                    unit = 1 if half == "decode" else loop.ratio
                    folded = ratio // loop.ratio if half == "encode" else 1
                    assert (loop.window, loop.stride) == (window * unit * folded, stride * unit * folded)
                    assert loop.fault() is None
    # no overlap is no window for a class that cuts by it, and overlaps such as 4 of 5 have no exact factor
    assert accepted > 150


@pytest.mark.parametrize(
    ("window", "stride", "said"),
    [
        (60, 48, "not whole latents"),
        (64, 72, "72"),
        (0, 0, "at least"),
        (-8, -8, "at least"),
        (64, 0, "more than 0"),
        (64.0, 48, "whole pixels"),
    ],
)
def test_windows_that_cannot_be_are_refused(window: int, stride: int, said: str) -> None:
    vae = tiny.build("AutoencoderKL")
    with pytest.raises(PlanError, match=said):
        set_window(vae, window, stride)
    assert not vae.use_tiling


def test_sync_window_leaves_classes_without_a_latent_window_alone() -> None:
    vae = tiny.build("AutoencoderKLWan_2.1")
    before = dict(vars(vae))
    sync_window(vae)
    sync_window(torch.nn.Linear(1, 1))
    assert dict(vars(vae)) == before


def test_the_loop_over_frames_is_reported() -> None:
    vae = tiny.build("AutoencoderKLHunyuanVideo")
    x = torch.randn(1, 4, 7, 2, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        out = vae.decode(x).sample
    assert "loop over frames ran" in handle.report.reason
    # chunks of 5, 4 and 1 latent frames
    assert handle.report.loads == (10 * 4,)
    assert handle.report.tiles == 3
    with torch.no_grad():
        assert torch.equal(out, vae.decode(x).sample)


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_the_frame_loop_of_ltx_is_reported_with_its_defect(half: str) -> None:
    vae = tiny.build("AutoencoderKLLTX2Video")
    vae.use_framewise_decoding = True
    x = torch.zeros(1, 8, 4, 2, 2) if half == "decode" else torch.zeros(1, 3, 25, 64, 64)
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        getattr(vae, half)(x)
    assert "loop over frames ran" in handle.report.reason
    assert ("one frame late" in handle.report.reason) == (half == "decode")

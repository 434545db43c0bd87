"""Exact requests: what is not refused is decoded with just the windows and overlaps that were asked for."""

from __future__ import annotations

import random
from itertools import pairwise

import diffusers
import pytest
import tiny_vaes as tiny
import torch
from torch._subclasses.fake_tensor import FakeTensor

import halotile
from halotile import apply_tile_plan, tile_overlap_plan, tile_shape_plan
from halotile.errors import PlanError, UnsupportedError
from halotile.families import check_request, loop_tilings, possible
from halotile.families.factors import find_factor

VALUE = 0.625
NEEDS_OVERLAP = {"AutoencoderTiny", "AutoencoderKLMiniMaxH3"}
PICKY = {"AutoencoderKLCogVideoX", "AutoencoderKLMagvit", "AutoencoderKLLTX2Video"}
"""Refuse more than numbers that can be no tiling: no float is right, a side compared with another, too thin a tile."""


class Recorder(torch.nn.Module):
    """A decoder that returns one constant at the right size, and notes where in the latent its inputs lie.

    An input is a view of the latent, so that its place follows from its offset in memory.
    """

    def __init__(self, name: str, size: tuple[int, int]) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        folded = 2 if name.endswith("Wan_2.2") else 1
        self.scale, self.channels = tiny.CONFIGS[name][3] // folded, 3 * folded**2
        self.frames = {"AutoencoderKLMochi": 6, "AutoencoderKLMiniMaxH3": 4}.get(name, 1)
        self.companion = name in {"AutoencoderKLMochi", "AutoencoderKLCogVideoX"}
        self.size, self.seen = size, set()

    def forward(self, x, *args, **kwargs):
        # what is foreseen of a call is no call
        if not isinstance(x, FakeTensor):
            top, left = divmod(x.storage_offset() % (self.size[0] * self.size[1]), self.size[1])
            self.seen.add((top, left, *x.shape[-2:]))
        middle = [x.shape[2] * self.frames] if x.dim() == 5 else []
        sides = (cells * self.scale for cells in x.shape[-2:])
        out = x.flatten()[0].expand(x.shape[0], self.channels, *middle, *sides).clone()
        return (out, {}) if self.companion else out


class Pass(torch.nn.Module):
    """In place of a convolution before the decoder, whose dtype one class asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        return x


def decoded(vae, name: str, size: tuple[int, int], strategy: str = "serial"):
    """The picture of a constant latent of `size`, and the tiles (top, left, height, width) that it was made of."""
    vae.decoder = Recorder(name, size)
    if getattr(vae, "post_quant_conv", None) is not None:
        vae.post_quant_conv = Pass()
    middle = [3 if name == "AutoencoderKLMiniMaxH3" else 1] if len(tiny.CONFIGS[name][2]) == 5 else []
    x = torch.full((1, tiny.CONFIGS[name][2][1], *middle, *size), VALUE)
    return halotile.decode(vae, x, strategy=strategy), vae.decoder.seen


def spans_of(length: int, window: int, overlap: int) -> list[tuple[int, int]]:
    """What a loop over `range(0, length, stride)` cuts, clipped; one tile where the window clears the axis."""
    if length <= window:
        return [(0, length)]
    return [(start, min(window, length - start)) for start in range(0, length, window - overlap)]


def assert_spread(spans: list[tuple[int, int]], length: int, window: int, overlap: int) -> None:
    """Whole windows from edge to edge, and at least the overlap; one fewer could not do that."""
    if length <= window:
        assert spans == [(0, length)]
        return
    assert all(size == window for _, size in spans)
    starts = [start for start, _ in spans]
    assert starts[0] == 0
    assert starts[-1] + window == length
    assert all(0 < after - before <= window - overlap for before, after in pairwise(starts))
    assert window + (len(starts) - 2) * (window - overlap) < length


def a_request(rng: random.Random, ratio: int):
    """A window, an overlap and a picture in pixels: small numbers, one in ten not whole latents."""
    largest = 13 if ratio < 32 else 9
    sample = [rng.randint(1, largest) * ratio for _ in range(2)]
    window = [rng.randint(1, largest - 2) * ratio for _ in range(2)]
    if rng.random() < 0.4:
        window[1] = window[0]
    overlap = [
        rng.choice([0, rng.randint(0, win // ratio // 2) * ratio, rng.randint(0, win // ratio) * ratio])
        if side > win or rng.random() < 0.1
        else 0
        for side, win in zip(sample, window, strict=True)
    ]
    for numbers in (window, overlap):
        if rng.random() < 0.05:
            numbers[rng.randrange(2)] += rng.randint(1, ratio - 1)
    return tuple(window), tuple(overlap), tuple(sample)


def can_be(name: str, ratio: int, window, overlap, sample) -> bool:
    """Whether any loop of this kind can have these numbers."""
    least = ratio if name in NEEDS_OVERLAP else 0
    return all(
        win % ratio == shared % ratio == 0 and least < win and (least <= shared < win if side > win else shared == 0)
        for win, shared, side in zip(window, overlap, sample, strict=True)
    )


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_fifty_requests_are_refused_or_done_exactly(name: str) -> None:
    vae = tiny.build(name)
    ratio, rng = tiny.CONFIGS[name][3], random.Random(name)
    accepted = 0
    for count in range(50):
        window, overlap, sample = a_request(rng, ratio)
        before = dict(vars(vae))
        reason = check_request(vae, window, overlap, sample)
        possible_here = can_be(name, ratio, window, overlap, sample)
        assert possible_here >= (reason is None), (window, overlap, sample)
        assert name in PICKY or possible_here == (reason is None), (window, overlap, sample, reason)
        shape, why = tile_shape_plan(vae, *window, explain=True)
        assert dict(vars(vae)) == before, "asking sets nothing"
        assert (shape is None) == (why is not None)
        if shape is None:
            assert reason is not None
            assert name.split("_", maxsplit=1)[0] in why
            continue
        apply_tile_plan(vae, shape)
        plan, why = tile_overlap_plan(vae, *overlap, sample_shape=sample, explain=True)
        assert (plan is None) == (reason is not None) == (why is not None), (window, overlap, sample, reason, why)
        if plan is None:
            continue
        apply_tile_plan(vae, plan)
        accepted += 1
        size = sample[0] // ratio, sample[1] // ratio
        out, seen = decoded(vae, name, size, "tile" if count % 10 == 0 else "serial")
        assert out.shape[-2:] == sample
        # ramps y / n and 1 - y / n add up to 1 within a rounding (6e-8 at 0.625), once for each of up to four tiles,
        # and once more for each tile that reaches past the next one
        assert (out - VALUE).abs().max() < 1e-6, (window, overlap, sample)
        tilings = loop_tilings(vae, window, overlap, sample)
        assert seen == {
            (down.start, right.start, len(down), len(right)) for down in tilings[0].tiles for right in tilings[1].tiles
        }
        for axis, (length, win, shared) in enumerate(zip(size, window, overlap, strict=True)):
            spans = sorted({(tile[axis], tile[axis + 2]) for tile in seen})
            if name == "AutoencoderKLMiniMaxH3":
                assert_spread(spans, length, win // ratio, shared // ratio)
            else:
                assert spans == spans_of(length, win // ratio, shared // ratio), (window, overlap, sample)
    assert 15 <= accepted <= 48


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_shape_plan_alone_is_a_whole_tiling(name: str) -> None:
    """Whatever was set before, as in G2: a stride of 192 and then a window of 64."""
    vae = tiny.build(name)
    ratio = tiny.CONFIGS[name][3]
    known = {key for key in vars(vae) if key.startswith("tile_")}
    for tall, wide in ((8, 8), (12, 5), (5, 12), (3, 4)):
        plan = tile_shape_plan(vae, tall * ratio, wide * ratio)
        apply_tile_plan(vae, plan)
        for size in ((16, 16), (16, 3), (3, 16)):
            assert decoded(vae, name, size)[0].shape[-2:] == (size[0] * ratio, size[1] * ratio)
    plan = tile_shape_plan(vae, 8 * ratio, 8 * ratio)
    apply_tile_plan(vae, plan)
    # what a square does not need is gone
    assert {key for key in vars(vae) if key.startswith("tile_")} == known


def wan(**attributes):
    vae = tiny.build("AutoencoderKLWan_2.1")
    for key, value in attributes.items():
        setattr(vae, key, value)
    return vae


def test_the_plans_of_the_documentation() -> None:
    vae = wan()
    shape = {
        "tile_sample_min_height": 432, "tile_sample_min_width": 296, "tile_sample_stride_height": 320,
        "tile_sample_stride_width": 224,
    }  # fmt: skip
    assert tile_shape_plan(vae, 432, 296) == shape
    assert tile_shape_plan(vae, 430, 296) is None
    assert tile_shape_plan(vae, 430, 296, explain=True)[1] == (
        "AutoencoderKLWan cannot have a window of 430 x 296 px: 8 px are one latent: a window of 430 px along height "
        "is not whole latents; try 424 or 432"
    )
    apply_tile_plan(vae, shape)
    assert tile_overlap_plan(vae, 112, 0, sample_shape=(1024, 296)) == {
        "tile_sample_stride_height": 320,
        "tile_sample_stride_width": 296,
    }
    tall, wide = loop_tilings(vae, (432, 296), (72, 72), (1024, 1024))
    assert [(tile.start, tile.stop) for tile in tall.tiles] == [(0, 54), (45, 99), (90, 128)]
    assert wide.count == 5


# --- cases from the field


def test_g2_a_window_smaller_than_the_stored_stride() -> None:
    vae = wan(tile_sample_stride_height=192, tile_sample_stride_width=192)
    plan = tile_shape_plan(vae, 64, 64)
    assert (plan["tile_sample_stride_height"], plan["tile_sample_stride_width"]) == (48, 48)
    apply_tile_plan(vae, plan)
    assert decoded(vae, "AutoencoderKLWan_2.1", (32, 32))[0].shape[-2:] == (256, 256)
    # a window set by hand, so that the stride that is set is past it
    vae.tile_sample_min_height, vae.tile_sample_stride_height = 64, 192
    assert tile_shape_plan(vae, 128, 64)["tile_sample_stride_height"] == 96


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_g9_a_stride_past_the_window_names_both(name: str) -> None:
    ratio = tiny.CONFIGS[name][3]
    vae = tiny.build(name)
    reason = check_request(vae, (8 * ratio, 8 * ratio), (-2 * ratio, 0))
    assert f"{8 * ratio} px" in reason
    assert f"stride of {10 * ratio} px" in reason
    apply_tile_plan(vae, tile_shape_plan(vae, 8 * ratio, 8 * ratio))
    assert tile_overlap_plan(vae, -2 * ratio, 0) is None


def test_g10_a_half_window_pass_with_the_same_overlap() -> None:
    vae, sample = tiny.build("AutoencoderKL"), (640, 800)
    apply_tile_plan(vae, tile_shape_plan(vae, 256, 256))
    apply_tile_plan(vae, tile_overlap_plan(vae, 128, 128, sample))
    assert decoded(vae, "AutoencoderKL", (80, 100))[0].shape[-2:] == sample
    apply_tile_plan(vae, tile_shape_plan(vae, 128, 128))
    plan, reason = tile_overlap_plan(vae, 128, 128, sample, explain=True)
    assert plan is None
    assert "128 px on a window of 128 px" in reason
    assert "at least 1" in reason
    # half the window is still what is set, and goes on as such
    assert vae.tile_overlap_factor == 0.5
    assert decoded(vae, "AutoencoderKL", (80, 100))[0].shape[-2:] == sample


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderTiny", "AutoencoderKLLTX2Video"])
def test_d2_a_window_far_larger_than_the_canvas_is_one_tile(name: str) -> None:
    vae, ratio = tiny.build(name), tiny.CONFIGS[name][3]
    window, sample = (512 * ratio, 512 * ratio), (64 * ratio, 64 * ratio)
    assert [dim.count for dim in loop_tilings(vae, window, (0, 0), sample)] == [1, 1]
    reason = check_request(vae, window, (128 * ratio, 0), sample)
    assert "clears" in reason
    apply_tile_plan(vae, tile_shape_plan(vae, *window))
    apply_tile_plan(vae, tile_overlap_plan(vae, 0, 0, sample))
    assert decoded(vae, name, (64, 64))[1] == {(0, 0, 64, 64)}


def test_ltx_480_no_plan_leaves_a_tile_of_one_row() -> None:
    vae = tiny.build("AutoencoderKLLTX2Video")
    assert vae.tile_sample_stride_height == 448
    plan, reason = tile_overlap_plan(vae, 64, 64, sample_shape=(480 + 448, 832), explain=True)
    assert plan is None
    assert "1 latents" in reason
    assert "no fewer than 2" in reason
    # at 480 px the window clears the height: one tile, which is the exact request
    assert tile_overlap_plan(vae, 64, 64, sample_shape=(480, 832)) is None
    apply_tile_plan(vae, tile_overlap_plan(vae, 0, 64, sample_shape=(480, 832)))
    assert decoded(vae, "AutoencoderKLLTX2Video", (15, 26))[1] == {(0, 0, 15, 16), (0, 14, 15, 12)}
    assert "fewer than 64 px" in check_request(vae, (32, 512), (0, 64))


@pytest.mark.parametrize(("size", "tiles"), [((16, 16), 1), ((24, 16), 2), ((24, 24), 4), ((96, 168), 112)])
def test_h3_n(size: tuple[int, int], tiles: int) -> None:
    vae = tiny.build("AutoencoderKLMiniMaxH3")
    sample = size[0] * 16, size[1] * 16
    overlap = tuple(64 if side > 256 else 0 for side in sample)
    tilings = loop_tilings(vae, (256, 256), overlap, sample)
    assert tilings[0].count * tilings[1].count == tiles
    for tiling, length in zip(tilings, sample, strict=True):
        starts, lengths, _ = vae._split_tiles(length, 256, 64)
        assert [(tile.start * 16, len(tile) * 16) for tile in tiling.tiles] == list(zip(starts, lengths, strict=True))
    assert "without an overlap" in check_request(vae, (256, 256), (0, 64), (512, 512))


def test_defects_of_the_table_are_mended_where_they_were_refused() -> None:
    """CogVideoX at 128 px: its factors of 1 / 6 and 1 / 5 do not fit this window, so the plan brings some that do."""
    vae = tiny.build("AutoencoderKLCogVideoX")
    plan = tile_shape_plan(vae, 128, 128)
    assert (plan["tile_overlap_factor_height"], plan["tile_overlap_factor_width"]) == (3 / 16, 3 / 16)
    apply_tile_plan(vae, plan)
    assert decoded(vae, "AutoencoderKLCogVideoX", (40, 40))[0].shape[-2:] == (320, 320)


def test_magvit_compares_its_sides_crosswise() -> None:
    vae = tiny.build("AutoencoderKLMagvit")
    assert "other side" in check_request(vae, (64, 128), (16, 0), (96, 64))
    assert possible(vae, (64, 128), (16, 32), (192, 192))


def test_refusals_of_the_class_itself() -> None:
    tiny_vae = tiny.build("AutoencoderTiny")
    assert "ramp" in check_request(tiny_vae, (64, 64), (0, 8), (96, 96))
    refiner = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=8, block_out_channels=(16, 32, 32, 64, 64), layers_per_block=1
    )
    assert "loses the rest" in tile_shape_plan(refiner, 256, 256, explain=True)[1]


def test_windows_in_latents_and_in_pixels_that_are_not_in_step() -> None:
    vae = tiny.build("AutoencoderKLHunyuanVideo15")
    vae.tile_sample_min_height = 128
    plan, reason = tile_overlap_plan(vae, 32, 64, explain=True)
    assert plan is None
    assert "as 16 latents, not 8" in reason


def test_a_hard_coded_window_is_the_only_one() -> None:
    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(16,) * 4, layers_per_block=1, norm_num_groups=8)
    assert (vae.kernel, vae.stride) == ((24, 320, 320), (16, 200, 240))
    assert tile_shape_plan(vae, 320, 320) == {"kernel": (24, 320, 320), "stride": (16, 200, 240)}
    assert "320 x 320 px" in tile_shape_plan(vae, 320, 256, explain=True)[1]
    assert tile_overlap_plan(vae, 120, 80, (720, 800)) == {"stride": (16, 200, 240)}
    assert tile_overlap_plan(vae, 64, 80, (720, 800)) is None
    assert "would be lost" in tile_overlap_plan(vae, 120, 80, (728, 800), explain=True)[1]
    assert [dim.count for dim in loop_tilings(vae, (320, 320), (120, 80), (720, 800))] == [3, 3]
    apply_tile_plan(vae, tile_shape_plan(vae, 320, 320))
    assert vae.use_tiling


def test_the_hard_coded_loop_is_dealt_and_refused_where_it_loses_rows() -> None:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(16,) * 4, layers_per_block=1, norm_num_groups=8).eval()
    # by hand, so that it is small; the overlap of a small window is all that it takes
    vae.kernel, vae.stride, vae.use_tiling = (8, 64, 64), (4, 48, 48), True
    x = torch.randn(1, 4, 3, 14, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.decode(x).sample
        with halotile.parallelize(vae, strategy="tile") as handle:
            assert torch.equal(vae.decode(x).sample, expected)
            assert handle.report.tiles == 4
            with pytest.raises(PlanError, match="would be lost"):
                vae.decode(x[..., :12, :])
            with pytest.raises(UnsupportedError, match="clips of 2 frames"):
                vae.decode(x[:, :, :1])


# --- factors: floats that are cut to whole numbers


def test_factors_next_to_the_ratio_are_tried_and_nothing_else_is_taken() -> None:
    tried = 0
    for window in range(1, 80):
        for overlap in range(window):
            factor = find_factor([(window, overlap), (window * 8, overlap * 8)])
            if factor is None:
                continue
            tried += factor != overlap / window
            for cells in (window, window * 8):
                assert int(cells * factor) * window == cells * overlap
                assert int(cells * (1 - factor)) * window == cells * (window - overlap)
    assert tried > 50
    assert find_factor([(15, 12), (120, 96)]) is None
    assert find_factor([(16, 4), (8, 4)]) is None


def test_one_factor_serves_both_axes_or_halotile_adds_strides() -> None:
    vae = tiny.build("AutoencoderKLHunyuanVideo15")
    apply_tile_plan(vae, tile_shape_plan(vae, 256, 128))
    assert tile_overlap_plan(vae, 64, 32, (512, 512)) == {"tile_overlap_factor": 0.25}
    plan = tile_overlap_plan(vae, 64, 64, (512, 512))
    assert (plan["tile_sample_stride_height"], plan["tile_sample_stride_width"]) == (192, 64)
    cog = tile_overlap_plan(tiny.build("AutoencoderKLCogVideoX"), 40, 72, (480, 720))
    assert cog == {"tile_overlap_factor_height": 1 / 6, "tile_overlap_factor_width": 0.2}


# --- applying


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "explain=True"),
        ({"tile_sample_min_height": 64, "use_slicing": True}, "use_slicing"),
        ({"tile_sample_min_height": 64, "tile_sample_min_size": 64}, "tile_sample_min_size"),
        ({"tile_sample_min_height": 64, "tile_sample_min_width": "64"}, "not a number"),
        ({"tile_sample_min_height": 64, "tile_sample_min_width": True}, "not a number"),
        ({"tile_sample_min_height": 64, "tile_sample_min_width": None}, "not a number"),
    ],
)
def test_a_wrong_plan_changes_nothing(plan, said: str) -> None:
    vae = wan()
    before = dict(vars(vae))
    with pytest.raises(PlanError, match=said):
        apply_tile_plan(vae, plan)
    assert dict(vars(vae)) == before


def test_an_exception_half_way_leaves_the_vae_as_it_was() -> None:
    class Stubborn(diffusers.AutoencoderKLWan):
        def __setattr__(self, name, value):
            if name == "tile_sample_stride_width" and value == 64:
                raise RuntimeError("no")
            super().__setattr__(name, value)

    _, kwargs, *_ = tiny.CONFIGS["AutoencoderKLWan_2.1"]
    vae = Stubborn(**kwargs)
    plan = tile_shape_plan(vae, 128, 128) | {"tile_sample_stride_width": 64}
    before = dict(vars(vae))
    with pytest.raises(RuntimeError, match="no"):
        apply_tile_plan(vae, plan)
    assert dict(vars(vae)) == before


def test_what_is_no_number_of_pixels_is_an_error_and_not_a_refusal() -> None:
    vae = wan()
    for wrong in (64.0, "64", True, None):
        with pytest.raises(PlanError, match="whole"):
            tile_shape_plan(vae, wrong, 64)
        with pytest.raises(PlanError, match="whole"):
            tile_overlap_plan(vae, 64, wrong)
    with pytest.raises(PlanError, match="sample_shape"):
        tile_overlap_plan(vae, 64, 64, sample_shape=512)
    with pytest.raises(PlanError, match="two whole numbers"):
        possible(vae, (64, 64, 64), (0, 0))
    with pytest.raises(PlanError, match="not whole latents"):
        loop_tilings(vae, (64, 60), (0, 0), (512, 512))
    for ask in (lambda v: tile_shape_plan(v, 64, 64), lambda v: possible(v, (64, 64), (0, 0))):
        with pytest.raises(UnsupportedError, match="no row"):
            ask(torch.nn.Linear(1, 1))

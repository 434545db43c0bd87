"""Rectangular windows on classes that know squares: halotile's loop against theirs, and a blend done by hand."""

from __future__ import annotations

import copy

import diffusers
import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile import apply_tile_plan, tile_overlap_plan, tile_shape_plan, tiled_decode_for
from halotile.decode.stitch import run_loop, stand_ins
from halotile.errors import PlanError, UnsupportedError
from halotile.families import FAMILIES, family_of, set_window
from halotile.verify import compare

KVAE = {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 1, 2, 2)}
BLENDED = [
    "AutoencoderKL",
    "AutoencoderKL_flux1",
    "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLKVAE",
]
SQUARE = [*BLENDED, "AutoencoderTiny", "AutoencoderKLHunyuanVideo15"]


def build(name: str):
    if name != "AutoencoderKLKVAE":
        return tiny.build(name)
    torch.manual_seed(0)
    return diffusers.AutoencoderKLKVAE(**KVAE).eval().requires_grad_(False)


def ratio_of(vae) -> int:
    return family_of(vae).ratio(vae)


def an_input(vae, half: str, height: int, width: int) -> torch.Tensor:
    """Latents of this size, or the pixels for them."""
    config, unit = vae.config, 1 if half == "decode" else ratio_of(vae)
    channels = config.get("latent_channels", config.get("z_channels")) if half == "decode" else 3
    frames = [1] if "Video" in type(vae).__name__ else []
    shape = (1, channels, *frames, height * unit, width * unit)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def asked(vae, window, overlap, size) -> None:
    """Set a window and an overlap, both in latents, for latents of this size."""
    ratio = ratio_of(vae)
    apply_tile_plan(vae, tile_shape_plan(vae, *(cells * ratio for cells in window)))
    plan = tile_overlap_plan(vae, *(o * ratio for o in overlap), sample_shape=tuple(s * ratio for s in size))
    apply_tile_plan(vae, plan)


def by_its_own_loop(vae, half: str, x: torch.Tensor) -> torch.Tensor:
    """What the class's method makes of it."""
    rectangles = family_of(vae).rectangles
    method = getattr(vae, rectangles.decode if half == "decode" else rectangles.encode)
    out = method(x)
    return out if isinstance(out, torch.Tensor) else out.sample


# --- squares: bit for bit the class's own loop


@pytest.mark.parametrize(
    ("name", "half"),
    # the class's own tiled_encode crashes
    [
        (n, half)
        for n in SQUARE
        for half in ("decode", "encode")
        if (n, half) != ("AutoencoderKLHunyuanImage", "encode")
    ],
)
def test_squares_are_bitwise_those_of_the_class(name: str, half: str) -> None:
    vae = build(name)
    family, ratio = family_of(vae), ratio_of(vae)
    for window, stride, size in ((4, 3, (7, 6)), (4, 2, (6, 5)), (6, 5, (10, 3))):
        if name == "AutoencoderTiny" and half == "encode" and window - stride == 1:
            # a ramp over one row of latents divides by zero
            continue
        set_window(vae, window * ratio, stride * ratio)
        assert tiled_decode_for(vae) is None
        assert stand_ins(vae, half) == {}
        x = an_input(vae, half, *size)
        with torch.no_grad():
            assert torch.equal(run_loop(vae, half, family, x), by_its_own_loop(vae, half, x))


@pytest.mark.parametrize("name", SQUARE)
def test_a_square_that_is_said_twice_is_left_to_the_class(name: str) -> None:
    vae = build(name)
    ratio = ratio_of(vae)
    set_window(vae, 4 * ratio, 3 * ratio)
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 3 * ratio
    assert tiled_decode_for(vae) is None
    vae.tile_sample_stride_width = 2 * ratio
    assert tiled_decode_for(vae) is not None


def test_every_class_but_those_is_left_to_itself() -> None:
    for name in tiny.CONFIGS:
        if name not in SQUARE:
            vae, ratio = tiny.build(name), tiny.CONFIGS[name][3]
            apply_tile_plan(vae, tile_shape_plan(vae, 6 * ratio, 6 * ratio))
            assert tiled_decode_for(vae) is None
    assert tiled_decode_for(torch.nn.Linear(1, 1)) is None
    assert {name for name, row in FAMILIES.items() if row.rectangles} == {name.split("_", 1)[0] for name in SQUARE}


# --- rectangles: a blend done by hand


class Steps(torch.nn.Module):
    """A decoder whose tiles do not fit together: a cell of latent (channel 0) is a square of pixels, plus the mean."""

    def __init__(self, ratio: int, channels: int = 3) -> None:
        super().__init__()
        self.ratio, self.channels = ratio, channels

    def forward(self, x):
        first = x[:, :1]
        out = first.repeat_interleave(self.ratio, -2).repeat_interleave(self.ratio, -1) + first.mean()
        return out.repeat_interleave(self.channels, 1)


def with_steps(name: str):
    vae = build(name)
    vae.decoder = Steps(ratio_of(vae))
    if getattr(vae, "post_quant_conv", None) is not None:
        vae.post_quant_conv = torch.nn.Identity()
    return vae


def tiles_by_hand(latent, window, overlap, ratio: int):
    """The results of all tiles as nested lists of floats, each with its first row and column in pixels."""

    def starts(length, win, shared):
        return [0] if length <= win else range(0, length, win - shared)

    (height, width), out = latent.shape, {}
    for i, top in enumerate(starts(height, window[0], overlap[0])):
        for j, left in enumerate(starts(width, window[1], overlap[1])):
            part = latent[top : top + window[0], left : left + window[1]].double()
            mean = part.mean().item()
            rows = [[part[y // ratio, x // ratio].item() + mean for x in range(part.shape[1] * ratio)]
                    for y in range(part.shape[0] * ratio)]  # fmt: skip
            out[i, j] = (top * ratio, left * ratio, rows)
    return out


def blended_by_hand(latent, window, overlap, ratio: int) -> torch.Tensor:
    """A pixel belongs to the last tile that starts at or before it, and fades in from the tile above, then the left."""
    tiles, done = tiles_by_hand(latent, window, overlap, ratio), {}

    def value(i, j, y, x):
        """The pixel (y, x) of tile (i, j), blended; tiles above and to the left are blended themselves."""
        if (i, j, y, x) not in done:
            rows = tiles[i, j][2]
            out = rows[y][x]
            if i > 0:
                above = len(tiles[i - 1, j][2])
                n = min(above, len(rows), overlap[0] * ratio)
                if y < n:
                    out = value(i - 1, j, above - n + y, x) * (1 - y / n) + out * (y / n)
            if j > 0:
                before = len(tiles[i, j - 1][2][0])
                n = min(before, len(rows[0]), overlap[1] * ratio)
                if x < n:
                    out = value(i, j - 1, y, before - n + x) * (1 - x / n) + out * (x / n)
            done[i, j, y, x] = out
        return done[i, j, y, x]

    picture = torch.zeros(latent.shape[0] * ratio, latent.shape[1] * ratio, dtype=torch.float64)
    for y in range(picture.shape[0]):
        for x in range(picture.shape[1]):
            i, j = max(key for key, (top, left, _) in tiles.items() if top <= y and left <= x)
            picture[y, x] = value(i, j, y - tiles[i, j][0], x - tiles[i, j][1])
    return picture


def masked_by_hand(latent, window, overlap, ratio: int) -> torch.Tensor:
    """Tile after tile is laid over what is there, with ramps from 0 to 1 at its upper and its left edge."""
    tiles = tiles_by_hand(latent, window, overlap, ratio)
    picture = torch.zeros(latent.shape[0] * ratio, latent.shape[1] * ratio, dtype=torch.float64)
    for (i, j), (top, left, rows) in sorted(tiles.items()):
        for y, row in enumerate(rows):
            for x, pixel in enumerate(row):
                down = 1.0 if i == 0 else min(y / (overlap[0] * ratio - 1), 1.0)
                right = 1.0 if j == 0 else min(x / (overlap[1] * ratio - 1), 1.0)
                there = picture[top + y, left + x].item()
                picture[top + y, left + x] = down * right * pixel + (1 - down * right) * there
    return picture


RECTANGLES = [
    ((5, 3), (2, 1), (8, 7)),
    ((3, 5), (1, 3), (7, 8)),
    ((4, 4), (1, 2), (9, 6)),
    ((9, 3), (0, 1), (8, 7)),  # strips: the window clears the height
    ((5, 2), (4, 1), (7, 4)),  # tiles inside of their predecessors
    ((6, 6), (3, 0), (11, 6)),  # a square by one axis alone
]


@pytest.mark.parametrize(
    ("name", "window", "overlap", "size"),
    # 32 pixels a latent are many to do by hand
    [(n, *ask) for n in SQUARE for ask in (RECTANGLES[4:5] if n == "AutoencoderKLHunyuanImage" else RECTANGLES)],
)
def test_rectangles_are_a_blend_by_hand(name: str, window, overlap, size) -> None:
    vae = with_steps(name)
    asked(vae, window, overlap, size)
    x = an_input(vae, "decode", *size)
    with torch.no_grad():
        out = halotile.decode(vae, x, strategy="tile")
    by_hand = masked_by_hand if name == "AutoencoderTiny" else blended_by_hand
    expected = by_hand(x[0, 0].reshape(size), window, overlap, ratio_of(vae))
    # float32 against float64: a rounding for each of some blends of numbers up to 6
    assert (out[0, 0].reshape(expected.shape).double() - expected).abs().max() < 4e-6


@pytest.mark.parametrize("name", SQUARE)
def test_the_loop_is_used_where_the_class_has_its_own(name: str) -> None:
    """As a user may install it, without a handle; and rectangles decode to the right size with the real networks."""
    vae = build(name)
    asked(vae, (5, 3), (2, 1), (8, 7))
    x, rectangles = an_input(vae, "decode", 8, 7), family_of(vae).rectangles
    loop = tiled_decode_for(vae)
    with torch.no_grad():
        expected = halotile.decode(vae, x, strategy="serial")
        assert torch.equal(halotile.decode(vae, x, strategy="tile"), expected)
        plain = tiny.decode(vae, name, x) if name in tiny.CONFIGS else vae.decode(x).sample
        assert not torch.equal(plain, expected), "the class by itself decodes squares"
        setattr(vae, rectangles.decode, loop)
        assert torch.equal(vae.decode(x).sample, expected)
        assert torch.equal(vae.decode(x, return_dict=False)[0], expected)
        own = loop(x)
        assert isinstance(own, torch.Tensor) != rectangles.wraps
        assert torch.equal(loop(x, return_dict=False)[0], expected)
        # what is set now, and not what was set then
        set_window(vae, 6 * ratio_of(vae), 4 * ratio_of(vae))
        again = loop(x, return_dict=False)[0]
        delattr(vae, rectangles.decode)
        assert torch.equal(again, by_its_own_loop(vae, "decode", x))


@pytest.mark.parametrize("name", [name for name in SQUARE if name != "AutoencoderKLHunyuanImage"])
def test_encoding_obeys_the_same_window(name: str) -> None:
    """Each tile of pixels is a constant that the encoder returns, so a constant picture has a constant latent."""
    vae = build(name)
    ratio = ratio_of(vae)
    asked(vae, (5, 4), (2, 3), (8, 7))
    seen = []
    vae.encoder.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[-2:])))
    x = an_input(vae, "encode", 8, 7)
    with torch.no_grad():
        whole = halotile.encode(vae, x, strategy="serial")
        assert halotile.encode(vae, x, strategy="tile").equal(whole)
    assert whole.shape[-2:] == (8, 7)
    rows, columns = (5, 5, 2), (4, 4, 4, 4, 3, 2, 1)
    assert seen[:21] == [(tall * ratio, wide * ratio) for tall in rows for wide in columns]


def test_the_report_says_whose_loop_ran() -> None:
    vae = build("AutoencoderKL")
    asked(vae, (5, 3), (2, 1), (8, 7))
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        vae.decode(an_input(vae, "decode", 8, 7))
    # starts every 3 rows and every 2 columns
    assert handle.report.tiles == 3 * 4
    assert "halotile's loop stood in for tiled_decode" in handle.report.reason
    # a picture that one window holds is one call, and no loop
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        out = vae.decode(an_input(vae, "decode", 5, 3)).sample
    assert handle.report.tiles == 1
    vae.use_tiling = False
    with torch.no_grad():
        assert torch.equal(vae.decode(an_input(vae, "decode", 5, 3)).sample, out)


# --- over ranks


def _over_ranks(group, name: str):
    vae = build(name)
    asked(vae, (5, 4), (2, 2), (8, 7))
    vae.use_slicing = True
    x = torch.cat([an_input(vae, "decode", 8, 7), an_input(vae, "decode", 8, 7) + 1])
    pixels = an_input(vae, "encode", 8, 7)
    calls: list[int] = []
    vae.decoder.register_forward_pre_hook(lambda module, args: calls.append(1))
    loop = tiled_decode_for(vae, group)
    with torch.no_grad():
        with halotile.parallelize(vae, group, strategy="tile") as handle:
            out = vae.decode(x).sample
            encoded = vae.encode(pixels)
        made = len(calls)
        setattr(vae, family_of(vae).rectangles.decode, loop)
        dealt = vae.decode(x).sample
        made_dealt = len(calls) - made
    latents = encoded.latents if name == "AutoencoderTiny" else encoded.latent_dist.mode()
    return out, dealt, latents, made, made_dealt, handle.report.ranks


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderTiny", "AutoencoderKLHunyuanVideo15"])
def test_two_ranks_are_bitwise_one(name: str) -> None:
    vae = build(name)
    asked(vae, (5, 4), (2, 2), (8, 7))
    vae.use_slicing = True
    x = torch.cat([an_input(vae, "decode", 8, 7), an_input(vae, "decode", 8, 7) + 1])
    with torch.no_grad():
        expected = halotile.decode(vae, x, strategy="serial")
        latents = halotile.encode(vae, an_input(vae, "encode", 8, 7), strategy="serial")
    results = run_ranks(_over_ranks, 2, name)
    for out, dealt, encoded, made, made_dealt, ranks in results:
        assert ranks == 2
        assert compare(out, expected).bitwise
        assert compare(dealt, expected).bitwise
        assert compare(encoded, latents).bitwise
        assert 0 < made < 24
        assert 0 < made_dealt < 24
    # 3 x 4 tiles of two samples
    assert sum(result[3] for result in results) == 24
    assert sum(result[4] for result in results) == 24


# --- nothing stays behind


def test_the_vae_is_as_it_was_after_a_call_and_after_an_exception() -> None:
    vae = build("AutoencoderKL")
    asked(vae, (5, 3), (2, 1), (8, 7))
    x = an_input(vae, "decode", 8, 7)
    before = dict(vars(vae))
    handle = halotile.parallelize(vae, strategy="tile")
    with torch.no_grad():
        vae.decode(x)
    assert set(vars(vae)) == {*before, "decode", "encode"}
    hook = vae.decoder.mid_block.register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(Exception, match="division"):
        vae.decode(x)
    hook.remove()
    handle.remove()
    assert dict(vars(vae)) == before
    vae.tile_sample_stride_height = 300
    with halotile.parallelize(vae, strategy="tile"), pytest.raises(PlanError, match="300"):
        vae.decode(x)
    assert {**vars(vae), "tile_sample_stride_height": 24} == before
    copied = copy.deepcopy(vae)
    assert copied.tile_sample_stride_height == 300
    # a square takes with it what it does not need
    apply_tile_plan(vae, tile_shape_plan(vae, 64, 64))
    assert not any(name.startswith(("tile_sample_stride", "tile_sample_min_h")) for name in vars(vae))


def test_a_dealt_loop_refuses_as_a_handle_does() -> None:
    vae = build("AutoencoderKL")
    asked(vae, (5, 3), (2, 1), (8, 7))
    loop = tiled_decode_for(vae, halotile.Ranks.alone())
    vae.tile_sample_stride_height = 300
    with pytest.raises(PlanError, match="300"):
        loop(an_input(vae, "decode", 8, 7))
    wide = build("AutoencoderTiny")
    wide.tile_sample_stride_height = wide.tile_sample_min_size
    with torch.no_grad(), pytest.raises(UnsupportedError, match="ramp"):
        halotile.decode(wide, torch.zeros(1, 4, 70, 70), strategy="tile")

"""Tiles of tokens: which they keep, with which weight, and where they are told to be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from denoised import affine, identity, places, tiling, values, where

from halotile import PlanError, TiledDenoiser, UnsupportedError
from halotile.comm import Ranks
from halotile.denoise import plan_tokens
from halotile.denoise.plain import sigma_of, tokens_of
from halotile.denoise.positions import positions_for, shift_time, start_of


def random_tilings(count):
    """Grids and tilings of them, drawn with a seed: overlaps up to the largest that still advance."""
    generator = torch.Generator().manual_seed(7)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(count):
        grid = (draw(1, 5), draw(1, 14), draw(1, 14))
        dims = []
        for length in grid:
            tiles = draw(1, min(4, length))
            dims.append((tiles, draw(0, length - tiles)))
        yield grid, tiling(*dims)


@pytest.mark.parametrize("model", [identity, affine])
@pytest.mark.parametrize("conditioned", [False, True])
def test_a_model_of_single_tokens_is_as_it_was_without_tiles(model, conditioned):
    for grid, tiles in random_tilings(100):
        extra = [(-1, 0, 0), (grid[0] - 1, 2, 0), (0, 0, 0)] if conditioned else []
        extra = [place for place in extra if place[1] < grid[1]]
        tokens, positions = values(grid, len(extra), batch=2), places(grid, extra, batch=2)
        denoiser = TiledDenoiser(model, tiles, Ranks.alone())
        timesteps = 0.9 * torch.rand(2, tokens.shape[1], generator=torch.Generator().manual_seed(1))
        got = denoiser(tokens, positions, grid=grid, timesteps=timesteps)
        # float32 weights that sum to 1 to half a rounding, and a few additions
        torch.testing.assert_close(got, model(tokens, positions, timesteps=timesteps), rtol=1e-6, atol=1e-6)
        assert denoiser.report.unkept == 0
        # what float32 leaves of the difference of two equal squares, which are up to ten
        assert denoiser.report.drift < (1e-12 if model is identity else 1e-6)


# cases.md, B2: a plain trapezoid of these sums to 1.143, 1.040, 1.056 and 1.556
@pytest.mark.parametrize("case", [(16, 4, 6), (12, 3, 4), (34, 8, 5), (16, 8, 5)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weights_sum_to_one_where_overlaps_reach_past_the_next_tile(case, dim):
    cells, count, overlap = case
    grid, dims = [2, 3, 2], [(1, 0)] * 3
    grid[dim], dims[dim] = cells, (count, overlap)
    plan = plan_tokens(tuple(grid), tiling(*dims), None, grid[0] * grid[1] * grid[2])
    total = torch.zeros(plan.total, dtype=torch.float64)
    for tile in plan.tiles:
        assert tile.weights.dtype == torch.float32
        assert tile.weights.min() > 0
        total[tile.kept] += tile.weights
    assert (total - 1).abs().max() < 1e-6


def test_weights_are_float32_and_sum_to_one_for_bfloat16_tokens():
    grid, tiles = (3, 12, 16), tiling((2, 1), (3, 4), (8, 5))
    tokens = values(grid, 1, dtype=torch.bfloat16)
    positions = places(grid, [(-1, 0, 0)])
    seen = []
    denoiser = TiledDenoiser(lambda tokens, positions: affine(tokens, positions).to(torch.bfloat16), tiles)
    denoiser.register_forward_hook(lambda *_: seen.append(1))
    got = denoiser(tokens, positions, grid=grid)
    assert got.dtype == torch.bfloat16
    assert seen == [1]
    # float32 sums of equal bfloat16 values are nearer to them than bfloat16 can tell: no error but the model's
    assert torch.equal(got, affine(tokens, positions).to(torch.bfloat16))
    total = torch.zeros(tokens.shape[1])
    for tile in plan_tokens(grid, tiles, positions, tokens.shape[1]).tiles:
        total[tile.kept] += tile.weights
    assert (total - 1).abs().max() < 1e-6


def test_tokens_are_row_major_and_tiles_in_order():
    plan = plan_tokens((2, 4, 3), tiling((1, 0), (2, 0), (1, 0)), None, 24)
    first, second = plan.tiles
    assert first.kept.tolist() == [*range(6), *range(12, 18)]
    assert second.kept.tolist() == [*range(6, 12), *range(18, 24)]
    assert second.grid == (2, 2, 3)
    assert (second.index, second.region[1].start) == (1, 2)


def test_a_tile_keeps_what_overlaps_it_in_all_dims_and_every_reference():
    grid, tiles = (4, 8, 8), tiling((2, 0), (2, 0), (1, 0))
    extra = [
        (-1, 90, 90),  # a reference: all tiles
        (0, 0, 0),  # tile 0 alone
        (0, 4, 0),  # begins where tile 0 ends: half-open, tile 1 alone
        (1.5, 3.5, 7.9),  # across all four
        (0, 0, 8),  # just outside
        (4, 0, 0),  # after the end
        (-0.5, 0, 0),  # begins before zero: a reference too
    ]
    positions = places(grid, extra)
    total = positions.shape[2]
    plan = plan_tokens(grid, tiles, positions, total)
    kept = [[int(index) - 256 for index in tile.kept[len(tile.generated) :]] for tile in plan.tiles]
    assert kept == [[0, 1, 3, 6], [0, 2, 3, 6], [0, 3, 6], [0, 3, 6]]
    assert plan.unkept.tolist() == [260, 261]
    assert [tile.weights[-1].item() for tile in plan.tiles] == [0.25] * 4
    assert plan.tiles[0].weights[len(plan.tiles[0].generated) + 1].item() == 1.0


def test_a_token_without_a_width_is_a_point():
    grid, tiles = (1, 4, 1), tiling((1, 0), (2, 0), (1, 0))
    positions = places(grid, [(0, 2, 0)])
    positions[:, 1, -1] = 2.0
    plan = plan_tokens(grid, tiles, positions, 5)
    assert [4 in tile.kept.tolist() for tile in plan.tiles] == [False, True]


def test_generated_tokens_without_a_width_keep_what_lies_on_them():
    grid, tiles = (1, 6, 6), tiling((1, 0), (2, 2), (2, 0))
    points = places(grid)
    points[..., 1] = points[..., 0]
    # one conditioning token on each
    positions = torch.cat([points, points], 2)
    tokens = values(grid, 36)
    denoiser = TiledDenoiser(affine, tiles, Ranks.alone())
    torch.testing.assert_close(denoiser(tokens, positions, grid=grid), affine(tokens, positions))
    assert denoiser.report.unkept == 0
    # the tiles of 4 x 3 keep 4 x 3 each
    assert denoiser.report.loads == (4 * 2 * 12,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((1, 9, 4), r"no grid of \(1, 9, 4\) .*along height, tokens at 2 begin at \[0.0, 1.0\]"),
        ((4, 1, 9), r"along height, tokens at 0 begin at \[0.0, 1.0, 2.0, 3.0\]"),
        ((1, 4, 8), r"no grid of \(1, 4, 8\)"),
        ((1, 3, 9), r"behind the 27 of grid=\(1, 3, 9\) are its next row"),
    ],
)
def test_a_grid_that_is_not_that_of_the_positions_is_refused(wrong, message):
    denoiser = TiledDenoiser(identity, tiling((1, 0), (2, 0), (2, 0)), Ranks.alone())
    with pytest.raises(PlanError, match=message):
        denoiser(values((1, 4, 9)), places((1, 4, 9)), grid=wrong)


def test_positions_that_descend_or_leave_out_a_frame_are_refused():
    tiles = tiling((1, 0), (2, 0), (1, 0))
    descending = places((2, 4, 3)).flip(2)
    with pytest.raises(PlanError, match="before the last one"):
        plan_tokens((2, 4, 3), tiles, descending, 24)
    with pytest.raises(PlanError, match="are its next frame"):
        TiledDenoiser(identity, tiles, Ranks.alone())(values((2, 4, 3)), places((2, 4, 3)), grid=(1, 4, 3))
    # of the second sample too
    swapped = torch.cat([places((2, 4, 3)), descending])
    with pytest.raises(PlanError, match="along frames"):
        plan_tokens((2, 4, 3), tiles, swapped, 24)


def test_weights_do_not_depend_on_the_default_dtype():
    grid, tiles = (1, 9, 4), tiling((1, 0), (3, 0), (1, 0))
    # in each of three tiles: a third has no exact bfloat16
    tokens, positions = values(grid, 1), places(grid, [(-1, 0, 0)])
    denoiser = TiledDenoiser(identity, tiles, Ranks.alone())
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = denoiser(tokens, positions, grid=grid)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, tokens, rtol=1e-6, atol=1e-6)


def test_a_conditioning_token_is_kept_for_all_samples_when_one_needs_it():
    grid, tiles = (1, 4, 1), tiling((1, 0), (2, 0), (1, 0))
    positions = places(grid, [(0, 0, 0)], batch=2)
    positions[1, 1, -1] += 2
    plan = plan_tokens(grid, tiles, positions, 5)
    assert all(4 in tile.kept.tolist() for tile in plan.tiles)


def test_tiles_are_found_once_for_a_geometry(monkeypatch):
    from halotile.denoise import tokens as module

    made = []
    original = module._with_conditioning
    monkeypatch.setattr(module, "_with_conditioning", lambda *args: made.append(1) or original(*args))
    grid, tiles = (2, 9, 7), tiling((1, 0), (3, 1), (1, 0))
    positions = places(grid, [(0, 0, 0), (-1, 0, 0)])
    denoiser = TiledDenoiser(identity, tiles, Ranks.alone())
    for _ in range(5):
        denoiser(values(grid, 2), positions.clone(), grid=grid)
    assert made == [1]
    # a change in place is another geometry
    positions[:, 1, -2] += 5
    denoiser(values(grid, 2), positions, grid=grid)
    assert made == [1, 1]
    assert denoiser.report.tokens == 128


@pytest.mark.parametrize("normalize", [True, False])
def test_a_model_that_returns_its_positions_shows_the_shift(normalize):
    grid, tiles = (4, 6, 8), tiling((2, 0), (2, 0), (2, 0))
    scale = (0.25, 32.0, 32.0)
    positions = places(grid, [(1, 2, 3), (-2, 0, 0)], scale=scale)
    denoiser = TiledDenoiser(where, tiles, Ranks.alone(), normalize_positions=normalize)
    got = denoiser(values(grid, 2, depth=6), positions, grid=grid)
    # (time, height, width) of the tile that a token is in; these numbers are exact in float32
    own = where(torch.empty(1), positions)
    starts = torch.zeros(1, positions.shape[2], 3)
    for index, (f, h, w) in enumerate(product(*map(range, grid))):
        starts[0, index] = torch.tensor([(f // 2) * 0.5, (h // 3) * 96.0, (w // 4) * 128.0])
    expected = own - starts.repeat_interleave(2, -1) * normalize
    # the reference is in all eight tiles: the mean of what they were told
    expected[:, -1] = own[:, -1] - torch.tensor([0.25, 48.0, 64.0]).repeat_interleave(2) * normalize
    assert torch.equal(got, expected)


def test_positions_of_every_tile_begin_at_zero_and_keep_their_widths():
    # cases.md, D6: a grid larger than any position of training
    grid, tiles = (6, 40, 60), tiling((2, 1), (4, 3), (5, 2))
    scale = (1 / 24, 32.0, 32.0)
    positions = places(grid, batch=2, scale=scale)
    plan = plan_tokens(grid, tiles, positions, positions.shape[2])
    for tile in plan.tiles:
        moved = positions_for(positions, tile)
        assert torch.equal(moved[..., 0].amin(-1), torch.zeros(2, 3))
        largest = torch.tensor([side * size for side, size in zip(tile.grid, scale, strict=True)])
        torch.testing.assert_close(moved[0, :, :, 1].amax(-1), largest)
        torch.testing.assert_close(
            moved[..., 1] - moved[..., 0], (positions[..., 1] - positions[..., 0])[:, :, tile.kept]
        )


@pytest.mark.parametrize("references", ["shift", "keep"])
def test_references_move_along_or_stay(references):
    grid, tiles = (4, 8, 8), tiling((2, 0), (1, 0), (2, 0))
    positions = places(grid, [(-2, 0, 5), (3, 0, 6)])
    plan = plan_tokens(grid, tiles, positions, positions.shape[2])
    assert [257 in tile.kept.tolist() for tile in plan.tiles] == [False, False, False, True]
    for tile in plan.tiles:
        moved, start = positions_for(positions, tile, True, references)[0, ..., 0], start_of(positions, tile)[0]
        assert torch.equal(moved[:, : len(tile.generated)].amin(-1), torch.zeros(3))
        reference = tile.kept.tolist().index(256)
        shift = start if references == "shift" else torch.zeros(3)
        assert torch.equal(moved[:, reference], torch.tensor([-2.0, 0.0, 5.0]) - shift)
    # a conditioning token that is not a reference moves with its tile in any case: frames from 2, columns from 4
    assert torch.equal(moved[:, -1], torch.tensor([1.0, 0.0, 2.0]))


def test_only_references_stay_where_they_are():
    grid, tiles = (4, 2, 2), tiling((2, 0), (1, 0), (1, 0))
    positions = places(grid, [(-9, 0, 0)])
    positions[:, 0, :16] -= 2
    for tile in plan_tokens(grid, tiles, positions, 17).tiles:
        moved = positions_for(positions, tile, True, "keep")[0, 0, :, 0]
        # generated tokens of negative time move
        assert moved.tolist() == [0.0] * 4 + [1.0] * 4 + [-9.0]


def test_audio_at_whole_seconds_moves_by_fractions():
    whole = torch.tensor([[[[0, 1], [1, 2]]]])
    moved = shift_time(whole, torch.tensor([0.5]))
    assert moved.flatten().tolist() == [-0.5, 0.5, 0.5, 1.5]
    assert shift_time(whole.bfloat16(), torch.tensor([0.5])).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sigma", "timesteps", "expected"),
    [
        (0.5, None, 0.5),
        (np.float32(0.5), None, 0.5),
        ([0.25, 0.5], None, 0.5),
        (torch.tensor([[0.25, 0.5]]), None, 0.5),
        (None, torch.tensor([0.5]), 0.5),
        (object(), [0.5], 0.5),
        (torch.empty(0), None, None),
        (900, 0.5, None),
        (float("nan"), 0.5, None),
        (-1.0, None, None),
        (None, None, None),
    ],
)
def test_noise_is_known_where_it_is_from_0_to_1(sigma, timesteps, expected):
    assert sigma_of(sigma, timesteps) == expected


def test_only_what_is_declared_to_be_about_tokens_is_cut():
    grid, tiles = (1, 4, 3), tiling((1, 0), (2, 0), (1, 0))
    tile = plan_tokens(grid, tiles, None, 12).tiles[1]
    kept = tile.kept
    per_token, deep, square = torch.rand(2, 12), torch.rand(2, 12, 1), torch.rand(2, 1, 12, 12)
    assert torch.equal(tokens_of("timesteps", per_token, tile, 12), per_token[:, kept])
    assert torch.equal(tokens_of("keyframes_mask", deep, tile, 12), deep[:, kept])
    assert torch.equal(tokens_of("attention_mask", square, tile, 12), square[..., kept, :][..., kept])
    keys = torch.rand(2, 1, 1, 12)
    assert torch.equal(tokens_of("attention_mask", keys, tile, 12), keys[..., kept])
    assert torch.equal(tokens_of("attention_mask", per_token, tile, 12), per_token[:, kept])
    several = tokens_of("guide", [per_token, (deep, None)], tile, 12)
    assert torch.equal(several[0], per_token[:, kept])
    assert torch.equal(several[1][0], deep[:, kept])
    assert (type(several), type(several[1]), several[1][1]) == (list, tuple, None)
    assert torch.equal(tokens_of("named", deep, tile, 12, ("named",)), deep[:, kept])
    # as many samples as tokens: one a pair, unless there is a dim of 1 between
    pairs = torch.rand(12, 12)
    assert torch.equal(tokens_of("attention_mask", pairs, tile, 12), pairs[kept][:, kept])
    assert torch.equal(tokens_of("attention_mask", pairs[:, None], tile, 12), pairs[:, None, kept])
    # a text of as many tokens as the video, and what is broadcast, stay whole
    for name, value in (
        ("context", torch.rand(2, 12, 5)),
        ("timesteps", torch.rand(2)),
        ("timesteps", torch.rand(2, 1)),
        ("attention_mask", torch.rand(2, 1, 1, 1)),
        ("attention_mask", None),
        ("timesteps", 3),
    ):
        assert tokens_of(name, value, tile, 12) is value
    with pytest.raises(PlanError, match=r"timesteps of shape \(2, 7\) has 7 along dim 1, where 12 tokens"):
        tokens_of("timesteps", torch.rand(2, 7), tile, 12)


def test_numbers_that_cannot_be_are_refused():
    tokens, positions = values((1, 4, 3)), places((1, 4, 3))
    halves = tiling((1, 0), (2, 0), (1, 0))
    denoiser = TiledDenoiser(identity, halves, Ranks.alone())
    for grid in (None, (4, 3), (1, 4, 0), (1, 4.0, 3), "abc"):
        with pytest.raises(PlanError, match="give the frames, height and width"):
            denoiser(tokens, positions, grid=grid)
    with pytest.raises(PlanError, match=r"12 tokens are fewer than the 20"):
        denoiser(tokens, positions, grid=(1, 5, 4))
    with pytest.raises(PlanError, match="positions of 12 tokens must be B 3 12 2"):
        denoiser(tokens, positions[..., :1], grid=(1, 4, 3))
    with pytest.raises(PlanError, match="tokens must be B N D"):
        denoiser(tokens[0], positions, grid=(1, 4, 3))
    with pytest.raises(PlanError, match="height of 4 tokens: 5 tiles"):
        TiledDenoiser(identity, tiling((1, 0), (5, 0), (1, 0)), Ranks.alone())(tokens, positions, grid=(1, 4, 3))
    with pytest.raises(PlanError, match="have no positions"):
        plan_tokens((1, 4, 2), halves, None, 12)
    with pytest.raises(UnsupportedError, match="it must be"):
        TiledDenoiser(lambda x, p: x[..., :2], halves, Ranks.alone())(tokens, positions, grid=(1, 4, 3))
    with pytest.raises(UnsupportedError, match="not of a known class"):
        denoiser(hidden_states=tokens)
    with pytest.raises(UnsupportedError, match="give a TileCountConfig"):
        TiledDenoiser(identity, (2, 2), Ranks.alone())
    for nested in (denoiser, torch.compile(denoiser, backend="eager")):
        with pytest.raises(UnsupportedError, match="tiled already"):
            TiledDenoiser(nested, halves, Ranks.alone())
    assert denoiser(tokens, positions, grid=np.array([1, 4, 3])).shape == tokens.shape
    for returned in ((tokens,), {"sample": tokens}, None):
        with pytest.raises(UnsupportedError, match=f"returned a {type(returned).__name__} for the video"):
            TiledDenoiser(lambda x, p, made=returned: made, halves, Ranks.alone())(tokens, positions, grid=(1, 4, 3))
    with pytest.raises(PlanError, match="audio must be a tensor B A D, got list"):
        denoiser(tokens, positions, grid=(1, 4, 3), audio=[1])
    with pytest.raises(UnsupportedError, match="returned NoneType for audio of"):
        TiledDenoiser(lambda x, p, audio: (x, None), halves, Ranks.alone(), audio="frozen")(
            tokens, positions, grid=(1, 4, 3), audio=torch.zeros(1, 2, 3)
        )
    for options, message in (
        ({"deterministic": "yes"}, "deterministic='yes' must be True or False"),
        ({"normalize_positions": 1}, "normalize_positions=1 must be"),
        ({"first_sigma_limit": "1"}, "first_sigma_limit='1' must be"),
        ({"per_token": "mask"}, "per_token='mask' must be names"),
    ):
        with pytest.raises(PlanError, match=message):
            TiledDenoiser(identity, halves, Ranks.alone(), **options)
    for name in ("reference_positions", "prediction", "audio", "scheduler"):
        with pytest.raises(PlanError, match=f"{name}='other' is not known"):
            TiledDenoiser(identity, halves, Ranks.alone(), **{name: "other"})

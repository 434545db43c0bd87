"""Diffusers transformers on tiles: each class of tiny_transformers.py, and the ways in which pipelines call it."""

from __future__ import annotations

import functools
from math import prod

import pytest
import torch
from denoised import tiling
from ranks import run_ranks
from tiny_transformers import (
    CASES,
    GRID,
    PICTURE,
    TEXT,
    VIDEO,
    flux,
    hunyuan,
    ltx,
    ltx2,
    noise,
    qwen,
    results,
    wan,
    without_attention,
)

from halotile import PlanError, RemoteRankError, TiledDenoiser, UnsupportedError
from halotile.comm import Ranks
from halotile.denoise import plan_tokens
from halotile.denoise.coords import find_grid
from halotile.denoise.grids import cells_to_tokens, tokens_to_cells
from halotile.denoise.ids import grid_of_ids
from halotile.denoise.models import call_for
from halotile.families.transformers import TRANSFORMERS, transformer_of

SIX = ("ltx2", "ltx", "wan", "flux", "qwen", "hunyuan")


def tiles_for(name, *, overlap=1):
    """2 x 2 tiles, and 2 along frames where the case can: 4 or 8."""
    return tiling((2, overlap) if name in VIDEO else (1, 0), (2, overlap), (2, 2 * overlap))


def alone(model, tiles, **options):
    return TiledDenoiser(model, tiles, Ranks.alone(), **options)


@functools.cache
def case(name):
    make, inputs = CASES[name]
    model = make()
    return model, inputs(model)


def tiled(name, tiles, **options):
    model, given = case(name)
    denoiser = alone(model, tiles, **options)
    with torch.no_grad(), quiet(name):
        return denoiser, results(denoiser(**given))


def quiet(name):
    """The warning about averaged audio is tested elsewhere."""
    return pytest.warns(UserWarning, match="audio") if name.startswith("ltx2") else torch.no_grad()


@torch.no_grad()
def plain(name):
    model, given = case(name)
    return results(model(**given))


@pytest.mark.parametrize("name", CASES)
def test_one_tile_is_the_model_itself(name):
    model, given = case(name)
    denoiser = alone(model, tiling((1, 0), (1, 0), (1, 0)))
    for return_dict in (True, False):
        with torch.no_grad():
            got, expected = denoiser(**given, return_dict=return_dict), model(**given, return_dict=return_dict)
        assert type(got) is type(expected)
        assert all(map(torch.equal, results(got), results(expected)))


@pytest.mark.parametrize("name", CASES)
def test_tiles_have_the_form_of_the_models_own_result(name):
    model, given = case(name)
    denoiser = alone(model, tiles_for(name))
    expected = plain(name)
    for return_dict in (True, False):
        with torch.no_grad():
            own = model(**given, return_dict=return_dict)
            with quiet(name) if return_dict else torch.no_grad():
                got = denoiser(**given, return_dict=return_dict)
        assert type(got) is type(own)
        for ours, theirs in zip(results(got), expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert denoiser.report.tiles == (8 if name in VIDEO else 4)
    # attention between tiles is missing, so that nothing would be tiled here if it were equal
    assert not torch.allclose(results(got)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_model_without_attention_between_tokens_is_not_changed_by_tiles(name, normalize):
    make, inputs = CASES[name]
    model = without_attention(make())
    given = inputs(model)
    denoiser = alone(model, tiles_for(name), normalize_positions=normalize)
    with torch.no_grad(), quiet(name):
        got, expected = results(denoiser(**given)), results(model(**given))
    kept = torch.ones(expected[0].shape[1], dtype=torch.bool)
    if name == "ltx2 reference":
        # 48 tokens lie 1000 seconds away from every tile, and are left with no velocity
        assert denoiser.report.unkept == 48
        kept[-48:] = False
        assert not results(denoiser(**given))[0][:, -48:].any()
    # a few roundings; audio and video of LTX-2 still attend to each other, and there equal shifts of float32 seconds
    # turn the fastest of its rotations (10000 pi / 2 a base length) by as much as the last digit of a second
    atol = 1e-3 if name.startswith("ltx2") and normalize else 1e-5
    torch.testing.assert_close(got[0][:, kept], expected[0][:, kept], rtol=0, atol=atol)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def in_bfloat16(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_bfloat16, value))
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("ltx2")])
def test_tiles_add_no_error_to_that_of_bfloat16(name):
    make, inputs = CASES[name]
    model = without_attention(make())
    given = inputs(model)
    float32 = ("video_coords", "timestep", "img_ids", "txt_ids")
    given = {each: value if each in float32 else in_bfloat16(value) for each, value in given.items()}
    model.to(torch.bfloat16)
    with torch.no_grad():
        (got,), (expected,) = results(alone(model, tiles_for(name))(**given)), results(model(**given))
    assert got.dtype == torch.bfloat16
    # float32 windows and sums of equal bfloat16 numbers
    assert torch.equal(got, expected)


def cut(name, given, region):
    """The arguments of a picture or clip that is `region` of the whole alone."""
    part = dict(given)
    slices = tuple(slice(side.start, side.stop) for side in region)
    shape = tuple(map(len, region))
    states = given["hidden_states"]
    if states.dim() == 5:
        cells = tuple(slice(side.start * by, side.stop * by) for side, by in zip(region, (1, 2, 2), strict=True))
        for each in ("hidden_states", "control_hidden_states"):
            if each in given:
                part[each] = given[each][(slice(None), slice(None), *cells)]
    else:
        part["hidden_states"] = tokens_in(states, name, slices)
    for each in ("timestep", "controlnet_block_samples", "controlnet_single_block_samples"):
        if isinstance(given.get(each), (list, tuple)):
            part[each] = [tokens_in(one, name, slices) for one in given[each]]
        elif each in given and given[each].dim() == 2:
            part[each] = tokens_in(given[each], name, slices)
    if name == "ltx":
        part |= dict(zip(("num_frames", "height", "width"), shape, strict=True))
    if "img_ids" in given:
        part["img_ids"] = tokens_in(given["img_ids"][None], name, tuple(slice(0, side) for side in shape))[0]
    if "img_shapes" in given:
        part["img_shapes"] = [[shape]] * 2
    return part


def tokens_in(tokens, name, slices):
    grid = GRID if name in VIDEO else PICTURE
    return tokens.unflatten(1, grid)[(slice(None), *slices)].flatten(1, 3)


OF_ITS_OWN = tuple(name for name in CASES if name.split()[0] != "ltx2" and "edit" not in name)
OF_ITS_OWN = tuple(name for name in OF_ITS_OWN if name not in ("ltx condition", "flux kontext", "hunyuan replace"))


@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_a_tile_with_normalised_positions_is_to_the_model_an_input_of_its_own(name):
    model, given = case(name)
    tiles = tiles_for(name, overlap=0)
    denoiser, (got, *_) = tiled(name, tiles)
    call = denoiser.call_of((), given)
    if got.dim() == 5:
        got = cells_to_tokens(got, (1, 2, 2))
    for tile in plan_tokens(call.grid, tiles, call.positions, call.total).tiles:
        with torch.no_grad():
            expected = results(model(**cut(name, given, tile.region)))[0]
        if expected.dim() == 5:
            expected = cells_to_tokens(expected, (1, 2, 2))
        torch.testing.assert_close(got[:, tile.generated], expected, rtol=0, atol=0 if "ltx" not in name else 1e-5)


def ropes(model, run, texts=None):
    """Rotary numbers of picture tokens as the first block gets them, one row a token, for each forward of `run()`.

    `texts`, if given, gets those of the text beside them.
    """
    seen = []

    def keep(block, args, kwargs):
        kind = type(model).__name__
        if kind.startswith("LTX2"):
            seen.append(torch.cat([*kwargs["video_rotary_emb"], *kwargs["ca_video_rotary_emb"]], -1)[0])
        elif kind.startswith("LTX"):
            seen.append(torch.cat(kwargs["image_rotary_emb"], -1)[0])
        elif kind.startswith("Wan"):
            seen.append(torch.cat(args[3], -1)[0, :, 0])
        elif kind.startswith("Flux"):
            seen.append(torch.cat(kwargs["image_rotary_emb"], -1)[TEXT:])
        elif kind.startswith("Qwen"):
            seen.append(torch.view_as_real(kwargs["image_rotary_emb"][0]).flatten(1))
            if texts is not None:
                texts.append(kwargs["image_rotary_emb"][1])
        else:
            seen.append(torch.cat(args[4], -1))

    block = (getattr(model, "transformer_blocks", None) or model.blocks)[0]
    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", [name for name in CASES if name != "ltx2 split"])
def test_without_normalisation_each_tile_has_its_rows_of_the_wholes_positions(name):
    model, given = case(name)
    texts = []
    (whole,) = ropes(model, lambda: plain(name), texts)
    tiles = tiles_for(name)
    denoiser = alone(model, tiles, normalize_positions=False)
    call = denoiser.call_of((), given)
    plan = plan_tokens(call.grid, tiles, call.positions, call.total)
    parts = ropes(model, lambda: tiled(name, tiles, normalize_positions=False), texts)
    assert all(torch.equal(text, texts[0]) for text in texts[1:])
    places = getattr(call, "places_of", lambda tile: tile.kept)
    assert len(parts) == len(plan.tiles)
    for part, tile in zip(parts, plan.tiles, strict=True):
        assert torch.equal(part, whole[places(tile)])


@pytest.mark.parametrize("scale", [None, (8 / 25, 32, 32), (8 / 3, 31.7, 30.1), (torch.tensor(8 / 24), 32.0, 32.0)])
def test_positions_of_ltx_are_the_bits_of_its_own_rope(scale):
    model, given = case("ltx")
    grid = (30, 7, 5)
    given = given | dict(zip(("num_frames", "height", "width"), grid, strict=True))
    given |= {"rope_interpolation_scale": scale, "hidden_states": noise(2, prod(grid), 4)}
    call = call_for(model, (), given, True, "shift")
    own = model.rope(given["hidden_states"], *grid, scale)
    assert all(map(torch.equal, model.rope(given["hidden_states"], video_coords=call.positions[..., 0]), own))
    starts, stops = call.positions.unbind(-1)
    assert (stops > starts).all()


def relative(rope, reference, own):
    """Rotations between tokens of a reference and those of the picture: what attention sees of positions."""
    rope = torch.view_as_complex(rope.reshape(len(rope), -1, 2))
    return rope[reference][:, None] * rope[own].conj()


@pytest.mark.parametrize("references", ["shift", "keep"])
@pytest.mark.parametrize("name", ["qwen edit", "qwen edit zero"])
def test_reference_pictures_of_qwen_move_along_or_stay(name, references):
    model, given = case(name)
    tiles, count = tiles_for(name), prod(PICTURE)
    (whole,) = ropes(model, lambda: plain(name))
    parts = ropes(model, lambda: tiled(name, tiles, reference_positions=references))
    call = alone(model, tiles).call_of((), given)
    moved = 0
    for part, tile in zip(parts, plan_tokens(call.grid, tiles, call.positions, call.total).tiles, strict=True):
        own = len(tile.generated)
        assert torch.equal(tile.kept[own:], torch.arange(count, call.total))
        stays = torch.equal(part[own:], whole[count:])
        moved += not stays
        if references == "keep":
            assert stays
        else:
            now = relative(part, slice(own, None), slice(own))
            before = relative(whole, slice(count, None), tile.generated)
            # cosines and sines of float32 angles
            torch.testing.assert_close(now, before, rtol=0, atol=1e-5)
    assert moved == (4 if references == "shift" else 0)


@pytest.mark.parametrize("references", ["shift", "keep"])
def test_the_reference_picture_of_kontext_moves_along_or_stays(references):
    model, given = case("flux kontext")
    tiles, count, seen = tiles_for("flux kontext"), prod(PICTURE), []
    handle = model.pos_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0][TEXT:]))
    try:
        denoiser, _ = tiled("flux kontext", tiles, reference_positions=references)
    finally:
        handle.remove()
    ids = given["img_ids"]
    call = denoiser.call_of((), given)
    for part, tile in zip(seen, plan_tokens(call.grid, tiles, call.positions, call.total).tiles, strict=True):
        start = torch.tensor([0.0, tile.region[1].start, tile.region[2].start])
        own = len(tile.generated)
        assert torch.equal(part[:own], ids[tile.generated] - start)
        assert torch.equal(part[own:], ids[count:] - (start if references == "shift" else 0))


def test_square_masks_are_cut_both_ways():
    make, inputs = CASES["ltx2 reference"]
    model = make()
    for name, module in model.named_modules():
        if name.endswith("video_to_audio_attn"):
            module.to_out[0].weight.zero_()
            module.to_out[0].bias.zero_()
    given = inputs(model)
    count = given["hidden_states"].shape[1]
    # each token attends to itself alone, by attention that is there
    given["video_self_attention_mask"] = torch.eye(count)[None].repeat(2, 1, 1)
    denoiser = alone(model, tiles_for("ltx2 reference"), normalize_positions=False)
    with torch.no_grad(), quiet("ltx2"):
        got, expected = denoiser(**given), model(**given)
    torch.testing.assert_close(got.sample[:, :-48], expected.sample[:, :-48], rtol=0, atol=1e-5)


def test_audio_is_frozen_by_a_velocity_of_zero():
    model, given = case("ltx2")
    denoiser = alone(model, tiles_for("ltx2"), audio="frozen")
    with torch.no_grad():
        got = denoiser(**given)
    assert got.audio_sample.shape == given["audio_hidden_states"].shape
    assert not got.audio_sample.any()
    assert denoiser.report.all_reduces == 1
    one = alone(model, tiling((1, 0), (1, 0), (1, 0)), audio="frozen")
    for return_dict in (True, False):
        with torch.no_grad():
            got, own = one(**given, return_dict=return_dict), model(**given, return_dict=return_dict)
        assert type(got) is type(own)
        assert torch.equal(got[0], own[0])
        assert not got[1].any()


@pytest.mark.parametrize("name", CASES)
def test_sigma_is_the_greatest_share_of_noise(name):
    model, given = case(name)
    most = float(given["timestep"].max())
    expected = most if most <= 1 else most / 1000
    assert call_for(model, (), given, True, "shift").sigma == pytest.approx(expected)


@pytest.mark.parametrize("name", [*SIX, "wan vace", "qwen edit"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_model_is_left_as_it_was_by_failures_too(name, normalize):
    model, given = case(name)
    modules, names = list(model.modules()), list(model.state_dict())
    before = [(set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
    tiled(name, tiles_for(name), normalize_positions=normalize)
    handle = model.proj_out.register_forward_hook(_fail)
    with pytest.raises(RemoteRankError, match="a failing layer"), torch.no_grad():
        alone(model, tiles_for(name), normalize_positions=normalize, audio="frozen")(**given)
    handle.remove()
    assert [
        (set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules
    ] == before
    assert list(model.state_dict()) == names
    assert all(map(torch.equal, results(model(**given)), plain(name)))


def _fail(*_):
    raise ZeroDivisionError("a failing layer")


def test_a_cache_keeps_tiles_apart():
    from diffusers import FirstBlockCacheConfig

    model, given = CASES["flux"][0](), case("flux")[1]
    tiles = tiles_for("flux", overlap=0)
    second = given | {"hidden_states": given["hidden_states"] + 1e-3}
    # a threshold so high that the second step takes what the first has left
    model.enable_cache(FirstBlockCacheConfig(threshold=100.0))
    with torch.no_grad():
        denoiser = alone(model, tiles)
        with denoiser.cache_context("cond"):
            denoiser(**given)
            got = denoiser(**second).sample
        model.disable_cache()
        call = denoiser.call_of((), given)
        for tile in plan_tokens(call.grid, tiles, call.positions, call.total).tiles:
            model.enable_cache(FirstBlockCacheConfig(threshold=100.0))
            with model.cache_context("cond"):
                model(**cut("flux", given, tile.region))
                expected = model(**cut("flux", second, tile.region)).sample
            model.disable_cache()
            assert torch.equal(got[:, tile.generated], expected)


def test_a_cache_with_one_memory_is_refused():
    from diffusers import PyramidAttentionBroadcastConfig

    model, given = CASES["wan"][0](), case("wan")[1]
    model.enable_cache(
        PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
    )
    with pytest.raises(UnsupportedError, match="PyramidAttentionBroadcastHook keeps one memory"), torch.no_grad():
        alone(model, tiles_for("wan"))(**given)


def test_options_are_handed_on_and_left_as_they_are():
    model, given = case("flux")
    options = {"scale": 0.5}
    with torch.no_grad():
        alone(model, tiles_for("flux"))(**given, joint_attention_kwargs=options)
    assert options == {"scale": 0.5}
    with pytest.raises(UnsupportedError, match=r"joint_attention_kwargs\['attention_mask'\] .* has a tensor"):
        alone(model, tiles_for("flux"))(**given, joint_attention_kwargs={"attention_mask": [torch.ones(1)]})


@pytest.mark.parametrize(
    ("name", "changed", "error", "message"),
    [
        ("wan", {"hidden_states": noise(2, 4, 3, 13, 16)}, PlanError, r"patches of \(1, 2, 2\), got \(2, 4, 3, 13, 16"),
        ("wan", {"hidden_states": noise(2, 3, 3, 12, 16)}, UnsupportedError, "predicts 4 channels"),
        ("wan", {"timestep": noise(2, 7)}, PlanError, "timestep of shape .* has 7 rows .* 144 tokens"),
        ("wan vace", {"control_hidden_states": noise(2, 6, 3, 6, 8)}, PlanError, "control_hidden_states of shape"),
        ("wan", {"hidden_states": None}, PlanError, "hidden_states of WanTransformer3DModel must be a tensor"),
        ("ltx2", {"audio_hidden_states": None}, PlanError, "audio_hidden_states of .* must be a tensor, got NoneType"),
        ("ltx2", {"video_coords": [1]}, PlanError, "video_coords must be a tensor, got list"),
        ("wan", {"unheard_of": 1}, PlanError, "cannot be called like this: .*unheard_of"),
        ("flux controlnet", {"controlnet_block_samples": [noise(2, 9, 24)]}, PlanError, "controlnet_block_samples"),
        ("flux", {"img_ids": torch.zeros(48, 3)}, PlanError, "not the rows and columns of one picture"),
        ("flux", {"img_ids": torch.zeros(9, 3)}, PlanError, "must be 48 3, got"),
        ("flux", {"img_ids": None}, PlanError, "must be 48 3, got None"),
        ("qwen", {"img_shapes": [[(1, 6, 7)]] * 2}, PlanError, "make 42 tokens, not 48"),
        ("qwen", {"img_shapes": None}, PlanError, "img_shapes must be there"),
        ("qwen", {"img_shapes": [[(1, 6, 8)], [(1, 8, 6)]]}, PlanError, "alike for all samples"),
        ("ltx", {"height": None}, PlanError, "needs video_coords"),
        ("ltx", {"height": 7}, PlanError, "fewer than the 168"),
        (
            "ltx condition",
            {"video_coords": torch.ones(2, 3, 192)},
            PlanError,
            "no token of video_coords starts at zero",
        ),
        ("ltx condition", {"video_coords": torch.ones(2, 3, 190)}, PlanError, "video_coords of 192 tokens must be"),
        ("ltx2 reference", {"video_self_attention_mask": noise(2, 3, 3)}, PlanError, "video_self_attention_mask"),
        ("hunyuan", {"hidden_states": noise(2, 4, 3, 12, 15)}, PlanError, "takes latents"),
    ],
)
def test_what_does_not_fit_is_refused(name, changed, error, message):
    model, given = case(name)
    with pytest.raises(error, match=message), torch.no_grad():
        alone(model, tiles_for(name), audio="frozen")(**{**given, **changed})


def test_what_the_model_cannot_do_in_tiles_is_refused():
    _, given = case("qwen")
    with pytest.raises(UnsupportedError, match="several pictures to make"):
        alone(qwen(use_layer3d_rope=True), tiles_for("qwen"))(**given)
    model, given = case("hunyuan replace")
    with pytest.raises(UnsupportedError, match="cannot be run on 2 of 3 frames"), torch.no_grad():
        alone(model, tiling((2, 1), (1, 0), (1, 0)))(**given)
    compiled = torch.compile(wan(), backend="eager")
    with pytest.raises(UnsupportedError, match="is compiled"), torch.no_grad():
        alone(compiled, tiles_for("wan"), normalize_positions=False)(**case("wan")[1])


def test_rows_are_of_diffusers_classes():
    assert set(TRANSFORMERS) == {type(case(name)[0]).__name__ for name in CASES}
    for make in (ltx, ltx2, wan, flux, qwen, hunyuan):
        model = make()
        assert transformer_of(model)[0].name == type(model).__name__
        assert transformer_of(torch.compile(model, backend="eager"))[0].name == type(model).__name__

    class WanTransformer3DModel(torch.nn.Module):
        pass

    assert transformer_of(WanTransformer3DModel()) is None
    assert call_for(WanTransformer3DModel(), (), {}, True, "shift") is None


def test_cells_and_tokens_are_each_others_inverse():
    cells = noise(2, 3, 4, 6, 10)
    tokens = cells_to_tokens(cells, (2, 3, 5))
    assert tokens.shape == (2, 2 * 2 * 2, 3 * 2 * 3 * 5)
    assert torch.equal(tokens[0, 0], cells[0, :, :2, :3, :5].flatten())
    assert torch.equal(tokens[1, -1], cells[1, :, 2:, 3:, 5:].flatten())
    assert torch.equal(tokens_to_cells(tokens, (2, 2, 2), (2, 3, 5)), cells)


def test_ids_of_a_large_picture_in_bfloat16_are_still_its_grid():
    height, width = 300, 3
    rows = torch.arange(height).repeat_interleave(width)
    ids = torch.stack([torch.zeros(height * width), rows, torch.arange(width).repeat(height)], 1).bfloat16()
    # bfloat16 counts to 256
    assert len(ids[:, 1].unique()) < height
    assert grid_of_ids(ids) == (1, height, width)
    model, given = case("flux")
    call = call_for(model, (), given | {"img_ids": ids, "hidden_states": noise(1, 900, 16)}, True, "shift")
    assert torch.equal(call.positions[0, 1, :, 0], rows.float())


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 4), (1, 4, 1), (3, 1, 1), (3, 2, 4)])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_the_generated_tokens_are_found_in_coordinates(grid, before, behind):
    axes = [torch.tensor([0.0, 1, 9, 17])[: grid[0]], 32.0 * torch.arange(grid[1]), 32.0 * torch.arange(grid[2])]
    own = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    other = torch.tensor([[8.0], [0.0], [32.0 * 64]])
    starts = torch.cat([other.repeat(1, before), own, other.repeat(1, behind)], 1)
    assert find_grid(starts) == (before, grid)


def test_generated_tokens_are_told_from_keyframes_and_references_behind_them():
    """As the pipelines of LTX-2 for dynamic frame rates call it, which give coordinates alone."""
    model, given = case("ltx2")
    size, fps = {"batch_size": 2, "device": torch.device("cpu")}, 25.0
    own = model.rope.prepare_video_coords(num_frames=3, height=6, width=8, fps=fps, **size)
    keyframe = model.rope.prepare_video_coords(num_frames=1, height=6, width=8, fps=fps, **size)
    # the last of 17 frames
    keyframe[:, 0] += 16 / fps
    reference = model.rope.prepare_video_coords(num_frames=3, height=3, width=4, fps=fps, **size)
    reference[:, 1:] *= 2
    coords = torch.cat([own, keyframe, reference], 2)
    given = {name: value for name, value in given.items() if name not in ("num_frames", "height", "width")}
    given |= {"hidden_states": noise(2, coords.shape[2], 4), "video_coords": coords}
    call = call_for(model, (), given, True, "shift")
    assert (call.grid, call.total, call.order) == (GRID, coords.shape[2], None)
    assert torch.equal(call.positions, coords)
    tiles = tiling((2, 0), (2, 0), (2, 0))
    early, late = (plan_tokens(call.grid, tiles, coords, call.total).tiles[number] for number in (0, -1))
    # of the tile at the first frames and rows, and the one at the last
    assert [int(((tile.kept >= 144) & (tile.kept < 192)).sum()) for tile in (early, late)] == [0, 12]
    assert (early.kept >= 192).any()
    assert (late.kept >= 192).any()


def test_sizes_beside_coordinates_agree_with_them_or_are_refused():
    model, given = case("ltx condition")
    sizes = dict(zip(("num_frames", "height", "width"), GRID, strict=True))
    expected = call_for(model, (), given, True, "shift")
    assert (expected.grid, int(expected.order[0])) == (GRID, 48)
    # as the pipeline of long clips gives them, and as they are, with conditioning before the generated tokens
    for told in ({"num_frames": 1, "height": 1, "width": 1}, sizes):
        call = call_for(model, (), given | told, True, "shift")
        assert call.grid == GRID
        assert torch.equal(call.order, expected.order)
        assert torch.equal(call.positions, expected.positions)
    for wrong, message in (
        ({"height": 8, "width": 6}, r"do not agree with .* \(3, 8, 6\) in tokens: .*along height, tokens at 1 begin"),
        ({"num_frames": 1, "height": 5}, "they go on with another row"),
        ({"num_frames": 4}, "the first at zero is the one at 48"),
    ):
        with pytest.raises(PlanError, match=message):
            call_for(model, (), given | sizes | wrong, True, "shift")


def test_a_keyframe_that_begins_where_the_clip_ends_is_told_from_it_by_the_sizes():
    model, given = case("ltx2")
    size = {"batch_size": 2, "device": torch.device("cpu"), "fps": 25.0}
    own = model.rope.prepare_video_coords(num_frames=3, height=6, width=8, **size)
    after = model.rope.prepare_video_coords(num_frames=1, height=6, width=8, **size)
    after[:, 0] += own[0, 0, -1, 1]
    coords = torch.cat([own, after], 2)
    given = given | {"hidden_states": noise(2, coords.shape[2], 4), "video_coords": coords}
    assert call_for(model, (), given, True, "shift").grid == GRID


def test_samples_whose_tokens_are_in_another_order_are_refused():
    model, given = case("ltx condition")
    other = given["video_coords"].clone()
    other[1] = other[1].roll(-48, 1)
    with pytest.raises(PlanError, match=r"begin at zero at different tokens, \[48, 0\]"), torch.no_grad():
        alone(model, tiles_for("ltx condition"))(**given | {"video_coords": other})


def test_a_subclass_that_hands_on_what_it_is_given():
    model, given = CASES["wan"][0](), case("wan")[1]

    class HandsOn(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = HandsOn
    _, expected = tiled("wan", tiles_for("wan"), deterministic=True)
    with torch.no_grad():
        got = alone(model, tiles_for("wan"), deterministic=True)(**given)
    assert torch.equal(got.sample, expected[0])


def test_a_subclass_with_an_argument_of_its_own_that_has_an_entry_a_token():
    model, given = CASES["flux"][0](), case("flux")[1]

    class Brighter(type(model)):
        def forward(self, hidden_states, encoder_hidden_states=None, pooled_projections=None, timestep=None,
                    img_ids=None, txt_ids=None, guidance=None, return_dict=True, extra=None):  # fmt: skip
            return super().forward(
                hidden_states + extra, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance,
                return_dict=return_dict,
            )  # fmt: skip

    model.__class__ = Brighter
    tiles, extra = tiles_for("flux"), noise(2, 48, 16, seed=11)
    whole = given | {"hidden_states": given["hidden_states"] + extra}
    with torch.no_grad():
        got = alone(model, tiles, per_token=("extra",))(**given, extra=extra).sample
        assert torch.equal(got, alone(case("flux")[0], tiles)(**whole).sample)
    with pytest.raises(UnsupportedError, match="does not know the argument extra"):
        alone(model, tiles)(**given, extra=extra)


def test_coordinates_in_another_order_are_refused():
    own = torch.stack(torch.meshgrid(torch.arange(2.0), torch.arange(3.0), torch.arange(4.0), indexing="ij")).flatten(1)
    with pytest.raises(PlanError, match="not of rows of"):
        find_grid(torch.cat([own[:, :5], own[:, 6:]], 1))
    with pytest.raises(PlanError, match="no grid in row-major order"):
        find_grid(own[:, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, *range(12, 24)]])


TILINGS = (
    ((1, 0), (1, 0), (1, 0)),
    ((1, 0), (1, 0), (2, 1)),
    ((1, 0), (3, 1), (1, 0)),
    ((1, 0), (2, 1), (2, 0)),
    ((1, 0), (4, 1), (4, 1)),
)
"""1, 2, 3, 4 and 16 tiles: more than ranks, and fewer."""


CONDITIONED = ("ltx2 reference", "ltx condition", "wan image", "wan vace", "flux kontext", "qwen edit")


def _of_tilings(group, name, number, deterministic):
    model, given = case(name)
    denoiser = TiledDenoiser(model, tiling(*TILINGS[number]), group, audio="frozen", deterministic=deterministic)
    with torch.no_grad():
        result = results(denoiser(**given))[0]
    assert denoiser.report.all_reduces == (1 if denoiser.report.tiles > 1 else 0)
    return result


def _on_ranks(group, tasks):
    return {task: _of_tilings(group, *task) for task in tasks}


@functools.cache
def _serial(name, number):
    return _of_tilings(Ranks.alone(), name, number, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_hold_the_same_result(ranks):
    # over the numbers of ranks each case meets each tiling, but not each number of ranks with each tiling
    tasks = [
        (name, (place + ranks + 2 * later) % len(TILINGS), not later)
        for place, name in enumerate((*SIX, *CONDITIONED))
        for later in (False, True)
    ]
    for output in run_ranks(_on_ranks, ranks, tasks):
        for (name, number, deterministic), got in output.items():
            if deterministic:
                assert torch.equal(got, _serial(name, number)), (name, number)
            else:
                # sums of float32 in another order
                torch.testing.assert_close(got, _serial(name, number), rtol=0, atol=1e-5)
            if number == 0:
                assert torch.equal(got, plain(name)[0])


def _with_audio(group):
    model, given = case("ltx2")
    denoiser = TiledDenoiser(model, tiling((2, 1), (2, 1), (1, 0)), group, deterministic=True, first_sigma_limit=0.5)
    if denoiser.ranks.rank == 0:
        sigma, sound = pytest.warns(match="the first sigma"), pytest.warns(match="audio goes through")
        with sound, sigma, torch.no_grad():
            video, audio = denoiser(**given, return_dict=False)
    else:
        with torch.no_grad():
            video, audio = denoiser(**given, return_dict=False)
    assert denoiser.report.all_reduces == 2
    return video, audio


def test_audio_is_the_average_over_tiles_on_all_ranks():
    model, _ = case("ltx2")
    video, audio = _with_audio(Ranks.alone())
    for output in run_ranks(_with_audio, 3):
        assert torch.equal(output[0], video)
        assert torch.equal(output[1], audio)
    seen = []
    handle = model.register_forward_hook(lambda module, args, result: seen.append(result[1]))
    try:
        _with_audio(Ranks.alone())
    finally:
        handle.remove()
    assert len(seen) == 4
    torch.testing.assert_close(audio, sum(seen) / 4, rtol=0, atol=1e-6)


def _refused_on_one(group):
    model, given = case("hunyuan replace")
    denoiser = TiledDenoiser(model, tiling((2, 1), (1, 0), (1, 0)), group)
    with pytest.raises((UnsupportedError, RemoteRankError)) as error, torch.no_grad():
        denoiser(**given)
    return type(error.value).__name__


def test_ranks_without_a_tile_hear_of_a_refusal():
    assert run_ranks(_refused_on_one, 3)[2] == "RemoteRankError"

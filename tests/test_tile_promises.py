"""The promises of DESIGN.md, section 6, for dealt tile loops, each on real ranks."""

from __future__ import annotations

import gc
import time

import pytest
import tiled
import torch
from ranks import run_ranks, run_world

import halotile
from halotile.errors import (
    GradientError,
    MembershipError,
    MismatchError,
    MissingRankError,
    PlanError,
    RemoteRankError,
    UnsupportedError,
)

KL = "AutoencoderKL"


def _decode(group, name=KL, x=None, vae=None, **options):
    vae = vae or tiled.build_tiled(name)
    with torch.no_grad():
        return halotile.decode(vae, tiled.tiled_input(name, "decode") if x is None else x, group, "tile", **options)


def _expected(name=KL, half="decode", **size):
    with torch.no_grad():
        return tiled.call(tiled.build_tiled(name), name, half, tiled.tiled_input(name, half, **size))


# --- validate before you communicate


def _refused_everywhere(group):
    vae = tiled.build_tiled("AutoencoderKLWan_2.1")
    vae.tile_sample_stride_height = 100
    x = tiled.tiled_input("AutoencoderKLWan_2.1", "decode")
    handle = halotile.parallelize(vae, group, strategy="tile")
    before = handle.ranks.counters.snapshot()
    with pytest.raises(PlanError, match=r"stride 100 px"):
        vae.decode(x)
    assert handle.ranks.counters.since(before).collectives == 0
    vae.tile_sample_stride_height = 32
    return vae.decode(x).sample


def test_an_impossible_request_is_refused_on_every_rank_without_traffic_and_the_next_call_works() -> None:
    expected = _expected("AutoencoderKLWan_2.1")
    assert all(torch.equal(out, expected) for out in run_ranks(_refused_everywhere, 3))


# --- handshake


def _mismatch(group, what):
    rank = torch.distributed.get_rank(group)
    vae = tiled.build_tiled(KL)
    x = tiled.tiled_input(KL, "decode", height=10 + 4 * (rank if what == "heights" else 0))
    if what == "dtypes" and rank == 1:
        x = x.double()
    if what == "plans" and rank == 1:
        halotile.families.set_window(vae, 64, 48)
    if what == "halves" and rank == 1:
        with pytest.raises(MismatchError) as caught:
            halotile.encode(vae, tiled.tiled_input(KL, "encode"), group, "tile")
    else:
        with pytest.raises(MismatchError) as caught:
            _decode(group, x=x, vae=vae, timeout_s=30)
    return str(caught.value), _decode(group)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("heights", ["(1, 4, 10, 7)", "(1, 4, 14, 7)", "rank 0", "rank 1"]),
        ("dtypes", ["torch.float32", "torch.float64"]),
        ("plans", ["plan: rank 0 has", "chains"]),
        ("halves", ["half: rank 0 has decode, rank 1 has encode"]),
    ],
)
def test_ranks_that_disagree_all_raise_before_any_work_and_can_go_on(what: str, said: list[str]) -> None:
    expected = _expected()
    for message, out in run_ranks(_mismatch, 2, what):
        assert all(part in message for part in said), message
        assert torch.equal(out, expected)


def _refused_on_one(group):
    rank = torch.distributed.get_rank(group)
    vae = tiled.build_tiled(KL)
    if rank == 1:
        vae.tile_overlap_factor = 0.3
    started = time.monotonic()
    with pytest.raises(PlanError if rank == 1 else RemoteRankError, match="stride and crop disagree"):
        _decode(group, vae=vae)
    return time.monotonic() - started, _decode(group)


def test_a_refusal_on_one_rank_does_not_leave_the_others_waiting() -> None:
    expected = _expected()
    for seconds, out in run_ranks(_refused_on_one, 3):
        assert seconds < 30
        assert torch.equal(out, expected)


def _one_rank_only(group, given_up):
    if torch.distributed.get_rank(group) == 0:
        with pytest.raises(MissingRankError, match=r"ranks 1 \(global rank 2\), 2 \(global rank 3\)"):
            _decode(group, timeout_s=1)
        given_up.touch()
    else:
        # comes late, to a call that was given up
        while not given_up.exists():
            time.sleep(0.05)
        with pytest.raises(MissingRankError, match="waited 1 s"):
            _decode(group)
    return _decode(group)


def test_who_does_not_come_is_named_and_the_group_recovers(tmp_path) -> None:
    expected = _expected()
    results = run_ranks(_one_rank_only, 3, tmp_path / "given up", members=(1, 2, 3))
    assert all(torch.equal(out, expected) for out in results)


# --- fail together


class _BrokenTileError(Exception):
    pass


def _tile_raises(group, name, half, where):
    rank = torch.distributed.get_rank(group)
    vae, x = tiled.built_small(name), tiled.small_input(name, half)
    network = vae.decoder if half == "decode" else vae.encoder

    def broken(module, args, output):
        # a stand-in that is only recorded has no values to check
        if rank == where and (output[0] if isinstance(output, tuple) else output).device.type != "meta":
            raise _BrokenTileError("the tile is broken")

    outcomes = []
    with torch.no_grad(), halotile.parallelize(vae, group, strategy="tile"):
        for broken_now in (True, False, True, False):
            hook = network.register_forward_hook(broken) if broken_now else None
            started = time.monotonic()
            try:
                outcomes.append(tiled.call(vae, name, half, x + (0 if broken_now else 1)))
            except RemoteRankError as error:
                assert time.monotonic() - started < 60
                outcomes.append((error.rank, error.kind, error.remote_message, str(error)))
            if hook is not None:
                hook.remove()
    return outcomes


@pytest.mark.parametrize("name", [KL, "AutoencoderKLWan_2.1", "AutoencoderKLMagvit", "AutoencoderKLCogVideoX"])
def test_a_rank_that_raises_makes_all_raise_and_nothing_of_it_enters_the_next_call(name: str) -> None:
    with torch.no_grad():
        expected = tiled.call(tiled.built_small(name), name, "decode", tiled.small_input(name, "decode") + 1)
    for outcomes in run_ranks(_tile_raises, 3, name, "decode", 1):
        for failed in (outcomes[0], outcomes[2]):
            assert failed[:3] == (1, "_BrokenTileError", "the tile is broken")
            assert "rank 1" in failed[3]
        assert torch.equal(outcomes[1], expected)
        assert torch.equal(outcomes[3], expected)


def _another_shape_than_planned(group):
    """What goes wrong between work and delivery on one rank must not leave messages for the next call."""
    rank = torch.distributed.get_rank(group)
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    _decode(group, vae=vae, x=x)  # the shapes are foreseen before the hook lies about them
    hook = vae.decoder.register_forward_hook(
        lambda module, args, out: out[..., 1:] if rank == 0 and out.device.type != "meta" else None
    )
    with pytest.raises(RemoteRankError, match=r"rank 0 failed with RuntimeError: piece \d: planned"):
        _decode(group, vae=vae, x=x)
    hook.remove()
    return _decode(group, vae=vae, x=x + 1)


def test_a_result_of_another_shape_than_planned_fails_everywhere_and_leaves_nothing_behind() -> None:
    with torch.no_grad():
        expected = tiled.build_tiled(KL).decode(tiled.tiled_input(KL, "decode") + 1).sample
    assert all(torch.equal(out, expected) for out in run_ranks(_another_shape_than_planned, 3))


def _raises_at_once(group):
    """Rank 2 raises in its first tile; the others have tiles of half a second left, and should not do them all."""
    rank = torch.distributed.get_rank(group)
    vae = tiled.build_tiled(KL)
    halotile.families.set_window(vae, 16, 16)
    vae.decoder.register_forward_pre_hook(lambda module, args: time.sleep(0.05))

    def broken(module, args, output):
        if rank == 2 and output.device.type != "meta":
            raise _BrokenTileError

    vae.decoder.register_forward_hook(broken)
    started = time.monotonic()
    with pytest.raises(RemoteRankError, match="rank 2"):
        _decode(group, vae=vae, x=torch.zeros(1, 4, 32, 32))
    return time.monotonic() - started


def test_the_others_stop_at_their_next_tile() -> None:
    # 256 tiles: recording them takes 13 s of these sleeps, the rest of the work would take 4 s on each of three ranks
    assert max(run_ranks(_raises_at_once, 3)) < 16


def _refused_before_the_call(group, how):
    """A call that one rank cannot even begin is a call all the same: the ranks stay in step."""
    rank = torch.distributed.get_rank(group)
    vae, a = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    if how == "arguments":
        with halotile.parallelize(vae, group, strategy="tile"), pytest.raises(TypeError if rank else RemoteRankError):
            vae.decode(a, **({"nonsense": 1} if rank else {}))
    else:
        wrong = {"driver": {"driver": 2}, "scheduler": {"scheduler": "fast"}, "tiling": {"tiling": 3}}[how]
        error = {"driver": MembershipError, "scheduler": PlanError, "tiling": UnsupportedError}[how]
        with pytest.raises(error if rank else RemoteRankError):
            halotile.decode(vae, a, group, "tile", timeout_s=60, **(wrong if rank else {}))
    return _decode(group, x=a + 1), _decode(group, x=a)


@pytest.mark.parametrize("how", ["driver", "scheduler", "tiling", "arguments"])
def test_a_rank_that_cannot_begin_stays_in_step_with_the_others(how: str) -> None:
    with torch.no_grad():
        vae, a = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
        second, third = vae.decode(a + 1).sample, vae.decode(a).sample
    for results in run_ranks(_refused_before_the_call, 2, how):
        assert torch.equal(results[0], second)
        assert torch.equal(results[1], third)


def _dropout_on_one(group):
    name = "AutoencoderKLWan_2.1"
    vae = tiled.build_tiled(name)
    for part in vae.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    vae.train(torch.distributed.get_rank(group) == 1)
    started = time.monotonic()
    with pytest.raises(MismatchError, match="plan"):
        _decode(group, vae=vae, x=tiled.tiled_input(name, "decode"), timeout_s=20)
    return time.monotonic() - started


def test_noise_on_some_ranks_only_is_a_mismatch_and_not_a_hang() -> None:
    assert max(run_ranks(_dropout_on_one, 2)) < 60


# --- group-local ranks


def _subgroup(group, deliver, driver):
    return _decode(group, deliver=deliver, driver=driver)


@pytest.mark.parametrize("members", [(2, 3), (1, 3), (1, 2, 3)])
def test_subgroups_without_global_rank_0(members: tuple[int, ...]) -> None:
    expected = _expected()
    results = run_ranks(_subgroup, len(members), "all", 0, members=members)
    assert all(torch.equal(out, expected) for out in results)
    results = run_ranks(_subgroup, len(members), "driver", 1, members=members)
    assert [out is None for out in results] == [rank != 1 for rank in range(len(members))]
    assert torch.equal(results[1], expected)


def _others_do_nothing_or_are_turned_away(_):
    group = torch.distributed.new_group([1, 2])
    rank = torch.distributed.get_rank()
    if rank in (1, 2):
        return _decode(group)
    if rank == 3:
        with pytest.raises(MembershipError, match="not a member"):
            _decode(group)
        vae = tiled.build_tiled(KL)
        with pytest.raises(MembershipError, match="not a member"):
            halotile.enable_tiling(vae, process_group=group)
    return None


def test_outsiders_are_turned_away() -> None:
    expected = _expected()
    results = run_world(_others_do_nothing_or_are_turned_away)
    assert torch.equal(results[1], expected)
    assert torch.equal(results[2], expected)


def _world(_):
    return _decode(None)


def test_no_group_means_the_default_group() -> None:
    assert all(torch.equal(out, _expected()) for out in run_world(_world))


# --- delivery


def _delivered(group, half, deliver):
    vae = tiled.build_tiled(KL)
    fn = halotile.decode if half == "decode" else halotile.encode
    with halotile.parallelize(vae, group, strategy="tile", deliver=deliver, driver=2) as handle:
        whole = getattr(vae, half)(tiled.tiled_input(KL, half))
        as_tuple = getattr(vae, half)(tiled.tiled_input(KL, half), return_dict=False)
        report = handle.report
    out = fn(vae, tiled.tiled_input(KL, half), group, "tile", deliver=deliver, driver=2)
    fields = (getattr(whole, "sample", None), getattr(whole, "latent_dist", None))
    return out, [field is None for field in fields], as_tuple[0] is None, report


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_a_driver_alone_gets_the_result_and_the_others_receive_nothing(half: str) -> None:
    expected = _expected(half=half)
    results = run_ranks(_delivered, 3, half, "driver")
    for rank, (out, empty_fields, empty_tuple, report) in enumerate(results):
        assert (out is None) == (rank != 2)
        assert all(empty_fields) == empty_tuple == (rank != 2)
        assert report.messages == (1 if rank != 2 else 0)
    assert torch.equal(results[2][0], expected)


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_sharded_delivery_leaves_each_rank_its_rows(half: str) -> None:
    expected = _expected(half=half)
    results = run_ranks(_delivered, 3, half, "sharded")
    assert torch.equal(torch.cat([out for out, *_ in results], dim=-2), expected)
    for rank, (out, _, _, report) in enumerate(results):
        assert report.extents[rank] == out.shape[-2]


# --- fewer tiles than ranks


def _few(group, width):
    vae = tiled.build_tiled(KL)
    x = tiled.tiled_input(KL, "decode", height=4, width=width)
    with halotile.parallelize(vae, group, strategy="tile") as handle:
        return vae.decode(x).sample, handle.report.tiles


@pytest.mark.parametrize(("width", "tiles"), [(5, 1), (7, 2)])
def test_one_or_two_tiles_over_four_ranks(width: int, tiles: int) -> None:
    expected = _expected(height=4, width=width)
    for out, count in run_ranks(_few, 4, width):
        assert torch.equal(out, expected)
        assert count == tiles


# --- inference only, dtype


def test_gradients_are_refused_and_parameters_that_have_them_do_not_matter() -> None:
    vae = tiled.build_tiled(KL).requires_grad_(True)
    x = tiled.tiled_input(KL, "decode")
    expected = _expected()
    with pytest.raises(GradientError, match="inference"):
        halotile.decode(vae, x.clone().requires_grad_(True), strategy="tile")
    with torch.no_grad():
        assert torch.equal(halotile.decode(vae, x.clone().requires_grad_(True), strategy="tile"), expected)
    out = halotile.decode(vae, x, strategy="tile")
    assert torch.equal(out, expected)
    assert not out.requires_grad


# what is foreseen under inference mode takes three times as long, so one of them is enough
MODES = {
    "bfloat16": torch.no_grad,
    "float32 picture, bfloat16 VAE": torch.no_grad,
    "autocast": torch.inference_mode,
}


def _dtypes(group, name, half):
    """The result for each kind of dtypes: over the ranks of a group, or without one by the class's own loop."""
    made = []
    for kind, mode in MODES.items():
        vae, x = tiled.build_tiled(name, tiled.small(name)), tiled.small_input(name, half, batch=2)
        if kind != "autocast":
            vae = vae.to(torch.bfloat16)
        if kind == "bfloat16" or (group is None and kind != "autocast"):
            x = x.bfloat16()
        if group is not None:
            halotile.parallelize(vae, group, strategy="tile")
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            made.append(tiled.call(vae, name, half, x))
    return made


@pytest.mark.parametrize("name", [KL, "AutoencoderKLWan_2.2", "AutoencoderTiny", "AutoencoderDC"])
@pytest.mark.parametrize("half", ["decode", "encode"])
def test_dtype_in_is_dtype_out_at_batch_2(name: str, half: str) -> None:
    expected = _dtypes(None, name, half)
    for made in run_ranks(_dtypes, 2, name, half):
        assert [out.dtype for out in made] == [torch.bfloat16, torch.float32, torch.float32]
        for kind, out, plain in zip(MODES, made, expected, strict=True):
            assert torch.equal(out, plain.to(out.dtype)), kind


def _vae_changes_dtype(group):
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    first = _decode(group, vae=vae, x=x)
    second = _decode(group, vae=vae.to(torch.bfloat16), x=x.bfloat16())
    third = _decode(group, vae=vae.to(torch.float64), x=x.double())
    return first.dtype, second.dtype, third.dtype


def test_a_vae_may_change_its_dtype_between_calls() -> None:
    assert run_ranks(_vae_changes_dtype, 2)[1] == (torch.float32, torch.bfloat16, torch.float64)


# --- memory


def test_caches_are_gone_when_the_call_is_over_without_the_garbage_collector() -> None:
    name = "AutoencoderKLCogVideoX"
    vae, x = tiled.build_tiled(name), tiled.tiled_input(name, "decode")

    def live_bytes() -> int:
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)

    with torch.no_grad(), halotile.parallelize(vae, strategy="tile"):
        vae.decode(x)
        gc.collect()
        before = live_bytes()
        gc.disable()
        try:
            for _ in range(3):
                vae.decode(x)
            # a chain's caches are several megabytes; the board's and the report's leftovers are not
            assert live_bytes() - before < 100_000
        finally:
            gc.enable()


# --- hooks, weights


def _hooked(group, half):
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, half)
    network = vae.decoder if half == "decode" else vae.encoder
    network.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    network.register_forward_hook(lambda module, args, out: None if out.isnan().any() else out * 0.5)
    with torch.no_grad():
        expected = tiled.call(vae, KL, half, x)
        with halotile.parallelize(vae, group, strategy="tile"):
            return tiled.call(vae, KL, half, x), expected


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_hooks_on_the_network_run_once_a_call_on_real_values(half: str) -> None:
    for out, expected in run_ranks(_hooked, 2, half):
        assert torch.equal(out, expected)


def test_a_network_that_was_changed_is_foreseen_anew() -> None:
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile"):
        vae.decode(x)
        torch.manual_seed(0)
        vae.decoder.conv_out = torch.nn.Conv2d(vae.decoder.conv_out.in_channels, 4, 3, padding=1)
        assert vae.decode(x).sample.shape[1] == 4


def test_weights_that_hooks_cast_are_refused_and_stay_as_they_are() -> None:
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode").bfloat16()
    vae.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    with torch.no_grad():
        expected = vae.decode(x).sample
        with halotile.parallelize(vae, strategy="tile"), pytest.raises(UnsupportedError, match="casts weights"):
            vae.decode(x)
        assert torch.equal(vae.decode(x).sample, expected)
        assert torch.equal(halotile.decode(vae, x, strategy="serial"), expected)


def test_halves_of_different_dtypes_are_given_what_they_take() -> None:
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode").bfloat16()
    vae.decoder.bfloat16()
    vae.post_quant_conv.bfloat16()
    with torch.no_grad():
        assert torch.equal(halotile.decode(vae, x, strategy="tile"), vae.decode(x).sample)
        pixels = tiled.tiled_input(KL, "encode")
        assert torch.equal(halotile.encode(vae, pixels, strategy="tile"), vae.encode(pixels).latent_dist.mode())


# --- no state leaks


def _state(vae):
    own = {key: value for key, value in vars(vae).items() if not key.startswith(("_parameters", "_modules"))}
    return {key: repr(value) for key, value in own.items() if key not in ("_feat_map", "_enc_feat_map")}


@pytest.mark.parametrize(("name", "half"), [c for c in tiled.CASES if c[0] != "AutoencoderKLHunyuanVideo15"])
def test_a_call_leaves_the_vae_as_it_was(name: str, half: str) -> None:
    vae, x = tiled.build_tiled(name, tiled.small(name)), tiled.small_input(name, half)
    vae.use_tiling = False
    network = vae.decoder if half == "decode" else vae.encoder
    with torch.no_grad():
        tiled.call(vae, name, half, tiled.tiled_input(name, half, height=4, width=4))
    before, parts = _state(vae), {key: set(vars(part)) for key, part in vae.named_modules()}
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile", halves=(half,)) as handle:
        tiled.call(vae, name, half, x)
        assert handle.report.tiles > 1
        network.register_forward_pre_hook(_raise)
        with pytest.raises(RemoteRankError, match="stop here"):
            tiled.call(vae, name, half, x)
        network._forward_pre_hooks.clear()
    assert _state(vae) == before
    assert {key: set(vars(part)) for key, part in vae.named_modules()} == parts


def _raise(module, args):
    if args[0].device.type != "meta" and "forward" not in vars(module):
        raise ValueError("stop here")


def test_magvit_does_not_keep_frames_of_a_call_that_failed() -> None:
    name = "AutoencoderKLMagvit"
    vae = tiled.build_tiled(name)
    x = tiled.tiled_input(name, "decode")
    expected = _expected(name)
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile"):
        # foreseen here, so that the next call fails in its real work and not before
        assert torch.equal(vae.decode(x).sample, expected)
        hook = vae.decoder.up_blocks[-1].register_forward_hook(lambda module, args, out: 1 / 0)
        with pytest.raises(RemoteRankError, match="ZeroDivisionError"):
            vae.decode(x)
        hook.remove()
    with torch.no_grad():
        assert torch.equal(vae.decode(x).sample, expected)


# --- options


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"strategy": "hybrid"}, PlanError, "shards_per_tile"),
        ({"strategy": "tiles"}, PlanError, "tiles"),
        ({"strategy": "tile", "strict": True}, PlanError, "strict=True"),
        ({"strict": True}, PlanError, "it would be ignored"),
        ({"dim": "height"}, PlanError, "dim="),
        ({"deliver": "everyone"}, PlanError, "everyone"),
        ({"scheduler": "random"}, PlanError, "random"),
        ({"halves": ("decode", "both")}, PlanError, "both"),
        ({"halves": ()}, PlanError, "at least one"),
        ({"halves": "decode"}, PlanError, "give a tuple"),
        ({"progress": 3}, PlanError, "progress=3 is not callable"),
        ({"tiling": object()}, UnsupportedError, "tiling"),
        ({"driver": 1}, MembershipError, "driver=1"),
        ({"timeout_s": 0}, PlanError, "timeout_s"),
        ({"group": object()}, MembershipError, "not initialised"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, error, said) -> None:
    vae = tiled.build_tiled(KL)
    with pytest.raises(error, match=said):
        halotile.parallelize(vae, **options)
    assert "decode" not in vars(vae)


def test_torchrun_without_a_process_group_is_refused_and_not_run_alone(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    with pytest.raises(MembershipError, match="is not initialised, so each would work alone"):
        halotile.parallelize(vae)
    assert torch.equal(halotile.decode(vae, x, halotile.Ranks.alone(), "tile"), _expected())


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(4, 10, 7), "B C H W"),
        (torch.zeros(1, 4, 0, 7), "no empty dim"),
        (torch.zeros(1, 4, 10, 7, dtype=torch.int64), "floating"),
        ([[0.0]], "torch.Tensor"),
    ],
)
def test_inputs_that_cannot_be_are_refused(x, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        halotile.decode(tiled.build_tiled(KL), x, strategy="tile")

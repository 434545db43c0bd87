"""`strategy="hybrid"`: tiles dealt to subgroups of ranks, and the rows of each tile shared inside its subgroup."""

from __future__ import annotations

import gc
import time
from functools import lru_cache

import pytest
import tiled
import torch
import torch.distributed as dist
from ranks import run_ranks, run_world
from sharded import relative_error

import halotile
from halotile.comm import Ranks, run_virtual
from halotile.decode.door import tensor_of
from halotile.errors import LostGroupError, MismatchError, PlanError, RemoteRankError, UnsupportedError
from halotile.spatial import SpatialTensor
from halotile.spatial.registry import RULES

KL, WAN, MAGVIT, COG = "AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLMagvit", "AutoencoderKLCogVideoX"
NOISY = "AutoencoderKLLTXVideo_0.9.1"
VIDEO = (WAN, "AutoencoderKLLTX2Video", "AutoencoderKLHunyuanVideo", "AutoencoderKLMiniMaxH3")
CASES = [(name, half) for name in (KL, *VIDEO) for half in ("decode", "encode")]
CASES += [(NOISY, "decode")]
TOLERANCE = 2e-5
"""Of the largest value: sums of float32 in another order, over some thirty layers."""
ONE_TILE, TWO_TILES, THREE_TILES = ({"height": height, "width": 4} for height in (4, 8, 10))
"""Tiles of 6 rows every 4; the last of three has 2."""


# a process follows a network with fake tensors once, and not once a test; each call leaves it as it was
_built = lru_cache(maxsize=None)(tiled.build_tiled)


def _plain(name, half="decode", sizes=THREE_TILES):
    with torch.no_grad():
        return tiled.call(_built(name), name, half, tiled.tiled_input(name, half, **sizes))


def _run(group, shards, name=KL, half="decode", sizes=THREE_TILES, vae=None, **options):
    vae = _built(name) if vae is None else vae
    x = tiled.tiled_input(name, half, **sizes)
    with halotile.parallelize(vae, group, "hybrid", shards_per_tile=shards, **options) as handle:
        out = tiled.call(vae, name, half, x)
    return out, handle.report


def _and_next_draw(group, shards, name, half, sizes):
    return (*_run(group, shards, name, half, sizes), torch.rand(1))


def assert_close(out, expected):
    assert out.dtype == expected.dtype
    assert relative_error(out, expected) <= TOLERANCE


# --- the result


@pytest.mark.parametrize(("name", "half"), CASES)
def test_every_kind_is_close_to_its_own_loop_and_the_same_bits_in_one_subgroup_and_in_two(name, half):
    # clips are encoded from many times the frames: two tiles are enough there
    sizes = TWO_TILES if half == "encode" and name != KL else THREE_TILES
    expected = _plain(name, half, sizes)
    drawn_next = torch.rand(1)
    (first, _, _), *others = results = [
        result for n in (2, 4) for result in run_ranks(_and_next_draw, n, 2, name, half, sizes)
    ]
    assert_close(first, expected)
    assert all(torch.equal(out, first) for out, _, _ in others)
    for out, report, drawn in results:
        assert type(out) is torch.Tensor
        assert (report.strategy, report.exactness, report.extents) == ("hybrid", "allclose", None)
        assert report.gathers == {}
        assert report.tiles > 1
        assert torch.equal(drawn, drawn_next), "the generator stands elsewhere than after one rank's call"


@pytest.mark.parametrize(("name", "half"), [(KL, "decode"), (KL, "encode"), (WAN, "decode")])
@pytest.mark.parametrize("shards", [3, 4])
def test_one_subgroup_of_all_ranks_also_where_tiles_have_fewer_rows_than_ranks(name, half, shards):
    """The last of three tiles has two rows of latents; seams are whole latents, of pixels too."""
    first, *others = run_ranks(_run, shards, shards, name, half)
    assert_close(first[0], _plain(name, half))
    assert all(torch.equal(out, first[0]) for out, _ in others)
    rows, x = {3: (5, 5, 4), 4: (5, 5, 2, 2)}[shards], tiled.tiled_input(name, half, **THREE_TILES)
    cells = x[:, 0].numel() // THREE_TILES["height"]
    assert first[1].loads == tuple(cells * own for own in rows)


def test_two_tiles_on_four_ranks():
    for name in (KL, WAN):
        expected = _plain(name, sizes=TWO_TILES)
        frames = tiled.tiled_input(name, "decode").shape[2] if name == WAN else 1
        for out, report in run_ranks(_run, 4, 2, name, "decode", TWO_TILES):
            assert_close(out, expected)
            assert report.tiles == 2
            # 6 x 4 and 4 x 4 latents, half of the rows each
            assert report.loads == (12 * frames, 12 * frames, 8 * frames, 8 * frames)
            assert report.messages > 0
            assert report.reason == "strategy='hybrid' was asked for; each tile's rows are shared by 2 ranks"


def test_fewer_tiles_than_subgroups():
    expected = _plain(KL, sizes=ONE_TILE)
    for rank, (out, report) in enumerate(run_ranks(_run, 4, 2, KL, "decode", ONE_TILE)):
        assert_close(out, expected)
        assert report.loads == (8, 8, 0, 0)
        assert (report.messages == 0) == (rank > 1)


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_one_rank_a_tile_is_the_strategy_tile(half):
    expected = _plain(KL, half)
    for out, report in run_ranks(_run, 2, 1, KL, half):
        assert torch.equal(out, expected)
        assert (report.strategy, report.exactness) == ("hybrid", "bitwise")


@pytest.mark.parametrize("name", [KL, "AutoencoderKLLTX2Video"])
def test_eight_virtual_ranks(name):
    """Bits depend on the ranks a tile, and on no other number."""
    expected, x = _plain(name), tiled.tiled_input(name, "decode", **THREE_TILES)

    # built one by one: threads share the generator of weights
    vaes = [tiled.build_tiled(name) for _ in range(8)]

    def on(n, shards):
        def one(transport):
            vae = vaes[transport.rank]
            with halotile.parallelize(vae, Ranks(transport), "hybrid", shards_per_tile=shards):
                return tensor_of(vae.decode(x))

        return run_virtual(n, one)

    for shards in (2, 4):
        first, *others = on(8, shards) + on(shards, shards)
        assert_close(first, expected)
        assert all(torch.equal(out, first) for out in others)


@pytest.mark.parametrize(("members", "shards"), [((2, 3), 2), ((1, 2, 3), 3)])
def test_groups_without_global_rank_0(members, shards):
    expected = _plain(WAN)
    for out, _ in run_ranks(_run, len(members), shards, WAN, members=members):
        assert_close(out, expected)


def _delivered(group, half, deliver):
    vae = _built(KL)
    with halotile.parallelize(vae, group, "hybrid", deliver=deliver, driver=3, shards_per_tile=2) as handle:
        return tensor_of(getattr(vae, half)(tiled.tiled_input(KL, half, **THREE_TILES))), handle.report.extents


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_to_the_driver_alone_or_each_rank_its_rows(half):
    (everyone, _), *_ = run_ranks(_run, 4, 2, KL, half)
    outs = [out for out, _ in run_ranks(_delivered, 4, half, "driver")]
    assert outs[:3] == [None] * 3
    assert torch.equal(outs[3], everyone)
    results = run_ranks(_delivered, 4, half, "sharded")
    assert torch.equal(torch.cat([out for out, _ in results], -2), everyone)
    assert all(extents == tuple(out.shape[-2] for out, _ in results) for _, extents in results)


def _in_bfloat16(group, dtype):
    vae, seen = tiled.build_tiled(KL).to(torch.bfloat16), []
    x = tiled.tiled_input(KL, "decode", **THREE_TILES).to(dtype)
    # the driver leads no subgroup, and comes last: it does not see the others' progress while it waits for them
    slow = 0.5 if torch.distributed.get_rank(group) == 1 else 0.0
    vae.decoder.register_forward_hook(lambda module, args, output: time.sleep(slow))
    out = halotile.decode(
        vae, x, group, "hybrid", shards_per_tile=2, driver=1, progress=lambda done, total: seen.append((done, total))
    )
    return out, seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_in_is_dtype_out_and_progress_counts_calls(dtype):
    true = _plain(KL)
    with torch.no_grad():
        x = tiled.tiled_input(KL, "decode", **THREE_TILES).bfloat16()
        alone = tiled.build_tiled(KL).to(torch.bfloat16).decode(x).sample
    for rank, (out, seen) in enumerate(run_ranks(_in_bfloat16, 4, dtype)):
        assert out.dtype == dtype
        # statistics are float32 on both, so rounding is of the same size, at other places
        assert (out.float() - true).abs().max() <= 1.2 * (alone.float() - true).abs().max()
        assert bool(seen) == (rank == 1)
        assert rank != 1 or seen[0][0] < seen[0][1], "nothing was shown before the end"
        if seen:
            assert seen[-1] == (3, 3)


# --- gathers and strict


def _without_a_rule(group, strict, sizes):
    removed = RULES.pop(torch.ops.aten.convolution.default)
    try:
        if not strict:
            return _run(group, 2, sizes=sizes)
        started = time.monotonic()
        with pytest.raises(UnsupportedError, match=r"aten\.convolution\.default .*strict=True"):
            _run(group, 2, sizes=sizes, strict=True, timeout_s=60)
    finally:
        RULES[torch.ops.aten.convolution.default] = removed
    seconds = time.monotonic() - started
    # the group is as it was
    return (*_run(group, 2, sizes=sizes, strict=True), seconds)


def test_gathers_of_all_subgroups_are_counted_on_every_rank():
    expected = _plain(KL)
    for out, report in run_ranks(_without_a_rule, 4, False, THREE_TILES):
        assert_close(out, expected)
        # the first of each tile; from there on its ranks have everything
        assert report.gathers == {"aten.convolution.default": 3}
        assert "aten.convolution.default (3)" in report.reason


@pytest.mark.parametrize("sizes", [THREE_TILES, ONE_TILE])
def test_strict_refuses_on_every_rank_also_without_a_tile_and_the_group_stays_usable(sizes):
    expected = _plain(KL, sizes=sizes)
    for out, _, seconds in run_ranks(_without_a_rule, 4, True, sizes):
        assert seconds < 30
        assert_close(out, expected)


# --- nothing leaks


def _left_over(group, name):
    vae = _built(name)
    vae.use_tiling = False
    first, _ = _run(group, 2, name, sizes=TWO_TILES, vae=vae)
    second, _ = _run(group, 2, name, sizes=TWO_TILES, vae=vae)
    gc.collect()
    # isinstance would ask modules that answer with a warning
    left = [tuple(thing.shape) for thing in gc.get_objects() if type(thing) is SpatialTensor]
    off, vae.use_tiling = not vae.use_tiling, True
    return first, (torch.equal(first, second), left, off, "forward" in vars(vae.decoder), "decode" in vars(vae))


@pytest.mark.parametrize("name", [WAN, MAGVIT, COG])
def test_nothing_is_left_of_a_call(name):
    """Caches in lists, on modules, and returned."""
    expected = _plain(name, sizes=TWO_TILES)
    for out, state in run_ranks(_left_over, 2, name):
        assert_close(out, expected)
        assert state == (True, [], True, False, False)


# --- fail together


class _BrokenLayerError(Exception):
    pass


def _one_rank_raises(_, where, sizes):
    group, rank, vae = dist.new_group([0, 1, 2, 3]), dist.get_rank(), _built(KL)

    def broken(*_: object) -> None:
        if rank == 1:
            raise _BrokenLayerError("this layer is broken")

    # foreseen here, so that the next call fails in its real work and not before
    _run(group, 2, vae=vae, sizes=sizes)
    hook = vae.get_submodule(where).register_forward_hook(broken)
    started = time.monotonic()
    with pytest.raises(RemoteRankError) as caught:
        _run(group, 2, vae=vae, sizes=sizes, timeout_s=60)
    seconds = time.monotonic() - started
    with pytest.raises(LostGroupError, match="make a new one"):
        _run(group, 2, vae=vae)
    hook.remove()
    out, _ = _run(dist.new_group([0, 1, 2, 3]), 2, vae=vae)
    return caught.value.rank, caught.value.kind, caught.value.remote_message, seconds, out


@pytest.mark.parametrize(
    ("where", "sizes"), [("decoder.conv_in", THREE_TILES), ("decoder.conv_out", THREE_TILES), ("decoder", ONE_TILE)]
)
def test_a_rank_that_raises_makes_all_raise_and_a_new_group_works(where, sizes):
    """With one tile, the second subgroup only waits."""
    expected = _plain(KL)
    for rank, kind, message, seconds, out in run_world(_one_rank_raises, where, sizes):
        assert (rank, kind, message) == (1, "_BrokenLayerError", "this layer is broken")
        assert seconds < 20
        assert_close(out, expected)


def _different(group):
    with pytest.raises(MismatchError) as caught:
        _run(group, 2 if dist.get_rank(group) else 4)
    return str(caught.value), _run(group, 2)[0]


def test_ranks_that_disagree_about_the_ranks_a_tile_raise_and_can_go_on():
    expected = _plain(KL)
    for said, out in run_ranks(_different, 4):
        assert "shards_per_tile: rank 0 has 4, rank 1 has 2" in said
        assert_close(out, expected)


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "hybrid"}, "needs shards_per_tile, how many ranks share one tile; got None"),
        ({"strategy": "hybrid", "shards_per_tile": 0}, "got 0"),
        ({"strategy": "hybrid", "shards_per_tile": True}, "got True"),
        ({"strategy": "hybrid", "shards_per_tile": 2.0}, r"got 2\.0"),
        ({"strategy": "tile", "shards_per_tile": 2}, "shards_per_tile=2 is about strategy='hybrid'"),
        ({"shards_per_tile": 2}, "with strategy='auto' it would be ignored"),
        ({"strategy": "hybrid", "shards_per_tile": 2}, "shards_per_tile=2 does not cut the 1 ranks"),
        (
            {"strategy": "hybrid", "shards_per_tile": 1, "tiling": halotile.TileCountConfig()},
            "use strategy='tile', or leave tiling out",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, said):
    vae = tiled.build_tiled(KL)
    with pytest.raises(PlanError, match=said):
        halotile.parallelize(vae, **options)
    assert "decode" not in vars(vae)


def _does_not_divide(group):
    with pytest.raises(PlanError) as caught:
        halotile.decode(_built(KL), tiled.tiled_input(KL, "decode"), group, "hybrid", shards_per_tile=2)
    return str(caught.value), _run(group, 3)[0]


def test_subgroups_must_be_equal():
    expected = _plain(KL)
    for said, out in run_ranks(_does_not_divide, 3):
        assert said == (
            "shards_per_tile=2 does not cut the 3 ranks of the group into equal subgroups; for 3 ranks choose one of "
            "1, 3"
        )
        assert_close(out, expected)


class _NoLoop(torch.nn.Module):
    def decode(self, x):
        return x


class _Tokens(torch.nn.Module):
    """A loop whose network takes tokens, without rows."""

    use_tiling = True

    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Linear(3, 3)

    def decode(self, x):
        return self.decoder(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])


@pytest.mark.parametrize(
    ("kind", "said"), [(_NoLoop, "strategy='hybrid': the class has no tile loop"), (_Tokens, r"of shape \(1, 20, 3\)")]
)
def test_loops_that_cannot_be_shared_are_refused_on_every_rank(kind, said):
    def one(transport):
        with pytest.raises(UnsupportedError, match=said):
            halotile.decode(kind(), torch.ones(1, 3, 4, 5), Ranks(transport), "hybrid", shards_per_tile=2)
        return transport.counters.messages

    assert run_virtual(2, one) == [0, 0]

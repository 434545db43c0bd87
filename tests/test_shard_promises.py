"""The promises of DESIGN.md, section 6, for sharded decodes, each on real ranks."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import tiny_vaes as tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import run_ranks, run_world

import halotile
from halotile.comm import Ranks
from halotile.errors import (
    GradientError,
    LostGroupError,
    MismatchError,
    MissingRankError,
    PlanError,
    RemoteRankError,
    UnsupportedError,
)
from halotile.spatial import SpatialTensor
from halotile.spatial.registry import RULES

KL, WAN = "AutoencoderKL", "AutoencoderKLWan_2.1"
TOLERANCE = 2e-5
"""Of the largest value: sums of float32 in another order, over some thirty layers."""


def _call(vae, name, half, x):
    torch.manual_seed(11)
    return tiny.decode(vae, name, x) if half == "decode" else tiny.encode(vae, name, x)


def _input(name, half):
    return tiny.latent(name) if half == "decode" else tiny.sample(name)


def _expected(name=KL, half="decode", x=None):
    with torch.no_grad():
        return _call(tiny.build(name), name, half, _input(name, half) if x is None else x)


def _shard(group, name=KL, x=None, vae=None, **options):
    return halotile.decode(vae or tiny.build(name), tiny.latent(name) if x is None else x, group, "shard", **options)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert (out - expected).abs().max() <= TOLERANCE * expected.abs().max()


# --- the result, whoever gets it


def _delivered(group, half, deliver):
    vae = tiny.build(KL)
    with halotile.parallelize(vae, group, strategy="shard", deliver=deliver, driver=2) as handle:
        output = getattr(vae, half)(_input(KL, half))
        as_tuple = getattr(vae, half)(_input(KL, half), return_dict=False)
    fields = [getattr(output, name, None) for name in ("sample", "latent_dist")]
    given = next((field for field in fields if field is not None), None)
    parts = [] if given is None else [given] if half == "decode" else [given.parameters, given.mean, given.std]
    return parts, [type(part) for part in parts], as_tuple[0] is None, handle.report


@pytest.mark.parametrize("half", ["decode", "encode"])
@pytest.mark.parametrize("deliver", ["all", "driver", "sharded"])
def test_who_gets_what(half: str, deliver: str) -> None:
    with torch.no_grad():
        output = getattr(tiny.build(KL), half)(_input(KL, half))
    expected = [output.sample] if half == "decode" else [
        output.latent_dist.parameters, output.latent_dist.mean, output.latent_dist.std
    ]  # fmt: skip
    results = run_ranks(_delivered, 3, half, deliver)
    for rank, (parts, kinds, nothing, report) in enumerate(results):
        assert nothing == (not parts) == (deliver == "driver" and rank != 2)
        assert all(kind is torch.Tensor for kind in kinds)
        assert report.strategy == "shard"
        assert report.exactness == "allclose"
        assert report.peak_activation_bytes > 0
        assert report.messages > 0
        assert sum(report.loads) == _input(KL, half).numel() // _input(KL, half).shape[1]
    if deliver == "sharded":
        rows = (4 * 8, 4 * 8, 3 * 8) if half == "decode" else (4, 4, 3)
        assert all(report.extents == rows for *_, report in results)
        assert all(parts[0].shape[-2] == rows[rank] for rank, (parts, *_) in enumerate(results))
        wholes = [[torch.cat(parts, -2) for parts in zip(*(parts for parts, *_ in results), strict=True)]]
    else:
        assert all(report.extents is None for *_, report in results)
        wholes = [parts for parts, *_ in results if parts]
    for whole in wholes:
        for part, reference in zip(whole, expected, strict=True):
            assert_close(part, reference)
    if deliver == "all":
        for whole in wholes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(whole, wholes[0], strict=True))


def _as_asked(group, name, batch, inference):
    x = torch.cat([tiny.latent(name, seed) for seed in range(batch)])
    with torch.inference_mode(inference):
        return _shard(group, name, x).clone()


@pytest.mark.parametrize(("batch", "inference"), [(2, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", [KL, WAN])
def test_batches_and_inference_mode(name: str, batch: int, inference: bool) -> None:
    expected = _expected(name, x=torch.cat([tiny.latent(name, seed) for seed in range(batch)]))
    for out in run_ranks(_as_asked, 2, name, batch, inference):
        assert_close(out, expected)


def _bfloat16(group, dtype):
    return _shard(group, x=tiny.latent(KL).to(dtype), vae=tiny.build(KL).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_in_is_dtype_out_and_bfloat16_is_as_exact_as_on_one_rank(dtype: torch.dtype) -> None:
    true = _expected()
    with torch.no_grad():
        alone = tiny.build(KL).to(torch.bfloat16).decode(tiny.latent(KL).bfloat16()).sample.float()
    for out in run_ranks(_bfloat16, 2, dtype):
        assert out.dtype == dtype
        # statistics are float32 on both, so rounding is of the same size, at other places
        assert (out.float() - true).abs().max() <= 1.2 * (alone - true).abs().max()


def _height(group, rows):
    return _shard(group, x=torch.randn(1, 4, rows, 5, generator=torch.Generator().manual_seed(rows)))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_fewer_rows_than_ranks(rows: int) -> None:
    expected = _expected(x=torch.randn(1, 4, rows, 5, generator=torch.Generator().manual_seed(rows)))
    for out in run_ranks(_height, 4, rows):
        assert_close(out, expected)


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_a_group_of_one_rank(half: str) -> None:
    vae = tiny.build(KL)
    with halotile.parallelize(vae, Ranks.alone(), strategy="shard") as handle:
        out = _call(vae, KL, half, _input(KL, half))
    assert_close(out, _expected(half=half))
    assert handle.report.messages == 0


@pytest.mark.parametrize("members", [(2, 3), (1, 2, 3)])
def test_subgroups_without_global_rank_0(members: tuple[int, ...]) -> None:
    for out in run_ranks(_shard, len(members), members=members):
        assert_close(out, _expected())


def _own_traffic_on_world(_):
    """Between two layers of the sharded decode, the program adds up something over the world, on its own account."""
    group = dist.new_group([1, 2])
    rank, sums = dist.get_rank(), []

    def add_up(*_: object) -> None:
        ours = torch.full((1,), 1.0 + rank)
        dist.all_reduce(ours)
        sums.append(ours.item())

    if rank not in (1, 2):
        for _ in range(3):
            add_up()
        return None, sums
    vae = tiny.build(KL)
    for part in (vae.decoder.conv_in, vae.decoder.mid_block, vae.decoder.conv_out):
        part.register_forward_hook(add_up)
    return _shard(group, vae=vae), sums


def test_traffic_of_the_program_on_world_is_not_mixed_up_with_ours() -> None:
    """S1."""
    results = run_world(_own_traffic_on_world)
    assert all(sums == [10.0] * 3 for _, sums in results)
    for out, _ in results[1:3]:
        assert_close(out, _expected())


NOISY = "AutoencoderKLLTXVideo_0.9.1"


def _noisy(group, given):
    vae, z = tiny.build(NOISY), tiny.latent(NOISY)
    own = tiny.DECODE_KW[NOISY](vae, z, None, None)
    torch.manual_seed(21 + 100 * dist.get_rank(group))
    out = halotile.decode(vae, z, group, "shard", **own)
    return out, torch.rand(1)


def test_a_network_that_draws_noise_draws_that_of_the_first_rank() -> None:
    vae, z = tiny.build(NOISY), tiny.latent(NOISY)
    torch.manual_seed(21)
    with torch.no_grad():
        expected, then = tiny.decode(vae, NOISY, z), torch.rand(1)
    for out, after in run_ranks(_noisy, 3, None):
        assert_close(out, expected)
        assert torch.equal(after, then)


def _own_generator(group):
    generator = torch.Generator().manual_seed(5 + dist.get_rank(group))

    def model(x, generator):
        return x + torch.randn(x.shape, generator=generator)

    out = halotile.decode(model, torch.zeros(1, 2, 6, 3), group, "shard", generator=generator)
    return out, torch.rand(1, generator=generator)


def test_a_generator_among_the_arguments_is_that_of_the_first_rank() -> None:
    generator = torch.Generator().manual_seed(5)
    expected, then = torch.randn(1, 2, 6, 3, generator=generator), torch.rand(1, generator=generator)
    for out, after in run_ranks(_own_generator, 2):
        assert torch.equal(out, expected)
        assert torch.equal(after, then)


# --- gathers and strict


def _without_a_rule(group, strict):
    removed = RULES.pop(torch.ops.aten.convolution.default)
    try:
        vae = tiny.build(KL)
        with halotile.parallelize(vae, group, strategy="shard", strict=strict, timeout_s=60) as handle:
            started = time.monotonic()
            if strict:
                with pytest.raises(UnsupportedError, match=r"aten\.convolution\.default .*strict=True"):
                    vae.decode(tiny.latent(KL))
            else:
                return vae.decode(tiny.latent(KL)).sample, handle.report
    finally:
        RULES[torch.ops.aten.convolution.default] = removed
    seconds = time.monotonic() - started
    # all ranks raised the same at the same point: the group is as it was
    return _shard(group, strict=True), seconds


def test_an_operation_without_a_rule_is_gathered_and_counted() -> None:
    for out, report in run_ranks(_without_a_rule, 2, False):
        assert_close(out, _expected())
        # the first of them; from there on every rank has everything
        assert report.gathers == {"aten.convolution.default": 1}
        assert report.to_dict()["gathers"] == report.gathers


def test_strict_refuses_it_on_every_rank_and_the_group_stays_usable() -> None:
    for out, seconds in run_ranks(_without_a_rule, 3, True):
        assert seconds < 30
        assert_close(out, _expected())


# --- nothing leaks


def _left_over(group, name, half):
    vae = tiny.build(name)
    with halotile.parallelize(vae, group, strategy="shard"):
        first = _call(vae, name, half, _input(name, half))
        second = _call(vae, name, half, _input(name, half))
    gc.collect()
    # isinstance would ask modules that answer with a warning
    left = [tuple(thing.shape) for thing in gc.get_objects() if type(thing) is SpatialTensor]
    return torch.equal(first, second), left


@pytest.mark.parametrize(
    ("name", "half"),
    [
        (WAN, "decode"),
        (WAN, "encode"),
        ("AutoencoderKLMagvit", "decode"),
        ("AutoencoderKLMagvit", "encode"),
        ("AutoencoderKLCogVideoX", "decode"),
        ("AutoencoderKLHunyuanVideo", "decode"),
    ],
)
def test_no_sharded_tensor_outlives_the_call(name: str, half: str) -> None:
    for equal, left in run_ranks(_left_over, 2, name, half):
        assert equal
        assert left == []


class _Hoarder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.named, self.last = ["kept"], {"a": 1}, None
        self.register_buffer("state", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.seen.append(x)
        self.named["x"] = [x]
        self.last = self.extra = self.state = x + 1
        if x.shape[1] == 3:
            raise ZeroDivisionError
        return x * 2


def _hoards(group):
    model = _Hoarder()
    seen, named = model.seen, model.named
    out = halotile.decode(model, torch.ones(1, 2, 4, 4), group, "shard")
    with pytest.raises(RemoteRankError, match="ZeroDivisionError"):
        halotile.decode(model, torch.ones(1, 3, 4, 4), group, "shard")
    assert model.seen is seen
    assert model.named is named
    return out, seen, named, model.last, hasattr(model, "extra"), model.state


def test_attributes_that_hold_sharded_tensors_are_put_back_also_after_an_exception() -> None:
    for out, seen, named, last, extra, state in run_ranks(_hoards, 2):
        assert torch.equal(out, torch.full((1, 2, 4, 4), 2.0))
        assert (seen, named, last, extra) == (["kept"], {"a": 1}, None, False)
        assert torch.equal(state, torch.zeros(1))


def _tiled_vae(group):
    vae = tiny.build(KL)
    vae.enable_tiling()
    vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 32
    out = _shard(group, vae=vae)
    assert vae.use_tiling
    hook = vae.decoder.conv_out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(RemoteRankError, match="ZeroDivisionError"):
        _shard(group, vae=vae)
    hook.remove()
    assert vae.use_tiling
    # every rank raised the same, so the group is not lost
    return out, _shard(group, vae=vae)


def test_the_own_tiling_is_off_for_the_call_and_on_again_also_after_an_exception() -> None:
    for out, again in run_ranks(_tiled_vae, 2):
        assert_close(out, _expected())
        assert torch.equal(again, out)


def test_gradients_are_refused() -> None:
    vae, x = tiny.build(KL), tiny.latent(KL)
    with pytest.raises(GradientError, match="inference"):
        halotile.decode(vae, x.requires_grad_(True), Ranks.alone(), "shard")


# --- handshake


def _different(group, what):
    rank = dist.get_rank(group)
    x = torch.zeros(1, 4, 6 + (rank if what == "heights" else 0), 5)
    strategy = "serial" if what == "strategies" and rank else "shard"
    with pytest.raises(MismatchError) as caught:
        halotile.decode(tiny.build(KL), x, group, strategy, strict=what == "strict" and rank == 1)
    return str(caught.value), _shard(group)


@pytest.mark.parametrize(
    ("what", "said"),
    [("heights", "(1, 4, 7, 5)"), ("strategies", "rank 0 has shard, rank 1 has serial"), ("strict", "strict")],
)
def test_ranks_that_disagree_raise_before_any_work_and_can_go_on(what: str, said: str) -> None:
    """R7."""
    for message, out in run_ranks(_different, 2, what):
        assert said in message
        assert_close(out, _expected())


def _one_rank_only(group, given_up):
    if dist.get_rank(group) == 0:
        with pytest.raises(MissingRankError, match=r"for ranks 1 \(global rank 1\)"):
            _shard(group, timeout_s=1)
        given_up.touch()
    else:
        _wait_for(given_up)
        with pytest.raises(MissingRankError):
            _shard(group)
    return _shard(group)


def test_who_does_not_come_is_named_and_the_group_recovers(tmp_path: Path) -> None:
    """H1."""
    for out in run_ranks(_one_rank_only, 2, tmp_path / "given up"):
        assert_close(out, _expected())


# --- fail together


class _BrokenLayerError(Exception):
    pass


def _raise_on(rank):
    def hook(*_: object) -> None:
        if dist.get_rank() == rank:
            raise _BrokenLayerError("this layer is broken")

    return hook


def _one_rank_raises(_, size, where):
    group, rank = dist.new_group(list(range(size))), dist.get_rank()
    outcome = None
    if rank < size:
        vae = tiny.build(KL)
        part = vae if not where else vae.get_submodule(where)
        hook = part.register_forward_hook(_raise_on(1))
        started = time.monotonic()
        with pytest.raises(RemoteRankError) as caught:
            _shard(group, vae=vae, timeout_s=60)
        seconds = time.monotonic() - started
        with pytest.raises(LostGroupError, match=r"lost in an earlier call \(call 0: .*make a new one"):
            _shard(group)
        with pytest.raises(LostGroupError):
            halotile.decode(tiny.build(KL), tiny.latent(KL), group, "serial")
        hook.remove()
        outcome = caught.value.rank, caught.value.kind, caught.value.remote_message, seconds
    fresh = dist.new_group(list(range(size)))
    return (*outcome, _shard(fresh)) if outcome else None


@pytest.mark.parametrize("where", ["decoder.conv_in", "decoder.mid_block", "decoder.conv_out"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_raises_makes_all_raise_and_a_new_group_works(where: str, size: int) -> None:
    """R6."""
    expected = _expected()
    results = run_world(_one_rank_raises, size, where)
    for rank, kind, message, seconds, out in results[:size]:
        assert (rank, kind, message) == (1, "_BrokenLayerError", "this layer is broken")
        assert seconds < 20
        assert_close(out, expected)


def _one_rank_hangs(_, told):
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    if rank == 3:
        return None
    vae = tiny.build(KL)
    _shard(group, vae=vae)
    if rank == 1:
        vae.decoder.mid_block.register_forward_hook(lambda *_: _wait_for(told / "0", told / "2"))
    started = time.monotonic()
    with pytest.raises(MissingRankError) as caught:
        _shard(group, vae=vae, timeout_s=3)
    seconds = time.monotonic() - started
    (told / f"{rank}").touch()
    return str(caught.value), seconds


def _wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.05)


def test_a_rank_that_hangs_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    results = run_world(_one_rank_hangs, tmp_path)
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "ranks 1 (global rank 1) no longer answer" in message
        # the timeout, and what it takes to find out who still answers
        assert seconds < 3 + 6
    assert "ranks 1 (global rank 1) no longer answer" in results[1][0]


def _killed(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    vae = tiny.build(KL)
    if rank == 1:
        vae.decoder.mid_block.register_forward_hook(lambda *_: os.kill(os.getpid(), 9))
    started = time.monotonic()
    try:
        _shard(None, vae=vae, timeout_s=60)
    except MissingRankError as error:
        (Path(folder) / f"said{rank}").write_text(f"{time.monotonic() - started:.0f} {error}")
    os._exit(0)


def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path) -> None:
    # forks of the server that ranks.py has, which need not import torch
    mp.start_processes(_killed, (str(tmp_path),), nprocs=3, join=False, start_method="forkserver")
    deadline = time.monotonic() + 120
    said = [tmp_path / "said0", tmp_path / "said2"]
    while time.monotonic() < deadline and not all(path.exists() and path.read_text() for path in said):
        time.sleep(0.2)
    for path in said:
        seconds, message = path.read_text().split(" ", 1)
        assert int(seconds) < 20
        assert "ranks 1 (global rank 1) no longer answer" in message


# --- which dim


@pytest.mark.parametrize("dim", [0, 1, -4, 4, 7])
def test_a_dim_that_is_not_spatial_is_refused(dim: int) -> None:
    with pytest.raises(PlanError, match=f"dim={dim} is not a spatial dim"):
        halotile.decode(tiny.build(KL), tiny.latent(KL), Ranks.alone(), "shard", dim=dim)

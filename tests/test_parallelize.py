"""The object that users keep: patched, copied, saved, used with and without ranks, and given back."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle

import diffusers
import pytest
import tiled
import tiny_vaes as tiny
import torch
from ranks import run_ranks, run_world
from torch.distributed.device_mesh import init_device_mesh

import halotile
from halotile.errors import RemoteRankError, UnsupportedError

KL = "AutoencoderKL"


def _copies(group, tmp):
    """R8: copies, state dicts and files of a parallelized VAE are as before."""
    rank = torch.distributed.get_rank(group)
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    keys = list(vae.state_dict())
    handle = halotile.parallelize(vae, group, strategy="tile")
    if rank == 1:
        # a call of the original would wait for rank 0, which makes none
        plain = copy.deepcopy(vae)
        again = copy.deepcopy(plain)
        loaded = pickle.loads(pickle.dumps(vae))
        stream = io.BytesIO()
        torch.save(vae, stream)
        stream.seek(0)
        thawed = torch.load(stream, weights_only=False)
        with torch.no_grad():
            outs = [each.decode(x).sample for each in (plain, again, loaded, thawed)]
            plain.encode(tiled.tiled_input(KL, "encode"))
        assert all(torch.equal(out, outs[0]) for out in outs)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
            assert not torch.equal(plain.decode(x).sample, outs[0])
        assert handle.report is None
        assert list(vae.state_dict()) == keys
        vae.load_state_dict({key: value.clone() for key, value in vae.state_dict().items()})
        vae.save_pretrained(tmp)
        back = diffusers.AutoencoderKL.from_pretrained(tmp)
        assert type(back) is type(vae)
        assert all(
            torch.equal(a, b) for a, b in zip(back.state_dict().values(), vae.state_dict().values(), strict=True)
        )
    with torch.no_grad():
        return vae.decode(x).sample


def test_r8_copies_and_files_of_a_parallelized_vae_are_plain(tmp_path) -> None:
    with torch.no_grad():
        expected = tiled.call(tiled.build_tiled(KL), KL, "decode", tiled.tiled_input(KL, "decode"))
    assert all(torch.equal(out, expected) for out in run_ranks(_copies, 2, str(tmp_path)))


def test_the_vae_is_as_it_was_after_remove_and_after_an_exception() -> None:
    vae = tiled.build_tiled(KL)
    before = dict(vars(vae))
    with pytest.raises(KeyError), halotile.parallelize(vae, strategy="tile") as handle:  # noqa: PT012
        assert set(vars(vae)) - set(before) == {"decode", "encode"}
        raise KeyError
    assert dict(vars(vae)) == before
    handle.remove()
    assert dict(vars(vae)) == before


def test_a_method_that_was_set_before_is_called_and_comes_back() -> None:
    vae = tiled.build_tiled(KL)
    calls = []
    own = vae.decode

    def mine(*args, **kwargs):
        calls.append(args)
        return own(*args, **kwargs)

    vae.decode = mine
    with halotile.parallelize(vae, strategy="serial"), torch.no_grad():
        vae.decode(tiled.tiled_input(KL, "decode"))
    assert len(calls) == 1
    assert vae.decode is mine


def test_a_wrapper_around_a_removed_method_still_decodes() -> None:
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    handle = halotile.parallelize(vae, strategy="tile")
    wrapped = vae.decode
    vae.decode = functools.partial(wrapped, return_dict=True)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(vae.decode(x).sample, tiled.build_tiled(KL).decode(x).sample)
    assert handle.report is None


def test_twice_is_refused_and_one_half_leaves_the_other() -> None:
    vae = tiled.build_tiled(KL)
    with halotile.parallelize(vae, halves=("decode",)):
        assert "encode" not in vars(vae)
        with pytest.raises(UnsupportedError, match="already"):
            halotile.parallelize(vae)
        with pytest.raises(UnsupportedError, match="remove"):
            halotile.decode(vae, tiled.tiled_input(KL, "decode"))
    halotile.parallelize(vae).remove()


# --- A1: a class that cannot do it is refused when it is parallelized


class _NoLoop(torch.nn.Module):
    def decode(self, z):
        return z

    encode = decode


class _NoNetwork(_NoLoop):
    use_tiling = False


def test_a1_classes_that_cannot_are_refused_by_name_and_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"_NoLoop cannot.*no tile loop of its own"):
        halotile.parallelize(_NoLoop(), strategy="tile")
    with pytest.raises(UnsupportedError, match=r"_NoNetwork cannot.*no module named 'decoder'"):
        halotile.parallelize(_NoNetwork(), strategy="tile")
    with pytest.raises(UnsupportedError, match=r"AsymmetricAutoencoderKL cannot.*no tile loop"):
        halotile.parallelize(diffusers.AsymmetricAutoencoderKL(norm_num_groups=8, down_block_out_channels=(8,),
                             up_block_out_channels=(8,)), strategy="tile")  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"_NoLoop has no tile loop"):
        halotile.enable_tiling(_NoLoop())

    class Pipe:
        vae = tiled.build_tiled(KL)

    with pytest.raises(UnsupportedError, match=r"pass the pipeline's .vae"):
        halotile.parallelize(Pipe(), strategy="tile")


# --- A2: parallel, then plain, with and without an exception between


def test_a2_parallel_then_plain_on_the_same_object() -> None:
    name = "AutoencoderKLWan_2.1"
    vae, x = tiled.build_tiled(name), tiled.tiled_input(name, "decode")
    with torch.no_grad():
        expected = vae.decode(x).sample
        with halotile.parallelize(vae, strategy="tile"):
            assert torch.equal(vae.decode(x).sample, expected)
            with pytest.raises(RemoteRankError):
                vae.decode(x[:, :3])
        assert torch.equal(vae.decode(x).sample, expected)


# --- auto and serial


def _auto(group, tiling, deliver):
    # 10 x 14 latents of a rank are more than the window of 6 x 6
    size = {"height": 20, "width": 14} if tiling else {}
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode", **size)
    vae.use_tiling = tiling
    with torch.no_grad(), halotile.parallelize(vae, group, deliver=deliver, driver=1) as handle:
        out = vae.decode(x, return_dict=False)[0]
    assert vae.use_tiling == tiling
    return out, vae.decode(x, return_dict=False)[0], handle.report


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("deliver", ["all", "driver", "sharded"])
def test_auto_deals_tiles_when_tiling_is_on(tiling: bool, deliver: str) -> None:
    results = run_ranks(_auto, 2, tiling, deliver)
    for rank, (out, plain, report) in enumerate(results):
        assert report.strategy == ("tile" if tiling else "serial")
        assert "auto" in report.reason
        if deliver == "all":
            assert torch.equal(out, plain)
        elif deliver == "driver":
            assert out is None if rank == 0 else torch.equal(out, plain)
            assert tiling or report.loads == (0, 70)
    if deliver == "sharded":
        assert torch.equal(torch.cat([out for out, *_ in results], -2), results[0][1])


def _over_an_axis(_, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("transformer", "vae"))
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    with halotile.parallelize(vae, mesh[name], strategy="tile") as handle:
        out = vae.decode(x).sample
    return out, handle.report.ranks, [handle.ranks.global_rank(rank) for rank in range(2)]


@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_an_axis_of_a_device_mesh_decodes_by_itself(name: str) -> None:
    with torch.no_grad():
        expected = tiled.build_tiled(KL).decode(tiled.tiled_input(KL, "decode")).sample
    for rank, (out, size, members) in enumerate(run_world(_over_an_axis, name)):
        assert torch.equal(out, expected)
        assert size == 2
        assert members == ([rank % 2, rank % 2 + 2] if name == "transformer" else [rank // 2 * 2, rank // 2 * 2 + 1])


# --- enable_tiling


def _enabled(group):
    name = "AutoencoderKLLTX2Video"
    vae, plain = tiny.build(name), tiny.build(name)
    window = {"tile_sample_min_height": 192, "tile_sample_min_width": 192}
    stride = {"tile_sample_stride_height": 128, "tile_sample_stride_width": 128}
    x = tiled.tiled_input(name, "decode")
    assert halotile.enable_tiling(vae, process_group=group, **window, **stride) is not None
    halotile.enable_tiling(plain, **window, **stride)
    again = halotile.enable_tiling(vae, process_group=group, **window)
    with torch.no_grad():
        out, expected = vae.decode(x).sample, plain.decode(x).sample
    assert again.report.tiles == 6
    assert halotile.enable_tiling(vae) is None
    assert "decode" not in vars(vae)
    return out, expected


def test_enable_tiling_shares_the_tiles_of_a_pipeline_over_a_group() -> None:
    for out, expected in run_ranks(_enabled, 2):
        assert torch.equal(out, expected)


def test_enable_tiling_passes_only_what_the_class_takes() -> None:
    vae = tiny.build(KL)
    with pytest.raises(UnsupportedError, match=r"AutoencoderKL.enable_tiling does not take tile_sample_min_height"):
        halotile.enable_tiling(vae, tile_sample_min_height=256)
    assert not vae.use_tiling
    halotile.enable_tiling(vae)
    assert vae.use_tiling


# --- batches that the class's own slicing gets wrong


def _sliced(group, name, temb):
    vae = tiled.build_tiled(name)
    vae.enable_slicing()
    x = tiled.tiled_input(name, "decode", batch=2)
    own = {"temb": torch.tensor([0.05, 0.2])} if temb else {}
    single = [{"temb": own["temb"][i : i + 1]} if temb else {} for i in range(2)]
    torch.manual_seed(3)
    expected = torch.cat([vae.decode(x[i : i + 1], **single[i]).sample for i in range(2)])
    torch.manual_seed(3)
    return halotile.decode(vae, x, group, "tile", **own), expected


@pytest.mark.parametrize("temb", [False, True])
def test_slicing_with_temb_works_at_batch_2(temb: bool) -> None:
    name = "AutoencoderKLLTXVideo_0.9.7" if temb else "AutoencoderKLLTX2Video"
    for out, expected in run_ranks(_sliced, 2, name, temb):
        assert torch.equal(out, expected)


def test_the_report_is_plain_data() -> None:
    vae = tiled.build_tiled(KL)
    progress = []
    with halotile.parallelize(vae, strategy="tile", progress=lambda *seen: progress.append(seen)) as handle:
        assert handle.report is None
        vae.decode(tiled.tiled_input(KL, "decode"))
    report = handle.report.to_dict()
    assert report["strategy"] == "tile"
    assert report["loads"] == (sum(report["loads"]),)
    assert report["tiles"] == report["calls"] == 6
    assert report["messages"] == report["bytes_sent"] == 0
    assert progress == [(done, 6) for done in range(1, 7)]
    with pytest.raises(AttributeError):
        handle.report.tiles = 3


def test_the_input_may_be_given_by_name_and_the_signature_stays() -> None:
    vae, x = tiled.build_tiled(KL), tiled.tiled_input(KL, "decode")
    before = inspect.signature(vae.decode)
    with torch.no_grad(), halotile.parallelize(vae, strategy="tile") as handle:
        assert inspect.signature(vae.decode) == before
        assert torch.equal(vae.decode(z=x, return_dict=False)[0], vae.decode(x).sample)
        with pytest.raises(TypeError):
            vae.decode()
        assert handle.report is None

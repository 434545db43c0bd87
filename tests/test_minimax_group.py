"""MiniMax-H3 with a process group: `halotile.enable_tiling(vae, process_group=group, ...)`.

Its tiles are shared, and the result is that of the VAE's own tiled decode on one rank, to the bit.
"""

from __future__ import annotations

from functools import cache

import pytest
import tiny_vaes as tiny
import torch
import torch.distributed as dist
from ranks import run_ranks, run_world

import halotile
from halotile.errors import GradientError, MembershipError

KIND = "AutoencoderKLMiniMaxH3"
WINDOW = {
    "tile_sample_min_height": 96,
    "tile_sample_min_width": 96,
    "tile_sample_min_overlap_height": 32,
    "tile_sample_min_overlap_width": 32,
}
"""6 x 6 latents, of which neighbours share 2."""
LONG = 10
"""Latent frames for two of its clips, which overlap; 7 are one."""
SIZES = [
    # batch, latent frames, height, width; calls of the network
    ((1, 7, 10, 7), 4),
    ((2, 7, 10, 7), 4),
    ((1, LONG, 10, 7), 8),
    ((2, LONG, 10, 11), 12),
    # fewer tiles than ranks
    ((1, 7, 7, 6), 2),
    ((1, 7, 6, 6), 1),
]
DEFAULT = SIZES[0][0]


def _latents(batch, frames, height, width):
    return torch.randn(batch, 8, frames, height, width, generator=torch.Generator().manual_seed(5))


def _counted(network):
    """A list that grows with each call that the network works for; shapes are followed with fake tensors, too."""
    calls = []
    network.register_forward_hook(
        lambda module, args, out: calls.append(out.shape) if type(out) is torch.Tensor and not out.is_meta else None
    )
    return calls


@cache
def _one_rank(size=DEFAULT):
    """What the VAE itself gives, and how often it calls its network."""
    vae = tiny.build(KIND)
    vae.enable_tiling(**WINDOW)
    calls = _counted(vae.decoder)
    with torch.no_grad():
        return vae.decode(_latents(*size)).sample, len(calls)


@cache
def _built():
    """The one VAE of this process for whole calls, and the list of its network's calls."""
    vae = tiny.build(KIND)
    return vae, _counted(vae.decoder)


def _decoded(group, size=DEFAULT):
    vae, calls = _built()
    calls.clear()
    handle = halotile.enable_tiling(vae, process_group=group, **WINDOW)
    with torch.no_grad():
        out = vae.decode(_latents(*size)).sample
    handle.remove()
    return out, len(calls), handle.report


@pytest.mark.parametrize(("size", "calls"), SIZES)
@pytest.mark.parametrize("members", [(0, 1, 2, 3), (1, 2, 3), (2, 3)])
def test_exact_also_on_groups_without_rank_0_and_the_work_is_that_of_one_rank(size, calls, members):
    expected, work = _one_rank(size)
    results = run_ranks(_decoded, len(members), size, members=members)
    for out, _, report in results:
        assert torch.equal(out, expected)
        assert (report.strategy, report.exactness, report.ranks) == ("tile", "bitwise", len(members))
    done = [mine for _, mine, _ in results]
    assert sum(done) == work == calls
    # dealt evenly: no rank sits idle while another has two
    assert max(done) - min(done) <= 1


def test_two_of_its_clips_overlap():
    vae = tiny.build(KIND)
    assert vae.frame_overlap > 0
    assert vae.tokens_chunk_size + vae.token_overlap < LONG <= 2 * vae.tokens_chunk_size + vae.token_overlap


def _on_the_default_group(_):
    return _decoded(dist.group.WORLD)


def test_exact_on_world():
    expected, work = _one_rank()
    results = run_world(_on_the_default_group)
    assert all(torch.equal(out, expected) for out, _, _ in results)
    assert sum(calls for _, calls, _ in results) == work


def _autocast(group, dtype):
    vae = tiny.build(KIND)
    halotile.enable_tiling(vae, process_group=group, **WINDOW)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return vae.decode(_latents(*DEFAULT).to(dtype)).sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_bfloat16_autocast_the_bits_are_those_of_one_rank_in_the_dtype_of_the_input(dtype):
    expected = _autocast(None, dtype)
    # one rank's result is bfloat16 whatever it was given; halotile's has the dtype of the input, and the same values
    assert expected.dtype == torch.bfloat16
    for out in run_ranks(_autocast, 3, dtype, members=(1, 2, 3)):
        assert out.dtype == dtype
        assert torch.equal(out, expected.to(dtype))


# --- what is refused


def _outsider(_):
    """Ranks 2 and 3 are a group, to which 0 and 1 do not belong."""
    vae, pair = tiny.build(KIND), dist.new_group([2, 3])
    inside = dist.get_rank() in (2, 3)
    if inside:
        halotile.enable_tiling(vae, process_group=pair, **WINDOW)
    else:
        with pytest.raises(MembershipError, match=f"process {dist.get_rank()} of 4 is not a member"):
            halotile.enable_tiling(vae, process_group=pair, **WINDOW)
        assert not vae.use_tiling
    with torch.no_grad():
        # outside, the VAE is untouched and decodes for itself
        return inside, vae.decode(_latents(*DEFAULT)).sample


def test_a_process_outside_the_group_is_refused_and_its_vae_left_alone():
    tiled, _ = _one_rank()
    with torch.no_grad():
        untiled = tiny.build(KIND).decode(_latents(*DEFAULT)).sample
    for rank, (inside, out) in enumerate(run_world(_outsider, timeout=60)):
        assert inside == (rank > 1)
        assert torch.equal(out, tiled if inside else untiled)


def _with_gradients(group):
    vae, x = tiny.build(KIND), _latents(*DEFAULT)
    handle = halotile.enable_tiling(vae, process_group=group, **WINDOW)
    before = handle.ranks.counters.snapshot()
    with pytest.raises(GradientError):
        vae.decode(x.clone().requires_grad_())
    assert handle.ranks.counters.since(before).messages == 0
    return vae.decode(x).sample


def test_decoding_with_gradients_is_refused_without_traffic_and_the_next_call_works():
    expected, _ = _one_rank()
    for out in run_ranks(_with_gradients, 2):
        assert torch.equal(out, expected)
        assert not out.requires_grad


# --- what stays local


def _local(group):
    """Ranks do different things, which would hang or raise if anything of it were shared."""
    vae, rank = tiny.build(KIND), dist.get_rank(group)
    x = _latents(*DEFAULT) + rank
    with torch.no_grad():
        assert halotile.enable_tiling(vae, **WINDOW) is None
        alone = vae.decode(x).sample if rank == 0 else None
        pixels = torch.randn(1, 3, 22, 96, 96, generator=torch.Generator().manual_seed(rank))
        encoded = vae.encode(pixels).latent_dist.mode() if rank == 1 else None

        handle = halotile.enable_tiling(vae, process_group=group, **WINDOW)
        shared = vae.decode(_latents(*DEFAULT)).sample
        handle.remove()
        assert not {"decode", "encode"} & set(vars(vae))
        before = handle.ranks.counters.snapshot()
        again = vae.decode(x).sample if rank == 0 else None
        assert encoded is None or torch.equal(encoded, vae.encode(pixels).latent_dist.mode())
    since = handle.ranks.counters.since(before)
    return alone, again, shared, since.messages + since.collectives


def test_without_a_group_and_after_remove_decode_and_encode_are_local():
    expected, _ = _one_rank()
    for rank, (alone, again, shared, traffic) in enumerate(run_ranks(_local, 2)):
        assert torch.equal(shared, expected)
        assert traffic == 0
        if rank == 0:
            assert torch.equal(alone, expected)
            assert torch.equal(again, expected)

"""`stream` without a grid of tiles: a clip's frames leave in chunks, over ranks that all work on each."""

from __future__ import annotations

import pytest
import torch
from chunked import ROUNDING, build, clip, in_chunks, joined, whole
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensor

import halotile


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.1", "AutoencoderKLCogVideoX", "AutoencoderKLLTX2Video"])
def test_a_stream_without_tiling_comes_in_chunks(name):
    vae, x = build(name), clip(name)
    shown = []
    with halotile.stream(vae, x.clone(), progress=lambda done, total: shown.append((done, total))) as batches:
        parts = list(batches)
    alone = in_chunks(halotile.ChunkDecoder(vae, frames=x.shape[2]), x, 1)
    assert [part.shape[2] for part in parts] == [part.shape[2] for part in alone if part.shape[2]]
    assert torch.equal(joined(parts), whole(vae, x))
    assert shown[-1] == (x.shape[2], x.shape[2])
    assert batches.report.strategy == "serial"
    assert batches.decoder.report.first_frames_s < batches.decoder.report.seconds


def _streams(group, name):
    vae, x = build(name), clip(name)
    expected, rank = whole(vae, x), group.rank()
    gaps = []
    for driver in (1, 0):
        batches = halotile.stream(vae, x, group, driver=driver)
        parts = list(batches)
        gaps.append(float((joined(parts) - expected).abs().max()) if parts else None)
        assert (rank == driver) == bool(parts)
        assert batches.report.strategy in ("serial", "shard")
        # one that is left: the others are let go, and the group goes on
        with halotile.stream(vae, x, group, driver=driver) as batches:
            if rank == driver:
                next(batches)
    return gaps


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.1", "AutoencoderKLHunyuanVideo"])
def test_a_stream_in_chunks_on_ranks(name):
    (nothing, one), (two, nothing_too) = run_ranks(_streams, 2, name)
    assert nothing is nothing_too is None
    assert max(one, two) <= ROUNDING


def _disturbed(group):
    vae, x = build("AutoencoderKLWan_2.1"), clip("AutoencoderKLWan_2.1")
    if group.rank() == 1:
        with pytest.raises(halotile.RemoteRankError, match="still open after latent frame 1 of 4"):
            halotile.stream(vae, x, group)
    else:
        batches = halotile.stream(vae, x, group)
        next(batches)
        with pytest.raises(halotile.PlanError, match="still open after latent frame 1 of 4"):
            halotile.decode(vae, x, group)
        with pytest.raises(halotile.PlanError, match="another call of its group"):
            next(batches)
        batches.close()
    return sum(part.shape[2] for part in halotile.stream(vae, x, group))


def test_another_call_ends_a_stream_in_chunks():
    assert run_ranks(_disturbed, 2) == [13, 0]


def _fails_in_a_stream(group):
    vae, x = build("AutoencoderKLWan_2.1"), clip("AutoencoderKLWan_2.1")
    calls = []

    def fail(module, args):
        # what is only foreseen does not count
        calls.extend([module] * (not isinstance(args[0], FakeTensor)))
        if len(calls) > 2:
            raise OSError("no memory left")

    if group.rank() == 1:
        vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(halotile.RemoteRankError, match="no memory left"):
        list(halotile.stream(vae, x, group, driver=1))
    return len(calls)


def test_a_rank_that_fails_ends_the_stream_on_all():
    # a group of its own: it is lost if `auto` took shards
    assert run_ranks(_fails_in_a_stream, 2, members=(1, 3)) == [0, 3]

"""Job 1 for every kind: the VAE's own tile loop over ranks is bitwise equal to one rank's, with no call made twice."""

from __future__ import annotations

import pytest
import tiled
import torch
from ranks import run_ranks

import halotile
from halotile.errors import UnsupportedError


def _over_ranks(group, name: str, half: str, scheduler: str, batch: int = 1):
    # one VAE for all of a process's calls, so each follows another of fewer ranks or of another half
    vae, x = tiled.built_small(name), tiled.small_input(name, half, batch)
    with (
        torch.no_grad(),
        tiled.counted_calls(vae, half) as calls,
        halotile.parallelize(vae, group, strategy="tile", scheduler=scheduler) as handle,
    ):
        out = tiled.call(vae, name, half, x)
    return out, len(calls), handle.report, torch.rand(1)


@pytest.mark.parametrize(("name", "half"), tiled.CASES)
def test_every_kind_is_bitwise_equal_on_one_to_four_ranks(name: str, half: str) -> None:
    vae = tiled.built_small(name)
    expected_of, drawn_of = {}, {}
    # HunyuanVideo 1.5's own attention mask fails at batch 2
    largest = 1 if name == "AutoencoderKLHunyuanVideo15" else 2
    for batch in {1, largest}:
        with torch.no_grad(), tiled.counted_calls(vae, half) as serial_calls:
            expected_of[batch] = tiled.call(vae, name, half, tiled.small_input(name, half, batch))
        drawn_of[batch] = torch.rand(1)
    assert len(serial_calls) > 1
    # at batch 2 kernels return other memory layouts than at batch 1, which what follows rounds by
    for n, scheduler, batch in (
        (1, "balanced", 1),
        (2, "balanced", 1),
        (3, "round_robin", largest),
        (4, "balanced", largest),
    ):
        expected, drawn_next = expected_of[batch], drawn_of[batch]
        results = run_ranks(_over_ranks, n, name, half, scheduler, batch)
        for out, calls, report, drawn in results:
            assert torch.equal(out, expected), f"{n} ranks"
            assert torch.equal(drawn, drawn_next), "the generator stands elsewhere than after one rank's decode"
            assert report.ranks == n
            assert report.strategy == "tile"
            assert report.exactness == "bitwise"
            assert calls <= len(serial_calls)
        assert sum(calls for _, calls, _, _ in results) == len(serial_calls)
        assert results[0][2].calls == len(serial_calls)


@pytest.mark.parametrize("name", sorted(tiled.NO_TILED_ENCODE))
def test_a_loop_that_cannot_encode_is_refused_with_its_reason(name: str) -> None:
    vae = tiled.build_tiled(name)
    with halotile.parallelize(vae, strategy="tile"), pytest.raises(UnsupportedError, match="its own tiled_encode"):
        vae.encode(tiled.tiled_input(name, "encode"))


def test_each_rank_sends_what_it_made_once_to_each_other_rank() -> None:
    for n in (1, 2, 3, 4):
        reports = [report for _, _, report, _ in run_ranks(_over_ranks, n, "AutoencoderKL", "decode", "balanced")]
        for rank, report in enumerate(reports):
            made_bytes = report.loads[rank] * 8 * 8 * 3 * 4  # latents -> pixels -> channels -> float32
            assert report.bytes_sent == made_bytes * (n - 1)
            assert report.messages == (n - 1 if made_bytes else 0)

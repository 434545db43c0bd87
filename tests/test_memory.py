"""`decode/memory.py`: the peak of live activation bytes, against sums made by hand."""

from __future__ import annotations

import gc

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks
from torch import nn

import halotile
from halotile.comm import Ranks
from halotile.decode.memory import Meter
from halotile.spatial import SpatialTensor

KILO = 1000
"""Values of a test tensor: 4000 bytes in float32."""


def peak_of(work) -> int | None:
    meter = Meter(torch.device("cpu"))
    with torch.no_grad(), meter:
        work()
    return meter.peak_bytes


def _chain(x):
    a = x + 1
    b = a + 1
    del a
    c = b + 1
    del b
    return c


def _kept(x):
    return [x + 1, x + 2, x + 3]


def _views(x):
    y = x + 1
    return y.view(10, -1)[1:], y.view(-1).detach(), y.reshape(-1)


def _in_place(x):
    return (x + 1).mul_(2).add_(1)


def _view_outlives(x):
    part = (x + 1)[:1]
    return part, x + 2


def _split(x):
    return torch.split(x + 1, 100), torch.topk(x, 10)


def _copies(x):
    y = x.view(10, 100).t()
    return y.contiguous(), x.to(torch.float64), x.to(torch.float32)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (_chain, 2 * 4 * KILO),
        (_kept, 3 * 4 * KILO),
        (_views, 4 * KILO),
        (_in_place, 4 * KILO),
        (_view_outlives, 2 * 4 * KILO),
        # both outputs of topk: 10 values of 4 bytes, 10 indices of 8
        (_split, 4 * KILO + 10 * (4 + 8)),
        (_copies, 4 * KILO + 8 * KILO),
        (lambda x: torch.zeros(KILO, dtype=torch.bfloat16), 2 * KILO),
        (lambda x: None, 0),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_peaks_by_hand(work, expected: int, inference: bool) -> None:
    x = torch.ones(KILO)
    with torch.inference_mode(inference):
        assert peak_of(lambda: work(x)) == expected


def test_weights_and_what_was_there_before_do_not_count() -> None:
    layer = nn.Linear(100, 50)
    x, earlier = torch.ones(10, 100), [torch.ones(KILO)]

    def work():
        weight = layer.weight.t()
        out = x @ weight
        earlier.clear()
        return out

    assert peak_of(work) == 10 * 50 * 4


def test_what_dies_when_all_is_over_is_not_subtracted_twice() -> None:
    meter = Meter(torch.device("cpu"))
    x = torch.ones(KILO)
    with meter:
        kept = x + 1
    with meter:
        del kept
        gc.collect()
        again = x + 1
        more = x + 2
    assert meter.peak_bytes == 2 * 4 * KILO
    del again, more


class _TwoLayers(nn.Module):
    """Padded convolution, activation, convolution: the peak is two activations of 4 channels and nothing else."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 1)
        self.second = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.second(torch.sigmoid(self.first(x)))


def _sharded(group, rows):
    torch.manual_seed(0)
    with halotile.parallelize(_Model(), group, "shard", "sharded", halves=("decode",)) as handle:
        handle.vae.decode(torch.ones(1, 1, rows, 10))
    return handle.report


class _Model:
    def __init__(self):
        self.net = _TwoLayers()

    def decode(self, x):
        return self.net(x)


def test_a_shard_holds_its_rows_and_no_more() -> None:
    rows, cell = 30, 10 * 4
    with halotile.parallelize(_Model(), strategy="serial", halves=("decode",)) as handle:
        handle.vae.decode(torch.ones(1, 1, rows, 10))
    # two activations of four channels
    assert handle.report.peak_activation_bytes == 2 * 4 * rows * cell
    for report in run_ranks(_sharded, 3, rows):
        # and the rows of the input, a copy of their own
        assert report.peak_activation_bytes == (2 * 4 + 1) * rows // 3 * cell


def test_the_rows_of_a_sharded_tensor_count_and_the_wrapper_does_not() -> None:
    x = SpatialTensor.shard(torch.ones(KILO, 2), Ranks.alone(), dim=0)
    assert peak_of(lambda: x + 1) == 2 * 4 * KILO


def test_every_strategy_that_promises_it_reports_a_peak() -> None:
    vae, z = tiny.build("AutoencoderKL"), tiny.latent("AutoencoderKL")
    peaks = {}
    for strategy in ("serial", "shard"):
        with halotile.parallelize(vae, Ranks.alone(), strategy=strategy) as handle:
            vae.decode(z)
        peaks[strategy] = handle.report.peak_activation_bytes
    # at least the widest activation: 16 channels at full size
    assert all(peak >= 16 * 88 * 40 * 4 for peak in peaks.values())


def _peak_of_a_kind(group, kind, deliver):
    vae, z = tiny.build(kind), torch.cat([tiny.latent(kind)] * 2, -2)
    with halotile.parallelize(vae, group, "shard", deliver, halves=("decode",)) as handle:
        vae.decode(z)
    return handle.report.peak_activation_bytes


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLLTX2Video"])
def test_the_peak_falls_with_the_ranks(kind: str) -> None:
    """Of real kinds, so small that halos and rests are a tenth of a band; `bench/shard_memory.py` has larger ones."""
    one = _peak_of_a_kind(Ranks.alone(), kind, "sharded")
    for ranks in (2, 4):
        peaks = run_ranks(_peak_of_a_kind, ranks, kind, "sharded")
        assert max(peaks) <= 1.15 * one / ranks, (one, peaks)

"""Products of sharded matrices, against one rank: linear layers, attention that is written out, linear attention."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from one_rank import MODES, Cut, agreed, filled, on_each_rank, on_virtual, one_rank
from ranks import run_ranks

from halotile.comm import Ranks

# sums of up to 20 products of size 1, in another order
ROUNDING = {"rtol": 3e-6, "atol": 5e-6}
# one rounding to bfloat16 may fall to the other side
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-5}

LOCAL, SUMMED, KEYS = (True, 0, 0), (False, 1, 0), (True, 0, 1)
"""(is the result sharded, collectives, gathers of keys or values)"""


def check(n, work, tensors, cuts, expected, mode=torch.no_grad, close=ROUNDING):
    outcome = on_virtual(n, work, tensors, cuts, mode)
    for result, truth in zip(outcome.results, one_rank(work, tensors, mode), strict=True):
        assert result.dtype == truth.dtype
        torch.testing.assert_close(result, truth, **close)
    sharded, collectives, gathers = expected
    assert outcome.sharded == [sharded] * len(outcome.sharded)
    assert (outcome.gathers, outcome.attention_gathers) == ({}, gathers)
    assert outcome.collectives == collectives * (n > 1)
    if not gathers:
        assert all(traffic.messages == 0 for traffic in outcome.traffic)


# cuts of the left operand (.., rows, contracted) and of the right one (.., contracted, columns)
PLACES = [
    (Cut(-2), None, LOCAL),
    (None, Cut(-1), LOCAL),
    (Cut(-1), Cut(-2), SUMMED),
    (Cut(-1), None, SUMMED),
    (None, Cut(-2), SUMMED),
    (Cut(-2), Cut(-1), KEYS),
    (Cut(-2), Cut(-2), KEYS),
    (Cut(-1), Cut(-1), KEYS),
]
BATCHES = [(Cut(0), None, LOCAL), (None, Cut(0), LOCAL), (Cut(0), Cut(0), LOCAL)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [7, 3, 1])
@pytest.mark.parametrize(("left", "right", "expected"), PLACES)
def test_mm_addmm_bmm_baddbmm(left, right, expected, rows, mode):
    n = 3 if rows == 7 else 4
    a, b = filled(rows, rows, seed=1), filled(rows, rows, seed=2)
    check(n, torch.mm, [a, b], [left, right], expected, mode)
    for bias in (filled(rows, seed=3), filled(rows, rows, seed=3), filled(rows, 1, seed=3), filled(1, seed=3)):
        check(n, partial(torch.addmm, bias, beta=0.5, alpha=2), [a, b], [left, right], expected, mode)
    a, b = filled(2, rows, rows, seed=1), filled(2, rows, rows, seed=2)
    check(n, torch.bmm, [a, b], [left, right], expected, mode)
    for bias in (filled(2, rows, rows, seed=3), filled(rows, rows, seed=3), filled(2, 1, rows, seed=3)):
        check(n, partial(torch.baddbmm, bias, beta=0.5, alpha=2), [a, b], [left, right], expected, mode)
    nothing = torch.full((2, rows, rows), float("nan"))
    check(n, partial(torch.baddbmm, nothing, beta=0), [a, b], [left, right], expected, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("left", "right", "expected"), BATCHES)
def test_a_sharded_batch_is_local(left, right, expected, mode):
    for batch in (7, 1):
        a, b = filled(batch, 4, 5, seed=1), filled(batch, 5, 6, seed=2)
        check(3, torch.bmm, [a, b], [left, right], expected, mode)
        check(3, partial(torch.baddbmm, filled(batch, 4, 6)), [a, b], [left, right], expected, mode)
        check(3, partial(torch.baddbmm, filled(4, 6)), [a, b], [left, right], expected, mode)
        check(3, torch.matmul, [a, b], [left, right], expected, mode)
    frames = [None if cut is None else Cut(0, blocks=2) for cut in (left, right)]
    check(3, torch.bmm, [filled(14, 4, 5, seed=1), filled(14, 5, 6, seed=2)], frames, expected, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("left", "right", "expected"), PLACES)
def test_blocks_extents_and_bfloat16(left, right, expected, mode):
    def recut(cut, **how):
        return None if cut is None else Cut(cut.dim, **how)

    a, b = filled(2, 12, 12, seed=1), filled(2, 12, 12, seed=2)
    cuts = [recut(left, blocks=2), recut(right, blocks=2)]
    check(4, torch.bmm, [a, b], cuts, expected, mode)
    check(4, torch.bmm, [a.bfloat16(), b.bfloat16()], cuts, expected, mode, BFLOAT16)
    check(3, torch.bmm, [a, b], [recut(left, sizes=(0, 11, 1)), recut(right, sizes=(0, 11, 1))], expected, mode)
    outcome = on_virtual(2, torch.bmm, [a, b], [recut(left, sizes=(2, 10)), recut(right)], mode)
    torch.testing.assert_close(outcome.results[0], torch.bmm(a, b), **ROUNDING)
    assert outcome.gathers == {}


def test_a_sum_over_ranks_in_bfloat16_is_rounded_once():
    a, b = filled(1, 8, 256, seed=1).bfloat16(), filled(1, 256, 8, seed=2).bfloat16()
    outcome = on_virtual(4, torch.bmm, [a, b], [Cut(2), Cut(1)])
    assert torch.equal(outcome.results[0], torch.bmm(a.double(), b.double()).bfloat16())


@pytest.mark.parametrize("mode", MODES)
def test_matmul_broadcasts(mode):
    a, b = filled(2, 3, 7, 5, seed=1), filled(5, 6, seed=2)
    check(3, torch.matmul, [a, b], [Cut(2), None], LOCAL, mode)
    check(3, torch.matmul, [a, b], [Cut(1), None], LOCAL, mode)
    check(3, torch.matmul, [a, b], [Cut(0), None], LOCAL, mode)
    check(3, torch.matmul, [filled(4, 5), filled(2, 3, 5, 7)], [None, Cut(3)], LOCAL, mode)
    check(3, torch.matmul, [filled(2, 3, 7, 5), filled(2, 3, 5, 6)], [Cut(2), None], LOCAL, mode)
    check(3, torch.matmul, [filled(2, 3, 7, 5), filled(2, 3, 5, 7)], [Cut(2), Cut(3)], KEYS, mode)
    check(3, torch.matmul, [filled(2, 3, 5, 7), filled(2, 3, 7, 4)], [Cut(3), Cut(2)], SUMMED, mode)
    check(3, torch.matmul, [a, filled(5)], [Cut(2), None], LOCAL, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [7, 1])
def test_linear(rows, mode):
    weight, bias = filled(6, 5, seed=1), filled(6, seed=2)
    for x, cut in ((filled(2, rows, 4, 5), Cut(1)), (filled(rows, 5), Cut(0)), (filled(3, 7, 5), Cut(1))):
        check(4, lambda x: F.linear(x, weight, bias), [x], [cut], LOCAL, mode)
        check(4, lambda x: F.linear(x, weight), [x], [cut], LOCAL, mode)
    check(3, lambda x: F.linear(x, weight, bias), [filled(2, 4, 5)], [Cut(2)], SUMMED, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [7, 1])
def test_vectors(rows, mode):
    a, v, w = filled(rows, 5, seed=1), filled(5, seed=2), filled(rows, seed=3)
    check(3, torch.mv, [a, v], [Cut(0), None], LOCAL, mode)
    check(3, torch.mv, [a.t(), w], [Cut(1), None], SUMMED, mode)
    check(3, torch.mv, [a.t(), w], [Cut(1), Cut(0)], SUMMED, mode)
    check(3, partial(torch.addmv, w, beta=0.5), [a, v], [Cut(0), None], LOCAL, mode)
    check(3, partial(torch.addmv, v), [a.t(), w], [Cut(1), None], SUMMED, mode)
    check(3, torch.dot, [w, w + 1], [Cut(0), None], SUMMED, mode)
    check(3, torch.dot, [w, w + 1], [Cut(0), Cut(0)], SUMMED, mode)
    check(3, partial(torch.addbmm, filled(rows, 6)), [filled(2, rows, 5), filled(2, 5, 6)], [Cut(1), None], LOCAL, mode)
    check(3, partial(torch.addbmm, filled(4, 6)), [filled(7, 4, 5), filled(7, 5, 6)], [Cut(0), Cut(0)], SUMMED, mode)


def written_out(q, k, v):
    """Attention as older models write it, tokens before channels."""
    scores = torch.baddbmm(torch.empty(q.shape[0], q.shape[1], k.shape[1]), q, k.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v)


def channels_first(q, k, v):
    """The same with channels before tokens: the latent diffusion autoencoder's."""
    weights = torch.bmm(q.transpose(1, 2), k).mul(0.3).softmax(2)
    return torch.bmm(v, weights.transpose(1, 2))


def linear_attention(q, k, v):
    """Keys times values first: what crosses ranks is features squared."""
    return torch.matmul(q, torch.matmul(k.transpose(-1, -2).softmax(-1), v))


def einsum_attention(q, k, v):
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokens", "n"), [(14, 3), (3, 4), (1, 2), (14, 1)])
def test_attention_that_is_written_out(tokens, n, mode):
    qkv = [filled(2, tokens, 8, seed=seed) for seed in range(3)]
    turned = [t.transpose(1, 2) for t in qkv]
    check(n, written_out, qkv, [Cut(1)] * 3, (True, 0, 2), mode)
    check(n, channels_first, turned, [Cut(2)] * 3, (True, 0, 2), mode)
    if tokens > 1:
        # over one token, einsum multiplies elements and has no product
        check(n, einsum_attention, qkv, [Cut(1)] * 3, (True, 0, 2), mode)
    # the softmax over the tokens, and the products
    check(n, linear_attention, qkv, [Cut(1)] * 3, (True, 2, 0), mode)


def test_rows_against_another_batch_are_gathered_and_counted():
    a, b = filled(4, 6, 5, seed=1), filled(4, 5, 6, seed=2)
    outcome = on_virtual(2, torch.bmm, [a, b], [Cut(1), Cut(0)], strict=False)
    torch.testing.assert_close(outcome.results[0], torch.bmm(a, b), **ROUNDING)
    assert outcome.gathers == {"aten.bmm.default": 1}


def _products(q, k, v):
    gram = torch.baddbmm(filled(8, 8), k.transpose(1, 2), v)
    return written_out(q, k, v), linear_attention(q, k, v), F.linear(q, filled(6, 8), filled(6)), gram


def _on_group(group, tokens, mode):
    qkv = [filled(2, tokens, 8, seed=seed) for seed in range(3)]
    return on_each_rank(Ranks.of(group), _products, qkv, [Cut(1)] * 3, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 4])
def test_on_processes(n, mode):
    for tokens in (3, 14):
        outcome = agreed(run_ranks(_on_group, n, tokens, mode))
        qkv = [filled(2, tokens, 8, seed=seed) for seed in range(3)]
        for result, expected in zip(outcome.results, one_rank(_products, qkv), strict=True):
            torch.testing.assert_close(result, expected, **ROUNDING)
        assert (outcome.gathers, outcome.attention_gathers) == ({}, 2)

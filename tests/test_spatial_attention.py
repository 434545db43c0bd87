"""Fused attention of sharded tokens, against one rank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from one_rank import MODES, Cut, agreed, filled, on_each_rank, on_virtual, one_rank
from ranks import run_ranks

from halotile.comm import Ranks

aten = torch.ops.aten
# the kernel takes keys in blocks that depend on the number of queries: a few roundings of float32
ROUNDING = {"rtol": 2e-6, "atol": 2e-6}
# and of weights that are rounded to bfloat16
BFLOAT16 = {"rtol": 2**-6, "atol": 2**-7}

ON_ROWS, ON_BATCH = Cut(2), Cut(0)


def qkv(batch=2, heads=2, tokens=14, features=8, keys=None, value_features=None):
    keys = keys or tokens
    return [
        filled(batch, heads, tokens, features, seed=1),
        filled(batch, heads, keys, features, seed=2),
        filled(batch, heads, keys, value_features or features, seed=3),
    ]


def check(n, work, tensors, cuts, gathers, mode=torch.no_grad, close=ROUNDING, sharded=True):
    outcome = on_virtual(n, work, tensors, cuts, mode)
    for result, expected in zip(outcome.results, one_rank(work, tensors, mode), strict=True):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, **close)
    assert outcome.sharded[0] is sharded
    assert (outcome.gathers, outcome.attention_gathers) == ({}, gathers)
    assert outcome.collectives == 0
    return outcome


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [14, 3, 1])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_keys_and_values_travel_in_one_message(n, tokens, mode):
    outcome = check(n, F.scaled_dot_product_attention, qkv(tokens=tokens), [ON_ROWS] * 3, 1, mode)
    holders = min(n, tokens)
    assert [traffic.messages for traffic in outcome.traffic] == [(n - 1) * (rank < holders) for rank in range(n)]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_several_frames(mode):
    for sizes in (None, (1, 0, 4)):
        cut = Cut(2, blocks=3, sizes=sizes)
        tokens = 15
        check(3, F.scaled_dot_product_attention, qkv(tokens=tokens), [cut] * 3, 1, mode)
        mask = filled(tokens, tokens)
        check(3, partial(F.scaled_dot_product_attention, attn_mask=mask), qkv(tokens=tokens), [cut] * 3, 1, mode)
        check(3, partial(F.scaled_dot_product_attention, is_causal=True), qkv(tokens=tokens), [cut] * 3, 1, mode)


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_local(mode):
    for batch, cut in ((5, Cut(0)), (2, Cut(0)), (6, Cut(0, blocks=2))):
        check(3, F.scaled_dot_product_attention, qkv(batch), [cut] * 3, 0, mode)
        check(3, F.scaled_dot_product_attention, qkv(batch), [cut, None, cut], 0, mode)
        check(3, F.scaled_dot_product_attention, qkv(batch), [None, cut, None], 0, mode)
        for mask in (filled(batch, 1, 14, 14), filled(14, 14), filled(1, 2, 14, 14)):
            check(3, partial(F.scaled_dot_product_attention, attn_mask=mask), qkv(batch), [cut] * 3, 0, mode)
        check(3, partial(F.scaled_dot_product_attention, is_causal=True), qkv(batch), [cut] * 3, 0, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokens", "n"), [(14, 3), (3, 4)])
@pytest.mark.parametrize("shape", ["{0} {0}", "1 {0}", "2 1 {0} {0}", "1 2 1 {0}", "2 2 {0} {0}"])
def test_masks_and_biases_are_cut_by_query_rows(shape, tokens, n, mode):
    mask = filled(*(int(size.format(tokens)) for size in shape.split()), seed=4)
    seen = mask > -1
    # a row that sees nothing is NaN on any number of ranks
    seen[..., 0] = True
    for bias in (mask, seen):
        work = partial(F.scaled_dot_product_attention, attn_mask=bias)
        check(n, work, qkv(tokens=tokens), [ON_ROWS] * 3, 1, mode)


def with_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("mode", MODES)
def test_sharded_masks(mode):
    tensors = [*qkv(), filled(14, 14, seed=4)]
    check(3, with_mask, tensors, [ON_ROWS] * 3 + [Cut(0)], 1, mode)
    check(3, with_mask, tensors, [ON_ROWS] * 3 + [Cut(0, sizes=(1, 9, 4))], 1, mode)
    outcome = on_virtual(3, with_mask, tensors, [ON_ROWS] * 3 + [Cut(1)], mode, strict=False)
    torch.testing.assert_close(outcome.results[0], with_mask(*tensors), **ROUNDING)
    assert sum(outcome.gathers.values()) == outcome.attention_gathers == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [14, 3, 1])
def test_causal(tokens, mode):
    work = partial(F.scaled_dot_product_attention, is_causal=True)
    check(4, work, qkv(tokens=tokens), [ON_ROWS] * 3, 1, mode)
    check(3, work, qkv(tokens=tokens, keys=5), [ON_ROWS, None, None], 0, mode)


@pytest.mark.parametrize("mode", MODES)
def test_some_of_them_sharded(mode):
    work = F.scaled_dot_product_attention
    check(3, work, qkv(keys=9), [ON_ROWS, ON_ROWS, ON_ROWS], 1, mode)
    check(3, work, qkv(keys=9), [ON_ROWS, None, None], 0, mode)
    check(3, work, qkv(keys=9), [None, ON_ROWS, ON_ROWS], 1, mode, sharded=False)
    check(3, work, qkv(), [ON_ROWS, None, ON_ROWS], 1, mode)
    # not sharded alike: not in one message
    check(3, work, qkv(), [ON_ROWS, ON_ROWS, Cut(2, sizes=(1, 2, 11))], 2, mode)
    check(3, work, qkv(), [ON_ROWS, ON_BATCH, ON_BATCH], 1, mode)
    check(3, partial(work, is_causal=True), qkv(), [None, ON_ROWS, ON_ROWS], 1, mode, sharded=False)
    check(3, with_mask, [*qkv(), filled(14, 14)], [None, ON_ROWS, ON_ROWS, None], 1, mode, sharded=False)


@pytest.mark.parametrize("mode", MODES)
def test_dtypes_layouts_and_scale(mode):
    tensors = [t.bfloat16() for t in qkv(tokens=33)]
    check(3, partial(F.scaled_dot_product_attention, scale=0.2), tensors, [ON_ROWS] * 3, 1, mode, BFLOAT16)
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(tokens=33)]
    check(3, partial(F.scaled_dot_product_attention, scale=0.2), tensors, [ON_ROWS] * 3, 1, mode)


def test_features_that_are_sharded_are_gathered_and_counted():
    outcome = on_virtual(2, F.scaled_dot_product_attention, qkv(), [Cut(3)] * 3, strict=False)
    torch.testing.assert_close(outcome.results[0], F.scaled_dot_product_attention(*qkv()), rtol=0, atol=0)
    assert sum(outcome.gathers.values()) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [14, 3])
def test_the_kernel_without_fusion(tokens, mode):
    """`_scaled_dot_product_attention_math`: three dims, or values with other features than the keys."""
    for tensors, cut in ((qkv(tokens=tokens, value_features=5), Cut(2)), ([t[0] for t in qkv(tokens=tokens)], Cut(1))):
        works = [F.scaled_dot_product_attention, partial(F.scaled_dot_product_attention, is_causal=True)]
        works += [partial(F.scaled_dot_product_attention, attn_mask=filled(tokens, tokens, seed=4))]
        for work in works:
            # without inference_mode its parts arrive, of which the keys' and the values' products gather by themselves
            check(4, work, tensors, [cut] * 3, 1 if mode is torch.inference_mode else 2, mode)
    grouped = [filled(2, 4, tokens, 8), *qkv(tokens=tokens)[1:]]
    work = partial(F.scaled_dot_product_attention, enable_gqa=True)
    torch.testing.assert_close(on_virtual(3, work, grouped, [ON_ROWS] * 3, mode).results[0], work(*grouped), **ROUNDING)


def test_what_a_kernel_returns_besides_is_of_this_ranks_queries():
    with torch.no_grad():
        whole = aten._scaled_dot_product_flash_attention_for_cpu(*qkv())[1]

    def lse(q, k, v):
        mine = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1]
        torch.testing.assert_close(mine, q.spec.take(whole, 2, q.ranks.rank), **ROUNDING)
        return q

    on_virtual(3, lse, qkv(), [ON_ROWS] * 3)


def _attentions(q, k, v):
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = filled(q.shape[2], q.shape[2], seed=4)
    return F.scaled_dot_product_attention(q, k, v), causal, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _on_group(group, tokens, mode):
    return on_each_rank(Ranks.of(group), _attentions, qkv(tokens=tokens), [ON_ROWS] * 3, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 4])
def test_on_processes(n, mode):
    for tokens in (3, 14):
        outcome = agreed(run_ranks(_on_group, n, tokens, mode))
        for result, expected in zip(outcome.results, one_rank(_attentions, qkv(tokens=tokens)), strict=True):
            torch.testing.assert_close(result, expected, **ROUNDING)
        assert (outcome.gathers, outcome.attention_gathers) == ({}, 3)

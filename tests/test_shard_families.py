"""Every kind of tiny autoencoder with its activations cut into rows, decode and encode, against one rank."""

from functools import cache

import pytest
import sharded
import tiny_vaes as tiny
import torch
from ranks import run_ranks
from sharded import TOLERANCE, make_input, relative_error

import halotile

KINDS = list(tiny.CONFIGS)
ATTEND = {
    # operations on keys and values of all rows, for a decode and for an encode; the rest have none
    "AutoencoderKL": (1, 1),
    "AutoencoderKL_flux1": (1, 1),
    "AutoencoderKLFlux2": (1, 1),
    "AutoencoderKLWan_2.1": (3, 3),
    "AutoencoderKLWan_2.2": (3, 3),
    "AutoencoderKLQwenImage": (1, 1),
    "AutoencoderKLHunyuanVideo": (1, 1),
    "AutoencoderKLHunyuanVideo15": (2, 2),
    "AutoencoderKLHunyuanImage": (2, 2),
    "AutoencoderKLMiniMaxH3": (2, 0),
}


@cache
def alone(name, half, **sizes):
    return sharded.alone(name, half, **sizes)


# their attention reaches the rules as two products, and under inference mode as one operation
TWO_PRODUCTS = {"AutoencoderKLHunyuanVideo15", "AutoencoderKLHunyuanImage"}
WAYS = {
    1: {},
    # a group without rank 0, too, in the other mode, and where a gather would be an error
    2: {"members": (2, 3), "inference": True, "strict": True},
    3: {},
    4: {},
}


@pytest.mark.parametrize("n", WAYS)
@pytest.mark.parametrize(("name", "half"), sharded.cases(KINDS))
def test_every_kind_equals_one_rank_and_gathers_nothing_but_keys_and_values(name, half, n):
    expected = alone(name, half)
    attend = ATTEND.get(name, (0, 0))[half == "encode"]
    if name in TWO_PRODUCTS and "inference" in WAYS[n]:
        attend //= 2
    results = sharded.run(name, half, n, **WAYS[n])
    for out, report in results:
        assert out.dtype == expected.dtype
        assert relative_error(out, expected) <= TOLERANCE
        assert torch.equal(out, results[0][0]), "the ranks have different results"
        assert report.gathers == {}
        assert report.attention_gathers == attend
        assert report.strategy == "shard"


# no reduction of these crosses rows, and at 16 x 8 latents one rank takes one kernel for the whole of each layer
BITWISE = [
    "AutoencoderKLWan_2.1",
    "AutoencoderKLWan_2.2",
    "AutoencoderKLQwenImage",
    "AutoencoderKLLTXVideo_0.9.0",
    "AutoencoderKLLTXVideo_0.9.1",
    "AutoencoderKLLTXVideo_0.9.7",
    "AutoencoderKLLTX2Video",
    "AutoencoderTiny",
    "AutoencoderKLHunyuanVideo15",
]


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("n", [2, 4])
def test_kinds_whose_reductions_do_not_cross_rows_give_the_same_bits(name, n):
    expected = alone(name, "decode", height=16, width=8)
    for out, _ in sharded.run(name, "decode", n, height=16, width=8):
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "half", "height"),
    [
        (name, half, height)
        for name in ("AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLLTX2Video", "AutoencoderDC")
        for half in ("decode", "encode")
        for height in (1, 2, 3, 5)
        # its reflect padding needs two rows, on one rank, too
        if (name, half, height) != ("AutoencoderKLLTX2Video", "decode", 1)
    ],
)
def test_fewer_rows_than_ranks_and_bands_thinner_than_a_kernel(name, half, height):
    expected = alone(name, half, height=height)
    for out, report in sharded.run(name, half, 4, height=height):
        assert relative_error(out, expected) <= TOLERANCE
        assert report.gathers == {}


@pytest.mark.parametrize(
    "name", ["AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLLTX2Video", "AutoencoderKLCogVideoX"]
)
@pytest.mark.parametrize("half", ["decode", "encode"])
def test_batch_of_two(name, half):
    expected = alone(name, half, batch=2)
    for out, report in sharded.run(name, half, 3, batch=2):
        assert relative_error(out, expected) <= TOLERANCE
        assert report.gathers == {}


def _in_bfloat16(group, name):
    vae, x = sharded.build(name).bfloat16(), make_input(name, "decode", height=12, width=8)
    with torch.no_grad(), halotile.parallelize(vae, group, strategy="shard", halves=("decode",)):
        return sharded.call(vae, name, "decode", x.bfloat16())


@pytest.mark.parametrize(
    "name", ["AutoencoderKL", "AutoencoderKLWan_2.1", "AutoencoderKLLTX2Video", "AutoencoderKLHunyuanVideo"]
)
def test_bfloat16_is_as_near_to_the_truth_as_one_rank(name):
    truth = alone(name, "decode", height=12, width=8)
    with torch.no_grad():
        plain = sharded.call(
            sharded.build(name).bfloat16(), name, "decode", make_input(name, "decode", height=12, width=8).bfloat16()
        )
    of_one = (plain.float() - truth).square().mean().sqrt()
    for out in run_ranks(_in_bfloat16, 3, name):
        assert out.dtype == torch.bfloat16
        assert (out.float() - truth).square().mean().sqrt() <= 1.2 * of_one


# --- what the rules are for


def _without(group, name, operation):
    from halotile.spatial.registry import RULES

    operation = getattr(torch.ops.aten, operation).default
    vae, x = sharded.built(name), make_input(name, "decode")
    rule = RULES.pop(operation)
    try:
        with torch.no_grad(), halotile.parallelize(vae, group, strategy="shard", halves=("decode",)) as handle:
            out = sharded.call(vae, name, "decode", x)
        with pytest.raises(halotile.UnsupportedError, match="strict=True"), torch.no_grad():
            halotile.decode(vae, x, group, strategy="shard", strict=True)
        return out, handle.report.gathers
    finally:
        RULES[operation] = rule


@pytest.mark.parametrize("operation", ["convolution", "native_group_norm", "view", "cat"])
def test_without_a_rule_the_result_is_right_and_the_gather_is_counted(operation):
    for out, gathers in run_ranks(_without, 2, "AutoencoderKLCogVideoX", operation):
        assert relative_error(out, alone("AutoencoderKLCogVideoX", "decode")) <= TOLERANCE
        assert gathers[f"aten.{operation}.default"] >= 1


def _without_halos(group, name):
    from halotile.spatial.rules.convolution import _Window

    vae, x, existing = sharded.build(name), make_input(name, "decode"), _Window._existing
    _Window._existing = lambda window: list(window.base.spec.extents.intervals)
    try:
        with torch.no_grad():
            return halotile.decode(vae, x, group, strategy="shard")
    finally:
        _Window._existing = existing


def test_these_tests_see_a_convolution_without_its_halo():
    for out in run_ranks(_without_halos, 2, "AutoencoderTiny"):
        assert relative_error(out, alone("AutoencoderTiny", "decode")) > 100 * TOLERANCE

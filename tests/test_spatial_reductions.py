"""Reductions, softmax and scans of sharded tensors, against one rank."""

from functools import partial
from math import inf, nan

import pytest
import torch
from one_rank import MODES, Cut, agreed, filled, on_each_rank, on_virtual, one_rank
from ranks import run_ranks

from halotile.comm import Ranks

# sums of up to 200 numbers of size 1 in another order
ROUNDING = {"rtol": 3e-6, "atol": 3e-6}
# one rounding to bfloat16 may fall to the other side
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-8}
ORDERS = (2, 1, 3.5, 0, inf, -inf, -2)

REDUCTIONS = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k),
    "sum in float64": lambda x, d, k: x.sum(d, keepdim=k, dtype=torch.float64),
    "nansum": lambda x, d, k: x.nansum(d, keepdim=k),
    "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "amax": lambda x, d, k: x.amax(d, keepdim=k),
    "amin": lambda x, d, k: x.amin(d, keepdim=k),
    "any": lambda x, d, k: (x > 1.5).any(d, keepdim=k),
    "all": lambda x, d, k: (x < 1.5).all(d, keepdim=k),
    "std": lambda x, d, k: x.std(d, keepdim=k),
    "var": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    "var_mean": lambda x, d, k: torch.var_mean(x, d, keepdim=k),
    "std_mean": lambda x, d, k: torch.std_mean(x, d, correction=1.5, keepdim=k),
    "logsumexp": lambda x, d, k: x.logsumexp(d, keepdim=k),
    **{f"norm {p}": partial(lambda x, d, k, p: torch.linalg.vector_norm(x, p, d, k), p=p) for p in ORDERS},
}
OF_ONE_DIM = {
    "max": lambda x, d, k: x.max(d, keepdim=k),
    "min": lambda x, d, k: x.min(d, keepdim=k),
    "argmax": lambda x, d, k: x.argmax(d, keepdim=k),
    "argmin": lambda x, d, k: x.argmin(d, keepdim=k),
    "prod": lambda x, d, k: x.prod(d, keepdim=k),
    "aminmax": lambda x, d, k: torch.aminmax(x, dim=d, keepdim=k),
}
OF_ALL = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(keepdim=True),
    "prod": lambda x: x.abs().prod(),
    "any": lambda x: (x > 9).any(),
    "all": lambda x: (x < 9).all(),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "aminmax": torch.aminmax,
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
}


def check(n, work, x, cut, over, mode=torch.no_grad, close=ROUNDING, collectives=None):
    """`over`: the sharded dim is reduced, so the result is plain, and one collective was needed."""
    outcome = on_virtual(n, work, [x], [cut], mode)
    for result, expected in zip(outcome.results, one_rank(work, [x], mode), strict=True):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, equal_nan=True, **close)
    assert outcome.sharded == [not over] * len(outcome.sharded)
    assert outcome.gathers == {}
    if n > 1:
        assert outcome.collectives == (over if collectives is None else collectives)
    assert all(traffic.messages == 0 for traffic in outcome.traffic)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, mode):
    for height, n in ((7, 3), (1, 4), (3, 4)):
        x = filled(2, 4, height, 5)
        for dims, keepdim in (((2,), False), ((2, 3), True), ((-2, 0), False), ((1,), False), ((3, 0), True)):
            work = partial(REDUCTIONS[name], d=dims, k=keepdim)
            if name.startswith(("std", "var")) and dims == (2,) and height == 1:
                continue
            check(n, work, x, Cut(2), any(d % 4 == 2 for d in dims), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OF_ONE_DIM)
def test_reductions_of_one_dim(name, mode):
    for height, n in ((7, 3), (1, 4), (3, 4)):
        # whole numbers have many ties
        for x in (filled(2, 4, height, 5), filled(2, 4, height, 5).round()):
            for dim, keepdim in ((2, False), (-2, True), (1, False), (3, True)):
                over = dim % 4 == 2
                collectives = 2 * over if name == "aminmax" else None
                work = partial(OF_ONE_DIM[name], d=dim, k=keepdim)
                check(n, work, x, Cut(2), over, mode, collectives=collectives)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OF_ALL)
def test_reductions_to_one_number(name, mode):
    for height, n in ((7, 3), (1, 4), (3, 1)):
        for x in (filled(2, 4, height, 5), filled(2, 4, height, 5).round()):
            check(n, OF_ALL[name], x, Cut(2), True, mode, collectives=2 if name == "aminmax" else 1)


@pytest.mark.parametrize("work", [*OF_ALL.values(), lambda x: x.max(1), lambda x: x.sum(1)])
def test_blocks_and_uneven_extents(work):
    x = filled(2, 21, 3).round()
    collectives = 2 if work is OF_ALL["aminmax"] else None
    for cut in (Cut(1, blocks=3), Cut(1, sizes=(0, 20, 1)), Cut(1, blocks=3, sizes=(3, 0, 4))):
        check(3, work, x, cut, True, collectives=collectives)
        check(3, lambda x: x.mean(0), x, cut, False)


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin", "sum", "mean", "var", "norm"])
def test_values_that_are_not_finite(name, value):
    x = filled(2, 4, 7, 5)
    x[1, 2, 3, 4] = value
    check(3, OF_ALL[name], x, Cut(2), True)
    check(4, OF_ALL[name], torch.full((2, 1), value), Cut(0), True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.float64])
def test_dtypes(dtype):
    x = (filled(2, 4, 7, 5).abs() * 10).to(dtype)
    works = [lambda x: x.sum(2), lambda x: x.sum(), lambda x: x.amax(2), lambda x: x.any(2), lambda x: x.all()]
    works += [lambda x: x.argmax(), lambda x: x.min(2)] if dtype != torch.bool else []
    works += [lambda x: x.prod(2)] if dtype in (torch.uint8, torch.bool) else []
    if dtype.is_floating_point:
        works += [lambda x: x.mean((2, 3)), lambda x: x.std(2), lambda x: x.norm(), lambda x: x.logsumexp(2)]
    for work in works:
        close = BFLOAT16 if dtype == torch.bfloat16 else ROUNDING
        check(3, work, x, Cut(2), True, close=close)


def test_a_mean_in_bfloat16_is_rounded_once():
    x = filled(1, 4, 64, 64, mean=1).bfloat16()
    outcome = on_virtual(4, lambda x: x.mean((2, 3)), [x], [Cut(2)])
    assert torch.equal(outcome.results[0], x.double().mean((2, 3)).bfloat16())


SOFTMAX = {
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "softmax in float32": lambda x, d: x.softmax(d, dtype=torch.float32),
    "safe": torch.ops.aten._safe_softmax,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name, mode):
    for height, n in ((7, 3), (1, 4), (3, 4), (7, 1)):
        for dim in (2, -2, 1, -1):
            for scale in (1, 100):
                x = filled(2, 4, height, 5) * scale
                over = dim in (2, -2)
                outcome = on_virtual(n, partial(SOFTMAX[name], d=dim) if name != "safe" else
                                     partial(torch.ops.aten._safe_softmax, dim=dim), [x], [Cut(2)], mode)  # fmt: skip
                expected = SOFTMAX[name](x, dim)
                # a log of a sum more than one rank's, of values up to 300
                torch.testing.assert_close(outcome.results[0], expected, rtol=1e-6, atol=1e-6 * scale)
                assert outcome.sharded == [True]
                assert outcome.gathers == {}
                assert outcome.collectives == (over and n > 1)


@pytest.mark.parametrize("rows", [(3,), (0, 1, 2, 4, 5, 6), tuple(range(7))])
def test_softmax_of_masked_rows(rows):
    x = filled(2, 7, 5)
    x[:, list(rows)] = -inf
    for work in (lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: torch.ops.aten._safe_softmax(x, 1)):
        outcome = on_virtual(3, work, [x], [Cut(1)])
        torch.testing.assert_close(outcome.results[0], work(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_softmax_in_bfloat16_is_as_exact_as_one_rank():
    x = (filled(1, 64, 8) * 3).bfloat16()
    truth = x.double().softmax(1)
    error = (on_virtual(4, lambda x: x.softmax(1), [x], [Cut(1)]).results[0] - truth).abs().max()
    # both round once, from float32
    assert error <= 1.1 * (x.softmax(1) - truth).abs().max()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "work", [lambda x, d: x.cumsum(d), lambda x, d: x.cumprod(d), lambda x, d: x.sort(d), lambda x, d: x.topk(2, d),
             lambda x, d: x.median(d), lambda x, d: x.cummax(d), lambda x, d: x.sort(dim=d, stable=True)]
)  # fmt: skip
def test_scans_are_local_along_other_dims_and_gathered_along_the_sharded_one(work, mode):
    x = filled(2, 4, 3, 5)
    for dim in (1, 3):
        check(4, partial(work, d=dim), x, Cut(2), False, mode)
    outcome = on_virtual(3, partial(work, d=2), [x], [Cut(2)], mode, strict=False)
    for result, expected in zip(outcome.results, one_rank(partial(work, d=2), [x]), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert sum(outcome.gathers.values()) == 1


def _reductions(x):
    works = [partial(work, d=(2, 3), k=True) for work in REDUCTIONS.values()]
    works += [partial(work, d=2, k=False) for work in OF_ONE_DIM.values()] + list(OF_ALL.values())
    results = [work(x) for work in works] + [x.softmax(2), x.bfloat16().sum(2)]
    return [part for result in results for part in (result if isinstance(result, tuple) else [result])]


def _on_group(group, height, mode):
    return on_each_rank(Ranks.of(group), _reductions, [filled(2, 4, height, 5)], [Cut(2)], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 4])
def test_on_processes(n, mode):
    for height in (1, 7):
        outcome = agreed(run_ranks(_on_group, n, height, mode))
        for result, expected in zip(outcome.results, one_rank(_reductions, [filled(2, 4, height, 5)]), strict=True):
            close = BFLOAT16 if result.dtype == torch.bfloat16 else ROUNDING
            torch.testing.assert_close(result, expected, **close)
        assert outcome.gathers == {}

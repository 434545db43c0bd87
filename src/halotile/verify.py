"""Compare a distributed result with one rank's, and hold it to what its strategy promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

PEAK = 2.0  # the range of pixels in [-1, 1]
BITWISE_STRATEGIES = ("serial", "tile")
ROUNDING_STRATEGIES = ("shard", "hybrid")
TOLERANCES = MappingProxyType({torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1})
"""What `shard` and `hybrid` may differ by, as a part of the reference's largest value: rounding in another order.

In half precision two results that are as far from the truth as each other differ by as much as that."""


@dataclass(frozen=True)
class Comparison:
    """How a result differs from its reference.

    shape, reference_shape: of the two; when they differ, the rest says "as different as can be". max_error: largest
    absolute difference, in the tensors' own unit. psnr_db: 10 log10(peak² / mean squared error), infinite when equal.
    first_differing_row: the lowest index along height (dim -2) with a difference, None when equal. differing: how many
    values differ. bitwise: as `torch.equal` says, except that NaN equals NaN. largest: the reference's largest absolute
    value. dtype: of the result.
    """

    shape: tuple[int, ...]
    reference_shape: tuple[int, ...]
    max_error: float
    psnr_db: float
    first_differing_row: int | None
    differing: int
    bitwise: bool
    largest: float = 0.0
    dtype: torch.dtype = torch.float32


def compare(result: Tensor, reference: Tensor, peak: float = PEAK) -> Comparison:
    """Compare two tensors of any shape with a height at dim -2, `B C H W` or `B C F H W`; `peak` is the signal's range.

    Tensors of different shape or dtype are never equal.
    """
    shapes = tuple(result.shape), tuple(reference.shape)
    if shapes[0] != shapes[1]:
        return Comparison(*shapes, math.inf, -math.inf, 0, max(result.numel(), reference.numel()), False)
    # in place of torch.equal, which says that a NaN differs from itself
    same = (result == reference) | (result.isnan() & reference.isnan())
    rows = (~same).movedim(-2, 0).flatten(1).any(1).nonzero() if same.dim() > 1 else (~same).nonzero()
    if not len(rows):
        return Comparison(*shapes, 0.0, math.inf, None, 0, result.dtype == reference.dtype)
    error = torch.where(same, 0.0, result.double() - reference.double()).abs()
    return Comparison(
        *shapes,
        max_error=error.max().item(),
        psnr_db=psnr_db(result, reference, peak),
        first_differing_row=int(rows[0]),
        differing=int((~same).sum()),
        bitwise=False,
        largest=reference.double().abs().max().item(),
        dtype=result.dtype,
    )


def psnr_db(result: Tensor, reference: Tensor, peak: float = PEAK) -> float:
    """Peak signal-to-noise ratio of two tensors of one shape, in dB: 10 log10(peak² / mean squared error)."""
    mean_squared = (result.double() - reference.double()).square().mean().item()
    return math.inf if mean_squared == 0 else 10 * math.log10(peak**2 / mean_squared)


def keeps_promise(comparison: Comparison, strategy: str) -> bool:
    """Whether the result is as equal to one rank's as `strategy` promises: `serial` and `tile` to the bit.

    `shard` and `hybrid` promise what `TOLERANCES` says for the dtype, as a part of one rank's largest value.

    Raises ValueError for a strategy that promises nothing.
    """
    if strategy in ROUNDING_STRATEGIES:
        return comparison.bitwise or comparison.max_error <= TOLERANCES[comparison.dtype] * comparison.largest
    if strategy not in BITWISE_STRATEGIES:
        known = ", ".join((*BITWISE_STRATEGIES, *ROUNDING_STRATEGIES))
        raise ValueError(f"no promise is known of strategy {strategy!r}; known: {known}")
    return comparison.bitwise

"""The 2-norm over channels, which RMS norms of video autoencoders take: torch's bits on a CPU, in less time."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import torch

from halotile.spatial.watching import unwatched

# a piece of the sums and one of the squares stay in the level-1 and level-2 caches of a CPU core
_PIECE = 1 << 14
# outputs from which the calls for each channel cost less than torch's for each output
_FEW = 4096


def norm_over(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor | None:
    """`torch.linalg.vector_norm(x, 2, dim, keepdim)` to the bit; None where this is not faster, or not equal.

    For a dim that is not the innermost, torch's CPU kernel walks the channels of one output after the other, with
    strided reads. Here all outputs of a piece take one channel after the other: the same sums in the same order.
    """
    inner = prod(x.shape[dim + 1 :])
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.shape[dim] < 2 or inner < _FEW or not x.is_contiguous():
        return None
    return _summed(x, dim, keepdim) if _as_torch_adds() else None


def _summed(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    inner = prod(x.shape[dim + 1 :])
    out = x.new_empty([*x.shape[:dim], *[1] * keepdim, *x.shape[dim + 1 :]])
    square = x.new_empty(min(inner, _PIECE))
    # a call for each channel, which are no modes' business
    with unwatched():
        for planes, norms in zip(x.view(-1, x.shape[dim], inner), out.view(-1, inner), strict=True):
            for rows, total in zip(planes.split(_PIECE, 1), norms.split(_PIECE), strict=True):
                channels = rows.unbind()
                scratch = square[: total.numel()]
                torch.mul(channels[0], channels[0], out=total)
                for channel in channels[1:]:
                    total.add_(torch.mul(channel, channel, out=scratch))
    # torch.sqrt is one unit off for some numbers, the root in its norm is not, nor is numpy's
    array = out.numpy()
    np.sqrt(array, out=array)
    return out


@lru_cache(maxsize=1)
def _as_torch_adds() -> bool:
    """Whether this machine's torch adds up as `_summed` does: its compiler may have fused products and sums."""
    with unwatched(), torch.inference_mode(False):
        probe = torch.randn(2, 40, 2 * _FEW, generator=torch.Generator().manual_seed(0))
        return torch.equal(_summed(probe, 1, True), torch.linalg.vector_norm(probe, 2, 1, True))

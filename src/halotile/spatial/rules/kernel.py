"""The convolution kernel that one rank would use: PyTorch picks it by size on CPU, and a band is smaller."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from halotile.spatial.registry import Op

_ONEDNN = torch._C._ConvBackend.Mkldnn  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Convolve:
    """All of a convolution but its input: call it with a part of that."""

    op: Op
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    as_whole: bool
    """whether the whole gets the oneDNN kernel"""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve with the kernel that PyTorch would pick for the whole.

        For small inputs it picks im2col, which on the bands of a large one costs two to three times the time and the
        memory of the kernel that the whole gets; the same kernel also gives the same bits.
        """
        if self.as_whole:
            result: torch.Tensor = torch.ops.aten.mkldnn_convolution(
                x, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
            )
        else:
            result = self.op(
                x, self.weight, self.bias, self.stride, self.padding, self.dilation,
                self.transposed, self.output_padding, self.groups,
            )  # fmt: skip
        return result  # the type that mypy lacks

    def padded(self, along: int, padding: int, output_padding: int = 0) -> Convolve:
        """The same with another padding of one spatial dim."""

        def at(values: Sequence[int], new: int) -> list[int]:
            return [new if d == along else value for d, value in enumerate(values)]

        return replace(self, padding=at(self.padding, padding), output_padding=at(self.output_padding, output_padding))

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """The spatial sizes of the result for an input of `shape`; below 1 where the kernel does not fit."""
        sizes = []
        for d, size in enumerate(shape[2:]):
            reach = self.dilation[d] * (self.weight.shape[2 + d] - 1)
            if self.transposed:
                sizes.append((size - 1) * self.stride[d] - 2 * self.padding[d] + reach + self.output_padding[d] + 1)
            else:
                sizes.append((size + 2 * self.padding[d] - reach - 1) // self.stride[d] + 1)
        return sizes

    def empty(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A result of no rows in `dim`, for a band of none."""
        channels = self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]
        shape = [x.shape[0], channels, *self.sizes(x.shape)]
        shape[dim] = 0
        return x.new_empty(shape)


def simple() -> bool:
    """Whether the simple path was asked for: the oracle of the fast one."""
    return os.environ.get("HALOTILE_SIMPLE_CONV", "") not in ("", "0")


def whole_gets_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Whether PyTorch would run a convolution of `x`, were it whole on one rank, with oneDNN; on CPU in float32.

    Of other devices and dtypes False: there the choice does not hang on the size. Raises torch's own RuntimeError when
    the kernel does not fit.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() == 3:
        return False
    shapes = (tuple(x.shape), tuple(weight.shape), tuple(stride), tuple(padding), tuple(dilation))
    return bool(_backend(*shapes, groups, torch.get_num_threads()) == _ONEDNN)


@lru_cache(maxsize=4096)
def _backend(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int, threads: int
) -> Any:
    """What PyTorch's own selection (ATen/native/Convolution.cpp) says of tensors of these shapes; nothing is made."""
    one = torch.empty(1)
    zeros = [0] * len(stride)
    return torch._C._select_conv_backend(
        one.expand(shape), one.expand(weight), None, stride, padding, dilation, False, zeros, groups
    )

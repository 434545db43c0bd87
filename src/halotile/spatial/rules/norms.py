"""Normalisations: local where statistics do not cross the rows, else one collective and one fused scale and shift."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from halotile.spatial.pointwise import rows_for
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.rules.statistics import merged_moments
from halotile.spatial.tensor import SpatialTensor
from halotile.spatial.watching import unwatched

aten = torch.ops.aten


@rule(aten.native_group_norm.default)
def group_norm(
    op: Op, x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> Any:
    """Statistics of a group are those of all ranks' rows; float32 at least, whatever the dtype of `x`."""
    if not isinstance(x, SpatialTensor) or isinstance(weight, SpatialTensor) or isinstance(bias, SpatialTensor):
        return NotImplemented
    local, spec = x.local, x.spec
    if spec.dim == 1 or not x.numel():
        return NotImplemented
    if spec.dim == 0:
        if not local.numel():
            return x.like(torch.empty_like(local)), *_like_rows(
                x, local.new_empty(0, groups), local.new_empty(0, groups)
            )
        out, mean, rstd = run(op, local, weight, bias, local.shape[0], channels, size, groups, eps)
        return x.like(out), *_like_rows(x, mean, rstd)
    if x.ranks.size == 1:
        out, mean, rstd = run(op, local, weight, bias, batch, channels, size, groups, eps)
        return x.like(out), mean, rstd
    grouped = local.reshape(batch, groups, channels // groups, *local.shape[2:])
    counts = _counts(x, channels // groups * x.numel() // (batch * channels))
    mean, m2 = merged_moments(grouped, range(2, grouped.dim()), counts, x.ledger)
    with unwatched():
        var = m2 / sum(counts)
        each_mean, each_var = (part.repeat_interleave(channels // groups, 1) for part in (mean, var))
        mean, rstd = mean.float(), (var + eps).rsqrt().float()
    return x.like(_scaled(local, each_mean, each_var, weight, bias, eps)), mean, rstd


@rule(aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
def batch_norm(
    op: Op,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Local with the running statistics; those of the rows (instance norm arrives like that) take one collective."""
    if not isinstance(x, SpatialTensor) or x.spec.dim == 1 or not x.numel():
        return NotImplemented
    values = (weight, bias, running_mean, running_var)
    if any(isinstance(value, SpatialTensor) for value in values):
        return NotImplemented
    local = x.local
    if x.ranks.size == 1 and (running_mean is None or not training):
        return _first_is_rows(x, run(op, local, *values, training, momentum, eps))
    if not training:
        if not local.numel():
            # nothing to normalise; the other results are empty without training, anyway
            return x.like(torch.empty_like(local)), *(local.new_empty(0) for _ in op._schema.returns[1:])
        return _first_is_rows(x, run(op, local, *values, training, momentum, eps))
    if running_mean is not None or op is not aten.native_batch_norm.default:
        return NotImplemented
    dims = [d for d in range(x.dim()) if d != 1]
    counts = _counts(x, x.numel() // x.shape[1])
    mean, m2 = merged_moments(local, dims, counts, x.ledger)
    var = m2 / sum(counts)
    out = _scaled(local, mean[None], var[None], weight, bias, eps)
    return x.like(out), mean.float(), (var + eps).rsqrt().float()


@rule(aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
def batch_norm_in_eval(
    op: Op, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    """Local: the statistics are given."""
    out = batch_norm(aten.native_batch_norm.default, x, weight, bias, running_mean, running_var, False, momentum, eps)
    if out is NotImplemented:
        return out
    return *out, *(out[1].new_empty(0) for _ in op._schema.returns[3:])


@rule(aten.native_layer_norm.default)
def layer_norm(op: Op, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Local for rows that are normalised one by one; else one collective."""
    if not isinstance(x, SpatialTensor) or isinstance(weight, SpatialTensor) or isinstance(bias, SpatialTensor):
        return NotImplemented
    first, local, spec = x.dim() - len(shape), x.local, x.spec
    if spec.dim < first:
        out, mean, rstd = run(op, local, shape, weight, bias, eps)
        return x.like(out), *_like_rows(x, mean, rstd)
    if not x.numel():
        return NotImplemented
    if x.ranks.size == 1:
        return _first_is_rows(x, run(op, local, shape, weight, bias, eps))
    dims = range(first, x.dim())
    counts = _counts(x, prod(shape))
    mean, m2 = merged_moments(local, dims, counts, x.ledger)
    broadcast = (*mean.shape, *[1] * len(shape))
    dtype = torch.promote_types(local.dtype, torch.float32)
    rstd = (m2 / sum(counts) + eps).rsqrt().view(broadcast).to(dtype)
    mean = mean.view(broadcast).to(dtype)
    out = local.sub(mean).mul_(rstd)
    for value, apply in ((weight, out.mul_), (bias, out.add_)):
        if value is not None:
            apply(rows_for(value, x.dim(), spec, str(op), x))
    return x.like(out.to(local.dtype)), mean, rstd


@rule(aten.rms_norm.default, aten._fused_rms_norm.default)
def rms_norm(op: Op, x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    """Local for rows that are normalised one by one; else its parts follow, of which the mean is the collective."""
    if not isinstance(x, SpatialTensor) or isinstance(weight, SpatialTensor) or x.spec.dim >= x.dim() - len(shape):
        return NotImplemented
    result = run(op, x.local, shape, weight, eps)
    if isinstance(result, torch.Tensor):
        return x.like(result)
    return x.like(result[0]), *_like_rows(x, result[1])


def _scaled(
    local: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    """Normalise with a mean and a variance for each sample (or for all) and channel, in one pass over `local`.

    Batch norm in eval mode is that pass: it takes float32 parameters with bfloat16 values, and makes no copy.
    """
    if not local.numel():
        return torch.empty_like(local)
    samples, channels = mean.shape
    dtype = torch.promote_types(local.dtype, torch.float32)
    with unwatched():
        stats = [part.to(dtype) for part in (mean, var)]
        affine = [None if value is None else value.to(dtype) for value in (weight, bias)]

    def normalised(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, repeats: int) -> torch.Tensor:
        weight, bias = (value if value is None or repeats == 1 else value.repeat(repeats) for value in affine)
        return aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]  # type: ignore[no-any-return]

    if samples == 1:
        return normalised(local, stats[0][0], stats[1][0], 1)
    if local.is_contiguous():
        flat = local.view(1, samples * channels, -1)
        return normalised(flat, stats[0].view(-1), stats[1].view(-1), samples).view(local.shape)
    # in channels_last the samples cannot be laid side by side as more channels
    out = torch.empty_like(local)
    for i in range(samples):
        out[i : i + 1] = normalised(local[i : i + 1], stats[0][i], stats[1][i], 1)
    return out


def _counts(x: SpatialTensor, elements: int) -> list[int]:
    """How many of the `elements` that make one statistic each rank has."""
    return [elements // x.spec.size * x.spec.local_size(rank) for rank in range(x.ranks.size)]


def _like_rows(x: SpatialTensor, *parts: torch.Tensor) -> tuple[SpatialTensor, ...]:
    """Statistics of each row by itself, sharded like the rows."""
    return tuple(x.like(part) for part in parts)


def _first_is_rows(x: SpatialTensor, results: tuple[Any, ...]) -> tuple[Any, ...]:
    return x.like(results[0]), *results[1:]

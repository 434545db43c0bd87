"""Fused attention: queries stay where they are, keys and values are gathered once for both."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from halotile.spatial.move import gather, whole
from halotile.spatial.pointwise import rows_for
from halotile.spatial.registry import Op, rule, run
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_attention_math.default,
)
def attention(op: Op, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """One rank's kernel on this rank's queries (or this rank's samples) and whole keys and values.

    `scaled_dot_product_attention` itself needs no rule: it is a choice among these, made by the global shapes. What the
    kernels return besides the attention is for gradients; it is that of this rank's queries.
    """
    names = [argument.name for argument in op._schema.arguments]
    mask_at = next((names.index(name) for name in ("attn_mask", "attn_bias") if name in names), None)
    causal_at = names.index("is_causal")
    values = [q, k, v, *rest]
    mask = values[mask_at] if mask_at is not None else None
    causal, ndim = values[causal_at], q.dim()
    rows = _rows_of(q, k, v)
    if values[names.index("dropout_p")] or (causal and mask_at is None and rows == "queries"):
        return NotImplemented
    match rows:
        case "batch":
            like = next(x for x in (q, k, v) if isinstance(x, SpatialTensor))
            spec = like.spec
            if not all(x.shape[spec.dim] in (1, like.shape[spec.dim]) for x in (q, k, v)):
                return NotImplemented
            q, k, v = (rows_for(x, ndim, spec, str(op), like) for x in (q, k, v))
        case "queries":
            like, spec = q, q.spec
            k, v = whole_keys_and_values(k, v)
            q = q.local
        case "none":
            k, v = whole_keys_and_values(k, v)
            mask = gather(mask, str(op)) if isinstance(mask, SpatialTensor) else mask
            values[:3] = q, k, v
            if mask_at is not None:
                values[mask_at] = mask
            return run(op, *values)
        case _:
            return NotImplemented
    if mask is not None:
        mask = rows_for(mask, ndim, spec, str(op), like)
    if causal and spec.dim == ndim - 2:
        mask, values[causal_at] = _causal_mask(like, k), False
    empty = not q.shape[spec.dim]
    if empty:
        q, k, v, mask = (_stand_in(x, ndim, spec.dim) for x in (q, k, v, mask))
    values[:3] = q, k, v
    if mask_at is not None:
        values[mask_at] = mask
    out, *others = run(op, *values)
    out = like.like(out.narrow(spec.dim, 0, 0) if empty else out, spec)
    return out, *others


def whole_keys_and_values(k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values on every rank, in one message where they are sharded alike."""
    if isinstance(k, SpatialTensor) and isinstance(v, SpatialTensor):
        alike = k.spec == v.spec and k.dtype == v.dtype and k.shape[:-1] == v.shape[:-1]
        if alike and k.spec.dim != k.dim() - 1:
            dim = k.spec.dim
            # tokens first: then what comes from a rank is one piece of the result, and is received into place
            both = torch.cat((k.local.movedim(dim, 0), v.local.movedim(dim, 0)), -1)
            k.ledger.attention_gathers += 1
            keys, values = torch.split(whole(k.like(both, k.spec.at(0))), [k.shape[-1], v.shape[-1]], -1)
            return keys.movedim(0, dim), values.movedim(0, dim)
    return _whole(k), _whole(v)


def _whole(x: Any) -> torch.Tensor:
    if not isinstance(x, SpatialTensor):
        assert isinstance(x, torch.Tensor)
        return x
    x.ledger.attention_gathers += 1
    return whole(x)


def _rows_of(q: Any, k: Any, v: Any) -> str:
    """What this rank has of an attention: its queries, its samples of the batch, none of its own, or something odd."""
    sharded = [x for x in (q, k, v) if isinstance(x, SpatialTensor)]
    if any(x.dim() != q.dim() or x.spec.dim == x.dim() - 1 for x in sharded):
        return "odd"
    tokens = q.dim() - 2
    if isinstance(q, SpatialTensor) and q.spec.dim == tokens:
        return "queries"
    if not isinstance(q, SpatialTensor) and all(x.spec.dim == tokens for x in sharded):
        return "none"
    return "batch" if len({x.spec.dim for x in sharded}) == 1 and sharded[0].spec.dim < tokens else "odd"


def _causal_mask(q: SpatialTensor, k: torch.Tensor) -> torch.Tensor:
    """What this rank's queries must not see, as a bias: keys behind their own global place."""
    spec, keys = q.spec, k.shape[-2]
    places = spec.take(torch.arange(spec.size, device=q.device), 0, q.ranks.rank)
    # kernels on CUDA want rows of a bias that start at multiples of 8
    bias = torch.zeros(len(places), -(-keys // 8) * 8, dtype=q.dtype, device=q.device)[:, :keys]
    bias.masked_fill_(torch.arange(keys, device=q.device) > places[:, None], -inf)
    return bias.expand(*q.shape[:-2], *bias.shape)


def _stand_in(x: Any, ndim: int, dim: int) -> Any:
    """One row where there is none: kernels refuse tensors without elements."""
    at = dim - (ndim - x.dim()) if x is not None else -1
    if at < 0 or x.shape[at]:
        return x
    shape = list(x.shape)
    shape[at] = 1
    return x.new_zeros(shape)

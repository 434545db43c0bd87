"""Matrix products: rows of the left and columns of the right operand stay where they are, contracted rows are added up.

Where both operands are sharded and one of them has to be whole, it is the keys or the values of an attention that is
written out (queries times keys, weights times values): that is counted as `attention_gathers`, not as a gather.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from halotile.spatial.move import gather, redistribute, whole
from halotile.spatial.pointwise import rows_for
from halotile.spatial.registry import Op, rule
from halotile.spatial.spec import SpatialSpec
from halotile.spatial.tensor import SpatialTensor

aten = torch.ops.aten
Role = Literal["batch", "free", "sum"]
"""what the sharded dim of an operand is: of the batch, kept in the product, or contracted"""
Placed = tuple[torch.Tensor, torch.Tensor, SpatialSpec | None, SpatialTensor]
"""local operands, where the product is sharded (None: the ranks' products add up), and any sharded tensor"""


@rule(aten.mm.default, aten.bmm.default, aten.matmul.default)
def product(op: Op, a: Any, b: Any) -> Any:
    """`a @ b`, whichever dims are sharded."""
    if min(a.dim(), b.dim()) < 2:
        return NotImplemented
    a, b, spec, like = _place(str(op), a, b)
    return _partial_sum(a, b, like).to(a.dtype) if spec is None else like.like(op(a, b), spec)


@rule(aten.addmm.default, aten.baddbmm.default)
def product_and_bias(op: Op, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    """`beta * bias + alpha * (a @ b)`; where products add up, the bias is added once, to their sum."""
    if not (isinstance(a, SpatialTensor) or isinstance(b, SpatialTensor)):
        return NotImplemented
    a, b, spec, like = _place(str(op), a, b)
    if spec is not None:
        return like.like(op(rows_for(bias, a.dim(), spec, str(op), like), a, b, beta=beta, alpha=alpha), spec)
    result = _partial_sum(a, b, like).mul_(alpha)
    # beta=0 ignores the bias, NaN or not
    if beta != 0:
        result.add_(gather(bias, str(op)) if isinstance(bias, SpatialTensor) else bias, alpha=beta)
    return result.to(a.dtype)


@rule(aten.linear.default)
def linear(op: Op, x: Any, weight: Any, bias: Any) -> Any:
    """Local on features that are whole."""
    if not isinstance(x, SpatialTensor) or isinstance(weight, SpatialTensor) or isinstance(bias, SpatialTensor):
        return NotImplemented
    return NotImplemented if x.spec.dim == x.dim() - 1 else x.like(op(x.local, weight, bias))


@rule(aten.mv.default)
def times_vector(op: Op, a: Any, b: Any) -> Any:
    """A product with one column."""
    return _dropped(product(aten.mm.default, a, _column(b)), 1)


@rule(aten.addmv.default)
def times_vector_and_bias(op: Op, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    """A product with one column, and a bias."""
    result = product_and_bias(aten.addmm.default, _column(bias), a, _column(b), beta, alpha)
    return NotImplemented if result is NotImplemented else _dropped(result, 1)


@rule(aten.dot.default)
def dot(op: Op, a: Any, b: Any) -> Any:
    """A product of one row with one column."""
    row = a.like(a.local[None], a.spec.at(1)) if isinstance(a, SpatialTensor) else a[None]
    return _dropped(_dropped(product(aten.mm.default, row, _column(b)), 1), 0)


@rule(aten.addbmm.default)
def sum_of_products(op: Op, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    """The products of the batch, added up."""
    result = product(aten.bmm.default, a, b).sum(0) * alpha
    return result if beta == 0 else result + bias * beta


def _place(operation: str, a: Any, b: Any) -> Placed:
    """This rank's parts of both operands."""
    ndim = max(a.dim(), b.dim())
    roles = _role(a, {1: "sum", 2: "free"}), _role(b, {1: "free", 2: "sum"})
    match roles:
        case ("sum", "sum" | None) | (None, "sum"):
            return _contracted(operation, a, b)
        case ("free", "free" | "sum"):
            b = _keys_or_values(b)
        case ("sum", "free"):
            a = _keys_or_values(a)
        case ("batch", "free" | "sum") | ("free", "batch"):
            b = gather(b, operation)
        case ("sum", "batch"):
            a = gather(a, operation)
    sharded = [x for x in (a, b) if isinstance(x, SpatialTensor)]
    kept = next((x for x in sharded if x.spec.size > 1), sharded[0])
    spec = kept.spec.at(kept.spec.dim + ndim - kept.dim())
    if spec.dim == ndim - 2:
        return a.local, b, spec, kept
    if spec.dim == ndim - 1:
        return a, b.local, spec, kept
    a, b = (rows_for(operand, ndim, spec, operation, kept) for operand in (a, b))
    return a, b, spec, kept


def _contracted(operation: str, a: Any, b: Any) -> Placed:
    if isinstance(a, SpatialTensor) and isinstance(b, SpatialTensor):
        if (a.spec.blocks, a.spec.size) == (b.spec.blocks, b.spec.size):
            return a.local, redistribute(b, a.spec.extents).local, None, a
        b = gather(b, operation)
    if isinstance(a, SpatialTensor):
        return a.local, a.spec.take(b, b.dim() - 2, a.ranks.rank), None, a
    return b.spec.take(a, a.dim() - 1, b.ranks.rank), b.local, None, b


def _partial_sum(a: torch.Tensor, b: torch.Tensor, like: SpatialTensor) -> torch.Tensor:
    """The sum of all ranks' products in float32 at least."""
    if a.dtype in (torch.bfloat16, torch.float16):
        if a.is_cuda and a.dim() == b.dim() in (2, 3):
            part = (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
        else:
            part = torch.matmul(a.float(), b.float())
    else:
        part = torch.matmul(a, b)
    return like.ranks.transport.all_reduce(part) if like.ranks.size > 1 else part


def _keys_or_values(x: SpatialTensor) -> torch.Tensor:
    x.ledger.attention_gathers += 1
    return whole(x)


def _role(x: Any, from_right: dict[int, Role]) -> Role | None:
    return from_right.get(x.dim() - x.spec.dim, "batch") if isinstance(x, SpatialTensor) else None


def _column(x: Any) -> Any:
    return x.like(x.local.unsqueeze(-1)) if isinstance(x, SpatialTensor) else x.unsqueeze(-1)


def _dropped(x: Any, dim: int) -> Any:
    """`x` without a dim of size 1, which is not sharded."""
    if not isinstance(x, SpatialTensor):
        return x.squeeze(dim)
    return x.like(x.local.squeeze(dim), x.spec.at(x.spec.dim - (dim < x.spec.dim)))

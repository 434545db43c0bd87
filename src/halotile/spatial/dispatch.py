"""What happens to an operation on sharded tensors: a rule, pointwise, its parts, or gather and compute replicated."""

from __future__ import annotations

from typing import Any

import torch

from halotile.errors import UnsupportedError
from halotile.spatial.move import gather
from halotile.spatial.pointwise import pointwise
from halotile.spatial.registry import RULES, Op, bind, is_view, run, written
from halotile.spatial.tensor import SpatialTensor


def dispatch(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op`. Every rank comes here with the same operation, shapes and extents, so all take the same way."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        raise UnsupportedError(
            f"{op} takes functions of tensors, which torch compiles; that cannot be done with sharded rows"
        )
    ledger = ledger_of(args, kwargs)
    if ledger.unmade and op._schema.is_mutable:
        values = bind(op, args, kwargs)
        for target in (values[position] for position in written(op)):
            if isinstance(target, SpatialTensor):
                ledger.settle(target.local.untyped_storage())
    outer, ledger.inside = ledger.inside, True
    try:
        rule = RULES.get(op)
        if rule is not None:
            result = rule(op, *bind(op, args, kwargs))
            if result is not NotImplemented:
                return result
        if torch.Tag.pointwise in op.tags:
            result = pointwise(op, *bind(op, args, kwargs))
            if result is not NotImplemented:
                return result
        # under inference_mode composite operations come here whole
        result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return gathered(op, bind(op, args, kwargs))
    finally:
        ledger.inside = outer


def gathered(op: Op, values: tuple[Any, ...]) -> Any:
    """The last resort: whole tensors on every rank, and what was written goes back to its rows."""
    name = str(op)
    whole = [_whole(value, name) for value in values]
    result = run(op, *whole)
    for position in written(op):
        target = values[position]
        if isinstance(target, SpatialTensor):
            spec = target.spec
            assert whole[position].shape == target.shape, f"{name} changed the shape of what it writes to"
            target.local.copy_(spec.take(whole[position], spec.dim, target.ranks.rank))
    if is_view(op):
        _ledger(values).keep_view(result)
    if not op._schema.is_mutable:
        return result
    # in-place operations return their argument
    same = {id(w): v for w, v in zip(whole, values, strict=True)}
    if isinstance(result, (tuple, list)):
        return type(result)(same.get(id(part), part) for part in result)
    return same.get(id(result), result)


def ledger_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ledger of the first sharded tensor among the arguments."""
    found = _ledger(args)
    return found if found is not None else _ledger(tuple(kwargs.values()))


def _ledger(values: tuple[Any, ...]) -> Any:
    for value in values:
        if isinstance(value, SpatialTensor):
            return value.ledger
        if isinstance(value, (list, tuple)):
            for part in value:
                if isinstance(part, SpatialTensor):
                    return part.ledger
    return None


def _whole(value: Any, name: str) -> Any:
    if isinstance(value, SpatialTensor):
        return gather(value, name)
    if isinstance(value, (list, tuple)):
        return [_whole(part, name) for part in value]
    return value

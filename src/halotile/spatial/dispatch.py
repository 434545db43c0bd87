"""What happens to an operation on sharded tensors: a rule, pointwise, its parts, or gather and compute replicated."""

from __future__ import annotations

from collections.abc import Sequence
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
    if ledger.closed or ledger.stale or (op._schema.is_mutable and (ledger.unmade or ledger.copies)):
        _look_after_memory(ledger, op, bind(op, args, kwargs))
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


def lost_write(op: Op) -> UnsupportedError:
    """The error for a write into a copy that stands for a view."""
    return UnsupportedError(
        f"{op} writes into a view of a sharded tensor that had to be copied, so what is written would not reach the "
        "tensor; write to the tensor itself, by a slice that keeps the sharded dim"
    )


def refuse_stale(ledger: Any, op: Op, values: Sequence[Any]) -> None:
    """Raise UnsupportedError, on every rank, when an argument is a copy of what has been written to since."""
    flat = [part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,))]
    for value in flat:
        parts: Sequence[Any] = [value]
        if isinstance(value, SpatialTensor):
            # not its rows, where they are yet to be made: that may take messages, and not every rank comes here
            parts = [value.local] if value.lazy is None else value.lazy.sources
        if any(isinstance(part, torch.Tensor) and part.untyped_storage() in ledger.stale for part in parts):
            raise UnsupportedError(
                f"{op} uses a view of a sharded tensor that had to be copied, after the tensor was written to; the "
                "view would show what was written, the copy does not. Take the view after the write"
            )


def _targets(op: Op, values: Sequence[Any]) -> list[Any]:
    """What `op` writes to, those in lists one by one."""
    found = [values[position] for position in written(op)]
    return [part for value in found for part in (value if isinstance(value, (list, tuple)) else (value,))]


def _look_after_memory(ledger: Any, op: Op, values: tuple[Any, ...]) -> None:
    """Refuse what would use or write the wrong memory; keep what is yet to be made from what is written to."""
    if ledger.closed:
        raise UnsupportedError(
            f"{op} got a sharded tensor of a call that is over: the model kept it where halotile did not find it (a "
            "cache of a function, an object of its own), and ranks no longer work together; clear it between calls"
        )
    if ledger.stale:
        refuse_stale(ledger, op, values)
    for target in _targets(op, values):
        if isinstance(target, SpatialTensor) and target.lazy is None:
            memory = target.local.untyped_storage()
            if memory in ledger.copies:
                raise lost_write(op)
            ledger.settle(memory)
            ledger.outdate(memory)


def gathered(op: Op, values: tuple[Any, ...]) -> Any:
    """The last resort: whole tensors on every rank, and what was written goes back to its rows."""
    name = str(op)
    whole = [_whole(value, name) for value in values]
    result = run(op, *whole)
    for target, written_to in zip(_targets(op, values), _targets(op, whole), strict=True):
        if isinstance(target, SpatialTensor):
            if written_to.shape != target.shape:
                raise UnsupportedError(f"{name} changes the shape of a sharded tensor in place; use its result instead")
            spec = target.spec
            target.local.copy_(spec.take(written_to, spec.dim, target.ranks.rank))
    if is_view(op):
        original = next(value for value in values if isinstance(value, SpatialTensor))
        original.ledger.keep_view(result, original.local)
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

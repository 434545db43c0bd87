"""`SpatialMode`: while a decode runs, buffers that are to hold sharded rows are made sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from halotile.spatial.dispatch import lost_write, refuse_stale
from halotile.spatial.ledger import Ledger
from halotile.spatial.registry import Op, bind, run, written
from halotile.spatial.rules.factories import dense_order, dense_strides, local_size
from halotile.spatial.tensor import SpatialTensor
from halotile.spatial.watching import Watching

aten = torch.ops.aten
Watch = Callable[[Any, tuple[Any, ...]], None]


class SpatialMode(Watching):
    """Sees every operation of a decode on sharded tensors.

    A plain factory whose size is one that a sharded tensor had makes a sharded tensor, so that
    `buffer = torch.zeros(x.shape); buffer[:, :, 2:] = rows` needs no gather. Its values are those of the plain tensor,
    random ones too: a wrong guess costs time, not the result (but such a buffer cannot leave torch: `.numpy()` raises).

    A write into a copy that stands for a view (an operation that shares memory, and had no rule) would be lost:
    it raises UnsupportedError.
    """

    def __init__(self, ledger: Ledger, watch: Watch | None = None) -> None:
        """`watch` is shown the result and the arguments of every operation on plain tensors, the local ones too."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.watch = watch

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SpatialTensor in types:
            return NotImplemented
        ledger = self.ledger
        factory = FACTORIES.get(func)
        if factory is not None:
            if not ledger.inside:
                result = factory(ledger, func, *bind(func, args, kwargs or {}))
                if result is not NotImplemented:
                    return result
        elif ledger.copies and not ledger.inside and isinstance(func, torch._ops.OpOverload):
            if ledger.stale:
                refuse_stale(ledger, func, bind(func, args, kwargs or {}))
            if func._schema.is_mutable:
                _refuse_lost_write(ledger, func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.watch is not None:
            self.watch(result, args)
        return result


def _filled(ledger: Ledger, op: Op, size: Sequence[int], *rest: Any) -> Any:
    spec = ledger.spec_for(size)
    if spec is None:
        return NotImplemented
    return SpatialTensor(
        run(op, local_size(size, spec, ledger.ranks.rank), *rest), spec, ledger, None, _strides(size, rest)
    )


def _strides(size: Sequence[int], rest: Sequence[Any]) -> tuple[int, ...]:
    memory_format = next((value for value in rest if isinstance(value, torch.memory_format)), torch.contiguous_format)
    return torch.empty(list(size), device="meta", memory_format=memory_format).stride()


def _empty_strided(ledger: Ledger, op: Op, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Any:
    spec, order = ledger.spec_for(size), dense_order(size, stride)
    if spec is None or order is None:
        return NotImplemented
    local = local_size(size, spec, ledger.ranks.rank)
    return SpatialTensor(
        run(op, local, dense_strides(local, order), *rest), spec, ledger, None, dense_strides(size, order)
    )


def _random(ledger: Ledger, op: Op, *values: Any) -> Any:
    """The whole is drawn, as one rank would draw it, and this rank's rows are kept."""
    size = next(value for value in values if isinstance(value, (list, tuple)))
    spec = ledger.spec_for(size)
    if spec is None:
        return NotImplemented
    whole = run(op, *values)
    return SpatialTensor(spec.take(whole, spec.dim, ledger.ranks.rank).clone(), spec, ledger, None, whole.stride())


FACTORIES: dict[Op, Callable[..., Any]] = {
    aten.empty.memory_format: _filled,
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.full.default: _filled,
    aten.empty_strided.default: _empty_strided,
    aten.rand.default: _random,
    aten.rand.generator: _random,
    aten.randn.default: _random,
    aten.randn.generator: _random,
    aten.randint.default: _random,
    aten.randint.generator: _random,
    aten.randint.low: _random,
    aten.randint.low_generator: _random,
}


def _refuse_lost_write(ledger: Ledger, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    values = bind(op, args, kwargs)
    for position in written(op):
        targets = values[position] if isinstance(values[position], (list, tuple)) else [values[position]]
        if any(isinstance(target, torch.Tensor) and target.untyped_storage() in ledger.copies for target in targets):
            raise lost_write(op)

"""The rules: which function carries out which operation on sharded rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

Op = Any
"""An `OpOverload` of torch: `torch.ops.aten.add.Tensor`. torch does not export the type."""
Rule = Callable[..., Any]
F = TypeVar("F", bound=Rule)

RULES: dict[Op, Rule] = {}


def rule(*operations: Op) -> Callable[[F], F]:
    """Register a function for overloads of operations.

    It is called with the operation and then all of the operation's arguments in the schema's order, defaults filled
    in: `def flip(op, x, dims)`. It returns the result, or NotImplemented when it does not apply. Whether it does, and
    what it sends, may depend only on what every rank knows: global shapes and extents.
    """

    def register(function: F) -> F:
        for operation in operations:
            assert operation not in RULES, f"{operation} has two rules"
            RULES[operation] = function
        return function

    return register


def bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the schema, with defaults."""
    names, defaults, _ = _signature(op)
    if len(args) == len(names):
        return args
    if not kwargs:
        return args + defaults[len(args) :]
    rest = (kwargs.get(name, default) for name, default in zip(names[len(args) :], defaults[len(args) :], strict=True))
    return (*args, *rest)


def run(op: Op, *values: Any) -> Any:
    """Call `op` with all of its arguments in the order of the schema."""
    names, _, positional = _signature(op)
    if len(values) <= positional:
        return op(*values)
    return op(*values[:positional], **dict(zip(names[positional:], values[positional:], strict=False)))


@cache
def written(op: Op) -> tuple[int, ...]:
    """The positions (in the schema's order) of the arguments that `op` writes to."""
    arguments = op._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@cache
def is_view(op: Op) -> bool:
    """Whether a result of `op` shares memory with an argument that it does not write to."""
    returns = op._schema.returns
    return not op._schema.is_mutable and any(value.alias_info is not None for value in returns)


@cache
def _signature(op: Op) -> tuple[tuple[str, ...], tuple[Any, ...], int]:
    arguments = op._schema.arguments
    names = tuple(a.name for a in arguments)
    # torch hands the default of a memory format out as its number, which no operation takes
    defaults = tuple(
        a.default_value if a.has_default_value() and a.name != "memory_format" else None for a in arguments
    )
    return names, defaults, sum(not a.kwarg_only for a in arguments)

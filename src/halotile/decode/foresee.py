"""What a network call will return, found without computing it: shapes and dtypes under FakeTensorMode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halotile.errors import HalotileError, UnsupportedError


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its shape and dtype, and how many other values come with it, to be handed on as they are.

    A network that returns (result, cache) has `companions` 1; one that returns just its result has None. `draws` are
    the random operations of the call, in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    companions: int | None
    draws: tuple[Draw, ...] = ()


@dataclass(frozen=True)
class Draw:
    """A random operation with its arguments; tensors among them are fake."""

    operation: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self) -> None:
        """Draw for real and drop the values: the generator moves on as it did, or would, in the call."""

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

        args, kwargs = pytree.tree_map(real, (self.args, self.kwargs))
        self.operation(*args, **kwargs)


@dataclass
class Past:
    """What earlier calls of a chain left for later ones, in fake tensors.

    lists: caches that the caller passes again and again, by the identity of the caller's list.
    returned: companions of a call's result, by the call's index. modules: state that the network keeps on itself.
    """

    lists: dict[int, list[Any]] = field(default_factory=dict)
    returned: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    modules: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Companion:
    """A placeholder for a value that call `call` returned beside its result."""

    call: int
    position: int


_HOOKED = ("_diffusers_hook", "_hf_hook")
"""Where diffusers (layerwise casting, group offload) and accelerate (sequential offload) keep their hooks."""

_BLIND = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What fake tensors raise where only real values would do."""

# latents along height and width of the calls that are worked out for families whose results scale with their inputs
_SMALL_LAT = 8


class Foresight:
    """Outcomes of calls of one network; equal calls (same shapes, same past) are worked out once.

    `unit` is for families that halotile knows: the network's results scale exactly with the height and width of its
    inputs, in steps of `unit` cells, so one small size is worked out for all. Shapes are checked again when the calls
    have run. The memory is kept with the network, so that a second decode foresees nothing anew.

    Raises UnsupportedError when the network cannot be followed without data (a branch on values, say), and for what
    goes wrong in the network of a known family whatever it raises itself.
    """

    _of_network: ClassVar[WeakKeyDictionary[nn.Module, dict[Any, _Memory]]] = WeakKeyDictionary()

    def __init__(self, network: nn.Module, carries: bool, unit: int | None, forgotten: Sequence[str] = ()) -> None:
        self.carries = carries
        self.unit = unit
        self.forgotten = forgotten
        # a compiled network would be traced again; what it wraps returns the same shapes
        self._plain: nn.Module = getattr(network, "_orig_mod", network)
        for part in self._plain.modules():
            for name in _HOOKED:
                if hasattr(part, name):
                    raise UnsupportedError(
                        f"a hook inside of the {type(self._plain).__name__} (on a {type(part).__name__}, {name}) moves "
                        "or casts weights while it runs, so its calls cannot be followed without data"
                    )
        # taken now, since a recorder is about to stand in for it
        self._forward = self._plain.forward
        # fakes of the weights are kept by a mode, and go stale when the weights change their dtype
        memories = self._of_network.setdefault(network, {})
        self._memory = memories.setdefault(self._setting(), _Memory())

    def call(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], past: Past) -> Outcome:
        """The outcome of call `index` after `past`, which is advanced."""
        size = self._size_of((*args, *kwargs.values()))
        small = None if self.unit is None or self._memory.draws else self._small(size)
        fake_args, fake_kwargs = self._fake((args, dict(kwargs)), past, size, small)
        key = _signature((fake_args, fake_kwargs, past.modules))
        known = self._memory.known
        if key not in known:
            known[key] = self._work_out(fake_args, fake_kwargs, past)
        outcome, returned, lists, modules = known[key]
        if outcome.draws and small is not None:
            # how much noise a call draws is a matter of its size
            self._memory.draws = True
            return self.call(index, args, kwargs, past)
        past.returned[index] = returned
        past.modules = modules
        for ours, left in zip(_lists_in((fake_args, fake_kwargs)), lists, strict=True):
            ours[:] = left
        return outcome if small is None else _scaled(outcome, size, small)

    def _size_of(self, values: tuple[Any, ...]) -> tuple[int, int]:
        """Height and width of the call's first picture or clip."""
        first = next((v for v in values if isinstance(v, torch.Tensor) and v.dim() >= 4), None)
        return (0, 0) if first is None else (first.shape[-2], first.shape[-1])

    def _small(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """The size to work out instead of `size`; None when the results need not scale."""
        assert self.unit is not None
        side = _SMALL_LAT * self.unit
        return (side, side) if all(cells and cells % self.unit == 0 for cells in size) else None

    def _work_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], past: Past) -> tuple[Any, ...]:
        # worked out on copies: what is in memory must not change when a later call writes into its lists
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        with self._state(past.modules) as state:
            try:
                with self._memory.mode, _DrawLog() as log:
                    output = self._forward(*args, **kwargs)
            except HalotileError:
                raise
            except Exception as error:
                if self.unit is not None and not isinstance(error, _BLIND):
                    raise
                raise UnsupportedError(
                    f"the result of {type(self._plain).__name__} cannot be foreseen from shapes alone, which dealing "
                    f"its calls to ranks needs: {type(error).__name__}: {error}"
                ) from error
            modules = state()
        if modules and not self.carries:
            names = sorted({name for attributes in modules.values() for name in attributes})
            raise UnsupportedError(
                f"{type(self._plain).__name__} keeps state from call to call on its modules ({', '.join(names)}), and "
                "halotile does not know which method clears it; a row in halotile.families would say so"
            )
        result, *rest = output if isinstance(output, (tuple, list)) else (output,)
        if not isinstance(result, torch.Tensor):
            raise UnsupportedError(
                f"{type(self._plain).__name__} returns a {type(result).__name__} first, not a tensor"
            )
        companions = len(rest) if isinstance(output, (tuple, list)) else None
        outcome = Outcome(tuple(result.shape), result.dtype, companions, tuple(log.draws))
        return outcome, tuple(rest), [list(each) for each in _lists_in((args, kwargs))], modules

    def _fake(self, value: Any, past: Past, size: tuple[int, int], small: tuple[int, int] | None) -> Any:
        """`value` with fakes for tensors (those of `size` being `small`) and companions, and the past's lists."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            if small is not None and value.dim() >= 4 and tuple(value.shape[-2:]) == size:
                with self._memory.mode:
                    return torch.empty((*value.shape[:-2], *small), dtype=value.dtype, device=value.device)
            return self._memory.mode.from_tensor(value)
        if isinstance(value, Companion):
            return past.returned[value.call][value.position]
        if type(value) is list:
            if id(value) not in past.lists:
                past.lists[id(value)] = [self._fake(element, past, size, small) for element in value]
            return past.lists[id(value)]
        if type(value) is tuple:
            return tuple(self._fake(element, past, size, small) for element in value)
        if type(value) is dict:
            return {name: self._fake(element, past, size, small) for name, element in value.items()}
        return value

    @contextmanager
    def _state(self, modules: dict[int, dict[str, Any]]) -> Iterator[Any]:
        """Give the network the state of `modules` for a while; yields a function that reads what it has become."""
        parts = list(self._plain.modules())
        with restored(parts) as before:
            for position, attributes in modules.items():
                vars(parts[position]).update(attributes)

            def changed() -> dict[int, dict[str, Any]]:
                now = {
                    position: {
                        name: value
                        for name, value in vars(part).items()
                        if name not in self.forgotten
                        and (
                            isinstance(value, FakeTensor)
                            or (name in was and value is not was[name])
                            or (name in held and held[name] != value)
                        )
                    }
                    for position, (part, (was, held)) in enumerate(zip(parts, before, strict=True))
                }
                return {position: attributes for position, attributes in now.items() if attributes}

            yield changed

    def _setting(self) -> tuple[Any, ...]:
        """What outcomes depend on besides arguments: weights (their kind, not their values), autocast, mode."""
        weights = [*self._plain.parameters(), *self._plain.buffers()]
        kind = weights[0].device.type if weights else "cpu"
        # torch knows no autocast of meta, where weights lie that something else brings in for each call
        autocast = None
        if kind != "meta" and torch.is_autocast_enabled(kind):
            autocast = torch.get_autocast_dtype(kind)
        shapes = tuple((id(weight), tuple(weight.shape), weight.dtype) for weight in weights)
        return shapes, kind, autocast, self._plain.training


@contextmanager
def restored(parts: Sequence[nn.Module]) -> Iterator[list[tuple[dict[str, Any], dict[str, list[Any]]]]]:
    """Put the attributes of modules back as they are now, and what their lists hold; yields both of each module."""
    before = [dict(vars(part)) for part in parts]
    held = [{name: list(value) for name, value in was.items() if type(value) is list} for was in before]
    try:
        yield list(zip(before, held, strict=True))
    finally:
        for part, was, lists in zip(parts, before, held, strict=True):
            vars(part).clear()
            vars(part).update(was)
            for name, elements in lists.items():
                was[name][:] = elements


class _Memory:
    """Outcomes by signature, the mode whose fakes they hold, and whether the network draws noise."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[Any, tuple[Any, ...]] = {}
        self.draws = False


def _scaled(outcome: Outcome, size: tuple[int, int], small: tuple[int, int]) -> Outcome:
    """The outcome for an input of `size`, from the one for `small`."""
    rows, columns = (cells * here // there for cells, here, there in zip(outcome.shape[-2:], size, small, strict=True))
    return replace(outcome, shape=(*outcome.shape[:-2], rows, columns))


class _DrawLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the random operations that pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            if kwargs.get("generator") is not None:
                raise UnsupportedError(f"the network draws from a generator of its own ({func}), not the default one")
            self.draws.append(Draw(func, args, kwargs))
        return func(*args, **kwargs)


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention is marked as drawing at random for the sake of a dropout that is mostly 0."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def _lists_in(values: Any) -> list[list[Any]]:
    """The lists among `values`, in the order of a walk."""
    if type(values) is list:
        return [values]
    parts = values.values() if type(values) is dict else values if type(values) is tuple else ()
    return [found for part in parts for found in _lists_in(part)]


def _signature(value: Any) -> Any:
    """Something hashable that is equal for calls with equal outcomes."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_signature(element) for element in value))
    if isinstance(value, dict):
        return tuple((name, _signature(element)) for name, element in value.items())
    return repr(value)

"""Record what a VAE's own loop asks of its network, without computing it: DESIGN.md, section 3.1."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halotile.decode.carried import Carried
from halotile.decode.door import tensor_of
from halotile.decode.foresee import Companion, Foresight, Outcome, Past
from halotile.decode.patch import patched
from halotile.decode.witness import Witness
from halotile.errors import HalotileError, PlanError, UnsupportedError
from halotile.families import Family, Half

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class NetworkCall:
    """One call that the loop made: its arguments as given, what it will return, its share of work in input cells."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outcome: Outcome
    cells: int


@dataclass(frozen=True)
class Recording:
    """All calls of one decode or encode, and the chains that they form.

    chains: indices of calls that share a cache, in order, and so must run in order on one rank. A call without a cache
    is a chain of its own.
    """

    calls: tuple[NetworkCall, ...]
    chains: tuple[tuple[int, ...], ...]

    @property
    def costs(self) -> tuple[int, ...]:
        """The work of each chain, in input cells of the network."""
        return tuple(sum(self.calls[index].cells for index in chain) for chain in self.chains)


def record(
    vae: Any,
    half: Half,
    family: Family | None,
    size: tuple[int, int],
    plain: Callable[[], object],
    carried: Carried | None = None,
) -> Recording:
    """Run `plain` (the VAE's own decode or encode) with a network that computes nothing, and return its calls.

    `size` is the height and width of the input. Raises UnsupportedError when the loop cannot be dealt: it needs the
    values of a result while it still makes calls, or steers its network by other means than arguments. Raises PlanError
    when the loop of a class without a row loses rows. `carried`: what the chains were left with by the chunk before.
    """
    network = network_of(vae, half)
    unit = None if family is None else 1 if half == "decode" else family.ratio(vae)
    recorder = _Recorder(vae, network, family, unit, carried)
    shell: object = None
    with ExitStack() as stack:
        stack.enter_context(stand_in(network, recorder.forward))
        # what the loop itself draws, it draws once, when it is replayed
        stack.enter_context(torch.random.fork_rng(devices=_cuda_of(network)))
        if family is not None:
            stack.enter_context(patched(vae, **dict.fromkeys(family.blends, _keep_second)))
            if family.carries is not None:
                stack.enter_context(patched(vae, **{family.carries: recorder.new_chain}))
        try:
            shell = plain()
        except HalotileError:
            raise
        except Exception as error:
            if family is not None or not recorder.calls:
                raise
            raise UnsupportedError(
                f"the loop of {type(vae).__name__} cannot be recorded: it needs the values of a result before it has "
                f"made all its calls ({type(error).__name__}: {error})"
            ) from error
    if not recorder.calls:
        raise UnsupportedError(f"{half} of {type(vae).__name__} never calls its {type(network).__name__} as a whole")
    if family is None:
        _check_size(type(vae).__name__, recorder, shell, size)
    if carried is not None:
        carried.foreseen(list(recorder.pasts.values()))
    return recorder.recording()


def network_of(vae: Any, half: Half) -> nn.Module:
    """The part of the VAE whose calls are dealt: its `decoder` or `encoder`. Raises UnsupportedError without one."""
    name = "decoder" if half == "decode" else "encoder"
    network = getattr(vae, name, None)
    if not isinstance(network, nn.Module):
        raise UnsupportedError(
            f"{type(vae).__name__} has no module named {name!r}, whose calls could be dealt to ranks"
        )
    return network


@contextmanager
def stand_in(network: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `network` go to `forward`; hooks on it are for the real calls, and run when those do."""
    hooks = {name: OrderedDict[int, Any]() for name in _HOOKS if name in vars(network)}
    with patched(network, forward=forward, **hooks):
        yield


def _cuda_of(network: nn.Module) -> list[torch.device]:
    first = next(network.parameters(), None)
    return [first.device] if first is not None and first.device.type == "cuda" else []


def _check_size(name: str, recorder: _Recorder, shell: object, size: tuple[int, int]) -> None:
    """The whole must be as large as its parts say: input cells times what a call makes of them, or a multiple of it."""
    call = recorder.calls[0]
    first = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor))
    made = tensor_of(shell)
    assert made is not None
    for cells, given, got, whole in zip(size, first.shape[-2:], call.outcome.shape[-2:], made.shape[-2:], strict=True):
        # a multiple: what folds pixels into channels for its network unfolds them outside of it
        exact = cells * got % given == 0
        if not whole or (exact and whole * given % (cells * got)):
            raise PlanError(
                f"the loop of {name} makes {whole} rows or columns of {cells}, but its network makes {got} of {given}: "
                "rows are lost or repeated"
            )


def _keep_second(a: torch.Tensor, b: torch.Tensor, *extent: object, **dims: object) -> torch.Tensor:
    return b


class _Recorder:
    """The stand-in for a network's `forward`."""

    def __init__(
        self, vae: Any, network: nn.Module, family: Family | None, unit: int | None, carried: Carried | None = None
    ) -> None:
        self.carried = carried
        self.carries = family is not None and family.carries is not None
        # stand-ins on the meta device cost nothing, and show when a result is needed too early
        self.on_meta = family is None or family.record_on == "meta"
        self.foresight = Foresight(network, self.carries, unit, () if family is None else family.forgotten)
        # what halotile knows of, it knows to be steered by arguments alone
        self.witness = Witness(vae, network) if family is None else None
        self.calls: list[NetworkCall] = []
        self.chain_of: list[int] = []
        self.lists: dict[int, tuple[list[Any], int]] = {}
        self.pasts: dict[int, Past] = {}
        self.open_chain = 0
        self.chain_count = 0

    def new_chain(self, *args: object) -> None:
        """Stands in for the method that clears state kept on modules."""
        self.open_chain = self.chain_count
        self.chain_count += 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index = len(self.calls)
        if self.witness is not None:
            self.witness.check((*args, *kwargs.values()))
        chain = self._chain(args, kwargs)
        if chain not in self.pasts:
            self.pasts[chain] = Past()
            if self.carried is not None:
                kwargs = self.carried.foresee(len(self.pasts) - 1, self.pasts[chain], kwargs)
        past = self.pasts[chain]
        # of an unknown loop, copies: it may use the memory of its inputs again
        kept_args, kept_kwargs = _frozen((args, kwargs), copy=self.witness is not None)
        outcome = self.foresight.call(index, args, kwargs, past)
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if first is None:
            raise UnsupportedError("the loop calls its network without a tensor")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                raise UnsupportedError(
                    f"call {index} of the loop is given the result of an earlier call, so calls cannot be dealt apart"
                )
        cells = first.numel() // max(first.shape[1], 1)
        self.calls.append(NetworkCall(kept_args, kept_kwargs, outcome, cells))
        self.chain_of.append(chain)
        device = torch.device("meta") if self.on_meta else first.device
        result = torch.zeros(outcome.shape, dtype=outcome.dtype, device=device)
        if outcome.companions is None:
            return result
        return (result, *(Companion(index, position) for position in range(outcome.companions)))

    def _chain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The chain of a call: that of the list or value of an earlier call that it is given, else a new one."""
        if self.carries:
            if not self.chain_count:
                self.new_chain()
            return self.open_chain
        values = (*args, *kwargs.values())
        givers = {value.call for value in values if isinstance(value, Companion)}
        joined = {self.chain_of[call] for call in givers}
        # a chain keeps what its latest call returned, and no more
        if any(self.chain_of[call] in self.chain_of[call + 1 :] for call in givers):
            raise UnsupportedError("a call of the loop is given the cache of one that others followed already")
        joined |= {self.lists[id(value)][1] for value in values if type(value) is list and id(value) in self.lists}
        if len(joined) > 1:
            raise UnsupportedError("a call of the loop joins the caches of two others, so calls cannot be dealt apart")
        if joined:
            chain = joined.pop()
        else:
            chain = self.chain_count
            self.chain_count += 1
        for value in values:
            if type(value) is list:
                # held, so that no other list can come to have its identity
                self.lists[id(value)] = (value, chain)
        return chain

    def recording(self) -> Recording:
        chains: dict[int, list[int]] = {}
        for index, chain in enumerate(self.chain_of):
            chains.setdefault(chain, []).append(index)
        return Recording(tuple(self.calls), tuple(tuple(chain) for chain in chains.values()))


def _frozen(value: Any, copy: bool) -> Any:
    """`value` with every list in it noted as it is now: its identity and its elements."""
    if type(value) is list:
        return SharedList(id(value), tuple(value))
    if type(value) is tuple:
        return tuple(_frozen(element, copy) for element in value)
    if type(value) is dict:
        return {name: _frozen(element, copy) for name, element in value.items()}
    return value.clone() if copy and isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class SharedList:
    """A list that the loop passed: which one, and what was in it at the first call, before anything ran."""

    identity: int
    elements: tuple[Any, ...]

"""The state that a network hands from latent frame to latent frame, kept between the chunks of a clip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halotile.decode.foresee import Past
from halotile.decode.patch import patched
from halotile.families import Causal, family_of
from halotile.spatial import Ledger, SpatialSpec, SpatialTensor


class Carried:
    """What each chain of a clip's calls was left with: a chain a tile, or a sample, in the order of their first calls.

    A chunk is the VAE's own decode of some latent frames, which starts every chain anew. The first call of a chain is
    given what the chain was left with in the chunk before instead, and what each call leaves is kept. Three ways:
    `run` does so for all calls of a chunk on this rank, sharded or not; `chain` for one chain of a loop whose chains
    were dealt to ranks, so that each rank keeps the state of its own; `foresee` in fake tensors, for all chains on
    every rank, while such a loop is recorded. Which way is taken must not change within a clip.
    """

    def __init__(self, vae: Any, causal: Causal, frames: int | None = None) -> None:
        self.frames = frames
        """latent frames of the whole clip, where that is known: what a strategy is chosen for"""
        family = family_of(vae)
        assert family is not None
        self.owners: tuple[int, ...] | None = None
        """the rank of each chain, once they were dealt"""
        self._vae = vae
        self._causal = causal
        self._clears = family.carries
        self._states: dict[int, Any] = {}
        self._foreseen: dict[int, Any] = {}
        self._caches: dict[int, int] = {}

    def run(self, work: Callable[[Any], Any], x: torch.Tensor) -> Any:
        """`work(x)`, the VAE's own decode of a chunk: one that continues the chunk before."""
        network = self._vae.decoder
        live = _Live(self, self._causal, network)
        with ExitStack() as stack:
            stack.enter_context(patched(network, forward=live.forward))
            if self._clears is not None:
                clear = getattr(self._vae, self._clears)
                clear()
                stack.callback(clear)
                stack.enter_context(patched(self._vae, **{self._clears: live.cleared(clear)}))
            output = work(x)
            # in here, where rows that nobody asked for yet can still be made
            self._states = {chain: _at_rest(state) for chain, state in self._states.items()}
        return output

    def chain(self, chain: int, network: Callable[..., Any]) -> Callable[..., Any]:
        """`network` for the calls of one chain of a chunk, which this rank has run in all chunks before."""
        begun = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            if not begun:
                kwargs, begun = self.resume(chain, args, kwargs), True
            output = network(*args, **kwargs)
            self.keep(chain, kwargs, output)
            return output

        return call

    def foresee(self, chain: int, past: Past, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let `past` be what the chain was left with; returns the arguments that its first call is given."""
        name, state = self._causal.name, self._foreseen.get(chain)
        if self._causal.where == "list":
            self._caches[chain] = id(kwargs[name])
        if state is None:
            return kwargs
        if self._causal.where == "list":
            past.lists[id(kwargs[name])] = list(state)
        elif self._causal.where == "returned":
            kwargs = {**kwargs, name: state}
        else:
            past.modules = state
        return self._not_first(kwargs)

    def foreseen(self, pasts: list[Past]) -> None:
        """All calls of a chunk are recorded; `pasts` is what they leave, a chain each."""
        for chain, past in enumerate(pasts):
            if self._causal.where == "list":
                self._foreseen[chain] = past.lists[self._caches[chain]]
            elif self._causal.where == "returned":
                self._foreseen[chain] = past.returned[max(past.returned)][0]
            else:
                self._foreseen[chain] = past.modules

    def resume(self, chain: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Put back what `chain` was left with, if anything; returns the arguments that its next call is to have."""
        if chain not in self._states:
            return kwargs
        ledger = next((value.ledger for value in args if isinstance(value, SpatialTensor)), None)
        state = _at_work(self._states[chain], ledger)
        if self._causal.where == "list":
            kwargs[self._causal.name][:] = state
        elif self._causal.where == "returned":
            kwargs = {**kwargs, self._causal.name: state}
        else:
            for part, value in zip(self._parts(), state, strict=True):
                setattr(part, self._causal.name, value)
        return self._not_first(kwargs)

    def keep(self, chain: int, kwargs: dict[str, Any], output: Any) -> None:
        """Keep what a call of `chain` left."""
        if self._causal.where == "list":
            self._states[chain] = kwargs[self._causal.name]
        elif self._causal.where == "returned":
            self._states[chain] = output[1]
        else:
            self._states[chain] = [getattr(part, self._causal.name) for part in self._parts()]

    def _not_first(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, self._causal.first: False} if self._causal.first in kwargs else kwargs

    def _parts(self) -> list[nn.Module]:
        """The modules of the network that keep state."""
        modules = self._vae.decoder.modules()
        return [module for module in modules if self._causal.name in vars(module)]


class _Live:
    """Stands in for a network's `forward` while the VAE's own decode of a chunk runs, and tells its chains apart."""

    def __init__(self, carried: Carried, causal: Causal, network: nn.Module) -> None:
        self._carried = carried
        self._causal = causal
        self._own = network.forward
        self._caches: list[Any] = []
        self._open = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        chain, first = self._chain(kwargs.get(self._causal.name))
        if first:
            kwargs = self._carried.resume(chain, args, kwargs)
        output = self._own(*args, **kwargs)
        self._carried.keep(chain, kwargs, output)
        return output

    def cleared(self, clear: Callable[[], object]) -> Callable[[], None]:
        """What stands in for `clear`, the method that clears state on modules: the next call starts a chain."""

        def clear_and_note() -> None:
            clear()
            self._open = False

        return clear_and_note

    def _chain(self, cache: Any) -> tuple[int, bool]:
        """The chain of a call that is given `cache`, and whether it is the first of it."""
        if self._causal.where == "list":
            # held, so that no other list can come to have its identity
            known = next((chain for chain, seen in enumerate(self._caches) if seen is cache), None)
            if known is not None:
                return known, False
        elif cache is not None or self._open:
            return len(self._caches) - 1, False
        self._open = self._causal.where == "modules"
        self._caches.append(cache)
        return len(self._caches) - 1, True


@dataclass(frozen=True)
class _Rows:
    """A sharded tensor between two calls: its ledger ends with each."""

    local: torch.Tensor
    spec: SpatialSpec
    strides: tuple[int, ...]


def _at_rest(state: Any) -> Any:
    """`state` without sharded tensors. All ranks call it: it may communicate."""
    if isinstance(state, SpatialTensor):
        return _Rows(state.local, state.spec, tuple(state.stride()))
    if isinstance(state, (list, tuple)):
        return [_at_rest(part) for part in state]
    if isinstance(state, dict):
        return {key: _at_rest(part) for key, part in state.items()}
    return state


def _at_work(state: Any, ledger: Ledger | None) -> Any:
    """`state` with its sharded tensors in the account of the call that is running."""
    if isinstance(state, _Rows):
        assert ledger is not None, "state of a sharded chunk, given to a call that is not sharded"
        return SpatialTensor(state.local, state.spec, ledger, None, state.strides)
    if isinstance(state, list):
        return [_at_work(part, ledger) for part in state]
    if isinstance(state, dict):
        return {key: _at_work(part, ledger) for key, part in state.items()}
    return state

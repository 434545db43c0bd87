"""Deal the calls of a VAE's own tile loop to ranks: record, run, deliver, replay (DESIGN.md, section 3.1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from halotile.comm import Call, Delivery, Piece, Ranks
from halotile.decode.carried import Carried
from halotile.decode.foresee import Companion
from halotile.decode.noise import Noise
from halotile.decode.record import NetworkCall, Recording, SharedList, network_of, record, stand_in
from halotile.errors import UnsupportedError
from halotile.families import Family, Half
from halotile.planning import Scheduler, deal, loads_of


@dataclass(frozen=True)
class Dealt:
    """A recording with a rank for each chain; made from shapes alone, so the same on every rank."""

    recording: Recording
    owners: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def digest(self) -> str:
        """A short name of the plan: which rank runs which calls, and what they return."""
        calls = [
            (call.outcome.shape, str(call.outcome.dtype), len(call.outcome.draws), call.cells)
            for call in self.recording.calls
        ]
        text = repr((self.recording.chains, self.owners, calls))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{len(self.owners)} chains of {len(calls)} calls, {name}"

    @property
    def draws(self) -> bool:
        """Whether any call draws noise."""
        return any(call.outcome.draws for call in self.recording.calls)

    @property
    def pieces(self) -> list[Piece]:
        """The results, in the order of the calls."""
        owner_of = {
            index: owner for chain, owner in zip(self.recording.chains, self.owners, strict=True) for index in chain
        }
        return [
            Piece(owner_of[index], call.outcome.shape, call.outcome.dtype)
            for index, call in enumerate(self.recording.calls)
        ]


def deal_loop(
    vae: Any,
    half: Half,
    family: Family | None,
    ranks: Ranks,
    scheduler: Scheduler,
    size: tuple[int, int],
    plain: Callable[[], object],
    carried: Carried | None = None,
) -> Dealt:
    """Record the calls that `plain` makes of the VAE's network, and give each chain of them a rank. No traffic.

    With `carried`, state of the chunks before, each chain stays with the rank that has its state.
    """
    recording = record(vae, half, family, size, plain, carried)
    owners = carried.owners if carried is not None else None
    if owners is None:
        owners = deal(recording.costs, ranks.size, scheduler)
    return Dealt(recording, owners, loads_of(recording.costs, owners, ranks.size))


def run_dealt(
    vae: Any,
    half: Half,
    family: Family | None,
    dealt: Dealt,
    call: Call,
    receivers: Sequence[int],
    device: torch.device,
    plain: Callable[[], object],
    carried: Carried | None = None,
) -> object:
    """Run this rank's calls, deliver the results to `receivers`, and there let the VAE's own loop blend them.

    Returns what `plain` returns, bit for bit what it would have without any of this; None on other ranks.
    """
    network, clear = network_of(vae, half), clearing(vae, family)
    noise = Noise(dealt.recording.calls, call, device)
    made: dict[int, torch.Tensor] = {}
    with call.together("work"):
        noise.foresee(dealt.recording.calls)
        for number, (chain, owner) in enumerate(zip(dealt.recording.chains, dealt.owners, strict=True)):
            if owner == call.ranks.rank:
                run = network if carried is None else carried.chain(number, network)
                made |= run_chain(run, dealt.recording.calls, chain, clear, noise, call.piece_done)
        if carried is not None:
            carried.owners = dealt.owners
        noise.finish()
        delivery = Delivery(made, dealt.pieces, call.ranks, receivers, device)
        call.note(json.dumps(list(delivery.layouts.items())).encode())
    del made
    layouts = (
        {index: tuple(strides) for note in call.notes("work") for index, strides in json.loads(note)}
        if call.ranks.rank in receivers
        else {}
    )
    with call.shared_fate():
        results = delivery.deliver(layouts)
    del delivery
    with call.together("end"):
        return replay(network, dealt.recording, results, plain) if results else None


def clearing(vae: Any, family: Family | None) -> Callable[[], object] | None:
    """The method that clears state which the VAE keeps on its modules, if it does."""
    return getattr(vae, family.carries) if family is not None and family.carries is not None else None


def run_chain(
    network: Callable[..., Any],
    calls: Sequence[NetworkCall],
    chain: Sequence[int],
    clear: Callable[[], object] | None,
    noise: Noise,
    piece_done: Callable[[], None],
) -> dict[int, torch.Tensor]:
    """Run one chain's calls in order, with caches of its own."""
    kept = _Kept()
    results: dict[int, torch.Tensor] = {}
    try:
        if clear is not None:
            clear()
        for index in chain:
            noise.before(index)
            output = network(*kept.real(calls[index].args), **kept.real(calls[index].kwargs))
            result, *rest = output if isinstance(output, (tuple, list)) else (output,)
            kept.companions = {(index, position): value for position, value in enumerate(rest)}
            if isinstance(result, FakeTensor) or result.device.type == "meta":
                raise RuntimeError(f"call {index} returned a tensor without values")
            results[index] = result
            piece_done()
    finally:
        if clear is not None:
            clear()
    return results


class _Kept:
    """What the calls of one chain hand on: gone with the chain, as nothing refers back to it."""

    def __init__(self) -> None:
        self.lists: dict[int, list[Any]] = {}
        self.companions: dict[tuple[int, int], Any] = {}

    def real(self, value: Any) -> Any:
        """A recorded argument as the call is to get it."""
        if isinstance(value, SharedList):
            return self.lists.setdefault(value.identity, [self.real(element) for element in value.elements])
        if isinstance(value, Companion):
            return self.companions[value.call, value.position]
        if type(value) is tuple:
            return tuple(self.real(element) for element in value)
        if type(value) is dict:
            return {name: self.real(element) for name, element in value.items()}
        return value


def replay(
    network: nn.Module,
    recording: Recording,
    results: dict[int, torch.Tensor],
    plain: Callable[[], object],
) -> object:
    """Run the VAE's own loop again; each call of its network returns its finished result, and drops it here."""
    served = 0

    def forward(*args: object, **kwargs: object) -> Any:
        nonlocal served
        if served == len(recording.calls):
            raise UnsupportedError(f"the loop made {served} calls when it was recorded, and more when it was replayed")
        companions = recording.calls[served].outcome.companions
        result = results.pop(served)
        served += 1
        return result if companions is None else (result, *[None] * companions)

    # the state that a clearing method would clear is not there: nothing ran on this rank's modules for these calls
    with stand_in(network, forward):
        output = plain()
    assert served == len(recording.calls), f"recorded {len(recording.calls)} calls, replayed {served}"
    return output

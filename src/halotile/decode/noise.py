"""Networks that draw noise: every rank sees the numbers that one rank would have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.comm import Call
from halotile.decode.record import NetworkCall


class Noise:
    """The default generator as it stands before each call of one rank's program order.

    The first rank's generator is taken for all, the draws of every call are repeated in order, and the states between
    them are kept: a call then draws the same numbers on whichever rank it runs, and afterwards every generator stands
    where one rank's would. Networks that draw nothing cost nothing.
    """

    def __init__(self, calls: Sequence[NetworkCall], call: Call, device: torch.device) -> None:
        self._device = device
        self._states: list[torch.Tensor] = []
        if any(each.outcome.draws for each in calls):
            self._states.append(Generators(device).states(call.notes("start")[0])[-1])

    def foresee(self, calls: Sequence[NetworkCall]) -> None:
        """Work out the states between `calls`."""
        if not self._states:
            return
        _set(self._device, self._states[0])
        for call in calls:
            for draw in call.outcome.draws:
                draw.again()
            self._states.append(_get(self._device) if call.outcome.draws else self._states[-1])

    def before(self, index: int) -> None:
        """Bring the generator to where it stands before call `index`."""
        if self._states:
            _set(self._device, self._states[index])

    def finish(self) -> None:
        """Bring the generator to where it stands after all calls."""
        if self._states:
            _set(self._device, self._states[-1])


class Generators:
    """The generators that a call may draw from: the CPU's, its device's, and those among its arguments, in order."""

    def __init__(self, device: torch.device, values: Sequence[Any] = ()) -> None:
        self._devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        self._given = [value for value in values if isinstance(value, torch.Generator)]

    def note(self) -> bytes:
        """How they stand; the first rank's note is taken by all."""
        return b"".join(bytes(state.numpy().tobytes()) for state in self._stand())

    def states(self, note: bytes) -> list[torch.Tensor]:
        """The states in a rank's note; the default generators' are first, the last of those is the device's."""
        sizes = [state.numel() for state in self._stand()]
        parts = torch.frombuffer(bytearray(note), dtype=torch.uint8).split(sizes)  # type: ignore[no-untyped-call]
        # set_state of a generator takes a tensor's memory from its beginning, wherever the tensor begins
        return [part.clone() for part in parts]

    def take(self, note: bytes) -> None:
        """Bring all to where a rank's stood."""
        states = self.states(note)
        for device, state in zip(self._devices, states, strict=False):
            _set(device, state)
        for generator, state in zip(self._given, states[len(self._devices) :], strict=True):
            generator.set_state(state)

    def _stand(self) -> list[torch.Tensor]:
        return [*(_get(device) for device in self._devices), *(generator.get_state() for generator in self._given)]


def _get(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

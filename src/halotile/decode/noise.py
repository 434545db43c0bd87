"""Networks that draw noise: every rank sees the numbers that one rank would have drawn."""

from __future__ import annotations

from collections.abc import Sequence

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
            self._states.append(torch.frombuffer(bytearray(call.notes("start")[0]), dtype=torch.uint8))

    @staticmethod
    def note(device: torch.device) -> bytes:
        """What the first rank notes for the others when they meet: how its generator stands."""
        return bytes(_get(device).numpy().tobytes())

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


def _get(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

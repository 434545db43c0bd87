"""Networks that draw noise: every rank sees the numbers that one rank would have drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halotile.comm import Ranks
from halotile.decode.record import NetworkCall


class Noise:
    """The default generator as it stands before each call of one rank's program order.

    The first rank's generator is taken for all, the draws of every call are repeated in order, and the states between
    them are kept: a call then draws the same numbers on whichever rank it runs, and afterwards every generator stands
    where one rank's would. Networks that draw nothing cost nothing.
    """

    def __init__(self, device: torch.device, states: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._states = states

    @classmethod
    def of(cls, calls: Sequence[NetworkCall], ranks: Ranks, device: torch.device) -> Noise:
        """The states before each of `calls` and after the last; a collective when there is anything to draw."""
        if not any(call.outcome.draws for call in calls):
            return cls(device, ())
        state = ranks.transport.broadcast(_get(device), 0)
        _set(device, state)
        states = [state]
        for call in calls:
            for draw in call.outcome.draws:
                draw.again()
            states.append(_get(device) if call.outcome.draws else states[-1])
        return cls(device, states)

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

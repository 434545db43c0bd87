"""Tiles of a decoder that draws noise: the same numbers on whichever rank a tile runs, and however many there are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class TileNoise:
    """Gives each tile of a grid random numbers of its own, made from the first rank's generators and its index.

    The first tile draws what one rank's untiled call would; every other one from a seed that is a digest of those
    states and its index. Afterwards the generators stand where they stood, or, where a tile drew, at a place that
    follows from the same states, alike on all ranks. `note` is the first rank's `Generators(...).note()`.
    """

    def __init__(self, note: bytes, device: torch.device, values: Sequence[Any]) -> None:
        given = [value for value in values if isinstance(value, torch.Generator)]
        of_device = []
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            of_device = [torch.cuda.default_generators[index]]
        self._generators = [torch.default_generator, *of_device, *given]
        self._note = note
        self.drew = False
        """Whether any tile so far did."""

    @contextmanager
    def tile(self, index: int) -> Iterator[None]:
        """The generators as tile `index` is to find them; they are put back afterwards."""
        before = [generator.get_state() for generator in self._generators]
        if index == 0:
            sizes = [state.numel() for state in before]
            noted = torch.frombuffer(bytearray(self._note), dtype=torch.uint8)
            for generator, state in zip(self._generators, noted.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                # set_state takes a tensor's memory from its beginning, wherever the tensor begins
                generator.set_state(state.clone())
        else:
            self._seed(str(index))
        found = [generator.get_state() for generator in self._generators]
        try:
            yield
            left = [generator.get_state() for generator in self._generators]
            self.drew |= not all(map(torch.equal, found, left))
        finally:
            self._set(before)

    def finish(self, drew: bool) -> None:
        """After the last tile: move the generators on if any tile, here or elsewhere, drew."""
        if drew:
            self._seed("after")

    def _seed(self, what: str) -> None:
        for place, generator in enumerate(self._generators):
            digest = hashlib.sha256(self._note + f"/{place}/{what}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

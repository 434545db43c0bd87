"""What the decode of a tile of any size holds at most: found from two small ones, without computing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from halotile.decode.follow import SIDES_LAT, follow
from halotile.decode.known import cache_path, key_of, read, write
from halotile.decode.memory import Watch
from halotile.errors import PlanError, UnsupportedError
from halotile.planning.situation import Term, peak_of

# bytes of what is not followed: numbers that a loop over rows makes, once a row
_NUMBERS = 256


@dataclass(frozen=True)
class Footprint:
    """The peak of live activation bytes of one decode, by the latent cells (height x width) of its tile.

    `terms` are what is alive together at the moments that can be the peak; which one it is depends on the size. A
    dense attention mask has a value for each pair of cells, and outgrows all else.

    Example: terms (0, 100, 0) and (0, 20, 1) hold 5,000 bytes for 50 cells, but 12,000 for 100.
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if not self.terms or not all(0 <= number < math.inf for term in self.terms for number in term):
            raise PlanError(f"a footprint has at least one term, of numbers from 0: got {self.terms}")

    def peak_bytes(self, cells: int) -> int:
        """Predicted bytes for a tile of so many cells."""
        peak = peak_of(self.terms, cells)
        assert peak is not None
        return peak


# where the file cannot be written, for as long as this process lives
_UNKEPT: dict[str, Footprint] = {}


def footprint_of(vae: Any, latent_shape: Sequence[int]) -> Footprint:
    """The footprint of decoding tiles of latents `B C [F] H W`; height and width of `latent_shape` do not matter.

    Measured once for each class, configuration, dtype, batch, number of frames and loop over them, and kept in
    `footprints.json` (`halotile.decode.known`). Delete it to measure anew.
    """
    path, key = cache_path("footprints.json"), key_of(vae, latent_shape)
    known = read(path)
    try:
        return Footprint(tuple((float(f), float(a), float(b)) for f, a, b in known[key]["terms"]))
    except (KeyError, TypeError, ValueError, OverflowError, PlanError):
        pass
    if key not in _UNKEPT:
        measured = measure(vae, latent_shape)
        about = "bytes, bytes a latent cell, bytes a pair of cells"
        if write(path, known | {key: {"terms": measured.terms, "about": about}}):
            return measured
        _UNKEPT[key] = measured
    return _UNKEPT[key]


def measure(vae: Any, latent_shape: Sequence[int]) -> Footprint:
    """Follow two decodes of small tiles under FakeTensorMode: every tensor's bytes are real, no value is computed.

    Each tensor that appears in both grows with the cells, with their square or not at all, which its two sizes tell;
    then what is alive at each moment is known for tiles of any size. Kernels' own workspaces are not seen.

    Raises UnsupportedError when the class cannot be followed without data.
    """
    sides = SIDES_LAT
    small, large = ([*_changes(vae, (*latent_shape[:-2], side, side))] for side in sides)
    if [number for number, _ in small] != [number for number, _ in large]:
        raise UnsupportedError(
            f"{type(vae).__name__} makes other tensors for tiles of {sides[1]} latents than of {sides[0]}, so what a "
            "larger tile holds does not follow from small ones"
        )
    if not small:
        raise UnsupportedError(f"{type(vae).__name__} is on the meta device, where nothing holds memory")
    alive, moments = (0.0, 0.0, 0.0), set()
    for (_, before), (_, after) in zip(small, large, strict=True):
        fixed, a, b = _growth(abs(before), abs(after), sides[0] ** 2, sides[1] ** 2)
        sign = 1 if after > 0 else -1
        alive = (alive[0] + sign * fixed, alive[1] + sign * a, alive[2] + sign * b)
        moments.add(alive)
    return Footprint(tuple(_largest(moments)))


class _Changes(Watch):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, int]] = []
        self._order: dict[int, int] = {}

    def change(self, number: int, size: int) -> None:
        if abs(size) >= _NUMBERS:
            self.all.append((self._order.setdefault(number, len(self._order)), size))


def _changes(vae: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The storages of a decode in the order in which they come and go."""
    watch = _Changes()
    result = follow(vae, "decode", shape, watch)
    # what is let go of after the decode is not its business
    found = list(watch.all)
    del result
    return found


def _growth(small: int, large: int, small_cells: int, large_cells: int) -> Term:
    """How a tensor of `small` bytes in the one tile and `large` in the other grows; the larger one says how much."""
    steps = math.log(large / small, large_cells / small_cells) if small and large else 1.0
    power = min(2, max(0, round(steps)))
    each = large / large_cells**power
    return (each if power == 0 else 0.0, each if power == 1 else 0.0, each if power == 2 else 0.0)


def _largest(moments: Iterable[Term]) -> list[Term]:
    """Those of which no other is at least as large in everything."""
    kept: list[Term] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(theirs >= ours for theirs, ours in zip(other, moment, strict=True)) for other in kept):
            kept.append(moment)
    return kept

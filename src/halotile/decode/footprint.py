"""What the decode of a tile of any size holds at most: found from two small ones, without computing them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.decode.foresee import restored
from halotile.decode.memory import Watch
from halotile.decode.patch import patched
from halotile.errors import PlanError, UnsupportedError
from halotile.families import takes_timestep
from halotile.families.cuts import temporal_chunks

Term = tuple[float, float, float]
"""Bytes that do not grow, bytes a latent cell, bytes a pair of latent cells."""

# latents along height and width of the smaller of the two tiles; the other has twice as many
_SIDE_LAT = 16
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
        return math.ceil(max(fixed + cells * (a + cells * b) for fixed, a, b in self.terms))


def footprint_of(vae: Any, latent_shape: Sequence[int]) -> Footprint:
    """The footprint of decoding tiles of latents `B C [F] H W`; height and width of `latent_shape` do not matter.

    Measured once for each class, configuration, dtype, batch, number of frames and loop over them, and kept in
    `cache_path()`, a JSON file. Delete it to measure anew; one that cannot be read or written is done without.
    """
    path, key = cache_path(), _key(vae, latent_shape)
    known = _read(path)
    try:
        return Footprint(tuple((float(f), float(a), float(b)) for f, a, b in known[key]["terms"]))
    except (KeyError, TypeError, ValueError, PlanError):
        pass
    measured = measure(vae, latent_shape)
    _write(path, known | {key: {"terms": measured.terms, "about": "bytes, bytes a latent cell, bytes a pair of cells"}})
    return measured


def measure(vae: Any, latent_shape: Sequence[int]) -> Footprint:
    """Follow two decodes of small tiles under FakeTensorMode: every tensor's bytes are real, no value is computed.

    Each tensor that appears in both grows with the cells, with their square or not at all, which its two sizes tell;
    then what is alive at each moment is known for tiles of any size. Kernels' own workspaces are not seen.

    Raises UnsupportedError when the class cannot be followed without data.
    """
    sides = (_SIDE_LAT, 2 * _SIDE_LAT)
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


def cache_path() -> Path:
    """The file of measured footprints: `$HALOTILE_CACHE/footprints.json`, by default in the user's cache folder."""
    folder = os.environ.get("HALOTILE_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "halotile")
    return Path(folder) / "footprints.json"


class _Changes(Watch):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, int]] = []
        self._order: dict[int, int] = {}

    def change(self, number: int, size: int) -> None:
        if abs(size) >= _NUMBERS:
            self.all.append((self._order.setdefault(number, len(self._order)), size))


def _changes(vae: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The storages of a decode in the order in which they come and go; the VAE is left as it was."""
    weight = next(iter(vae.parameters()))
    tiling = {"use_tiling": False} if hasattr(vae, "use_tiling") else {}
    watch = _Changes()
    try:
        with (
            torch.no_grad(),
            restored(list(vae.modules())),
            patched(vae, **tiling),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            latents = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            more = {"temb": latents.new_zeros(shape[0])} if takes_timestep(vae) else {}
            with watch:
                # not what `parallelize` put in its place: planning is no call of a group
                result = type(vae).decode(vae, latents, **more)
            # what is let go of after the decode is not its business
            found = list(watch.all)
            del result
    except Exception as error:
        raise UnsupportedError(
            f"what a tile of {type(vae).__name__} holds cannot be told without data: {type(error).__name__}: {error}"
        ) from error
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


def _key(vae: Any, latent_shape: Sequence[int]) -> str:
    weight = next(iter(vae.parameters()))
    config = json.dumps(dict(vae.config), sort_keys=True, default=str)
    # a loop over frames holds its chunks
    chunks = temporal_chunks(vae, tuple(latent_shape))
    # what programs set on a VAE, and takes part in what a decode holds
    settings = {name: value for name, value in vars(vae).items() if isinstance(value, (bool, int, float, str))}
    settings = {name: value for name, value in settings.items() if not name.startswith(("tile_", "use_tiling"))}
    processors = sorted({type(part.processor).__name__ for part in vae.modules() if hasattr(part, "processor")})
    kind = weight.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    set_to = f"{sorted(settings.items())} {processors} {autocast}"
    facts = f"{config} {chunks} {set_to} torch {torch.__version__} diffusers {version('diffusers')} {kind}"
    lead = " x ".join(map(str, latent_shape[:-2]))
    return f"{type(vae).__name__} {str(weight.dtype)[6:]} {lead} {hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1))
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()

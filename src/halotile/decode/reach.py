"""How far a network of convolutions looks: where tiles may be blended so that nothing differs from the whole."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from halotile.decode.door import tensor_of
from halotile.decode.record import stand_in
from halotile.families import Half
from halotile.planning.latent_grid import LatentGrid

_known: WeakKeyDictionary[nn.Module, dict[Any, tuple[int | None, ...]]] = WeakKeyDictionary()
_lock = Lock()
Margins = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
NO_MARGINS: Margins = ((0, 0), (0, 0), (0, 0))


def margins_of(vae: Any, half: Half, x: torch.Tensor, grid: LatentGrid, work: Callable[[Any], Any]) -> Margins:
    """Cells of the result, at the beginning and end of a cut tile, that depend on what was cut off; a pair a dim.

    A tile need not count where it is wrong: with an overlap of the receptive field or more, there is always a tile that
    is right. Only for networks whose weights are all in convolutions, and where overlaps are that large; else (0, 0):
    then tiles are mixed over all that they share, which hides best what differs. Found out on a few latents: NaNs
    at one end spread exactly as far as the network looks. Frames with a leading one are left out: what comes first in
    a tile is treated in another way there than in the whole.
    """
    network = getattr(vae, "decoder" if half == "decode" else "encoder", None)
    if getattr(vae, "use_tiling", False) or not isinstance(network, nn.Module) or not _of_convolutions(network):
        return NO_MARGINS
    found = []
    for dim, (tiling, along) in enumerate(zip(grid.tilings, grid.maps, strict=True)):
        room = min(tiling.overlaps, default=0)
        # the least that can be shared is two cells, one on each side that looks one latent far
        found.append((0, 0) if room < 2 or along.leads else _margin(network, half, x, grid, dim, room, work))
    return found[0], found[1], found[2]


def _of_convolutions(network: nn.Module) -> bool:
    owners = [part for part in network.modules() if next(part.parameters(recurse=False), None) is not None]
    return bool(owners) and all(isinstance(part, _ConvNd) for part in owners)


def _margin(
    network: nn.Module, half: Half, x: torch.Tensor, grid: LatentGrid, dim: int, room: int, work: Callable[[Any], Any]
) -> tuple[int, int]:
    """Margins along `dim`, if both fit into overlaps of `room` latents; else (0, 0)."""
    units = [along.ratio if half == "encode" else 1 for along in grid.maps]
    shape = list(x.shape)
    for place in range(5 - x.dim(), 3):
        along, length = grid.maps[place], grid.tilings[place].length
        latents = room + 1 if place == dim else min(max(2, along.thinnest), length)
        # a causal autoencoder takes one frame, but not any number
        shape[place - 3] = latents * units[place] if place else latents * units[0] if dim == 0 else 1
    key = (half, dim, tuple(shape[1:]), x.dtype, network.training)
    known = _known.setdefault(network, {})
    if key not in known:
        # random numbers, hooks and a forward that is set for a while are the process's, not the thread's
        with _lock:
            known[key] = tuple(
                _far(network, x.new_zeros([1, *shape[1:]]), dim - 3, units[dim], end, work) for end in (0, 1)
            )
    made = 1 if half == "encode" else grid.maps[dim].ratio
    # the beginning of a tile misses what lies before it, which reaches as far as NaNs at the beginning do
    before, after = (room * made if far is None else max(0, far - made) for far in known[key])
    return (before, after) if before + after <= room * made else (0, 0)


def _far(
    network: nn.Module, probe: torch.Tensor, dim: int, unit: int, end: int, work: Callable[[Any], Any]
) -> int | None:
    """How many cells of the result the first (or last) latent of `probe` reaches; None where it cannot be said."""
    probe.narrow(dim, 0 if end == 0 else probe.shape[dim] - unit, unit).fill_(float("nan"))
    devices = [probe.device] if probe.device.type == "cuda" else []
    try:
        # hooks are for the calls that make something
        with torch.random.fork_rng(devices=devices), stand_in(network, network.forward):
            result = tensor_of(work(probe))
    except Exception:
        # too few cells for it, say; then nothing is known, as of most networks
        return None
    assert result is not None
    reached = torch.nonzero(result.isnan().movedim(dim, -1).flatten(0, -2).any(0)).flatten()
    if not len(reached):
        return 0
    return int(reached[-1]) + 1 if end == 0 else result.shape[dim] - int(reached[0])

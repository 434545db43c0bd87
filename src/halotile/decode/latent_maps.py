"""How one autoencoder's latents become its sample, along frames, height and width: from its row, or by a look."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.decode.door import tensor_of
from halotile.errors import HalotileError, UnsupportedError
from halotile.families import Half, family_of
from halotile.planning.latent_grid import LatentMap
from halotile.planning.tilings import Tiling, splits_frames

Maps = tuple[LatentMap, LatentMap, LatentMap]


def maps_of(vae: Any, half: Half, x: torch.Tensor, tiling: Tiling, work: Callable[[Any], Any]) -> Maps:
    """How cells become cells along frames, height and width, for an input `x` of `half` and its call `work`.

    Of a class with a row its facts; else the call is followed once with fake tensors, which computes nothing. Frames
    that are not to be split (those of a picture, too) need no map: they are cells of their own. Raises UnsupportedError
    where nothing can be found out.
    """
    family = family_of(vae)
    if family is None:
        return _seen(vae, half, x, tiling, work)
    if family.no_grid:
        raise UnsupportedError(f"{type(vae).__name__} cannot {half} with tiling=: {family.no_grid}")
    side = LatentMap(family.ratio(vae), thinnest=family.min_tile_lat(vae, half))
    if not splits_frames(tiling) or x.dim() == 4:
        return LatentMap(1), side, side
    if family.frames is None or family.frames.apart:
        reason = family.frames.apart if family.frames else "halotile does not know how its latent frames become frames"
        return LatentMap(1, apart=f"{type(vae).__name__}: {reason}"), side, side
    return LatentMap(family.frames.ratio(vae), leads=True), side, side


def _seen(vae: Any, half: Half, x: torch.Tensor, tiling: Tiling, work: Callable[[Any], Any]) -> Maps:
    shape = _shape_of_result(vae, half, x, work)
    if len(shape) != x.dim():
        raise UnsupportedError(
            f"{half} of {type(vae).__name__} makes {len(shape)} dims of {x.dim()}, so tiles have no place in its result"
        )
    here, there = tuple(x.shape), shape
    latents, sample = (here, there) if half == "decode" else (there, here)
    found = []
    for name, dim in (("height", -2), ("width", -1)):
        ratio, rest = divmod(sample[dim], max(latents[dim], 1))
        if rest or not ratio:
            raise UnsupportedError(
                f"{half} of {type(vae).__name__} makes {there[dim]} cells of {here[dim]} along {name}, which is no "
                "whole ratio, so tiles have no place in its result"
            )
        found.append(LatentMap(ratio))
    if not splits_frames(tiling) or x.dim() == 4:
        return LatentMap(1), found[0], found[1]
    frames, samples = latents[2], sample[2]
    if samples % frames == 0:
        return LatentMap(samples // frames), found[0], found[1]
    if frames > 1 and (samples - 1) % (frames - 1) == 0:
        return LatentMap((samples - 1) // (frames - 1), leads=True), found[0], found[1]
    raise UnsupportedError(
        f"{half} of {type(vae).__name__} makes {there[2]} frames of {here[2]}, which is neither n * ratio nor "
        "1 + (n - 1) * ratio, so tiles of frames have no place in its result"
    )


def _shape_of_result(vae: Any, half: Half, x: torch.Tensor, work: Callable[[Any], Any]) -> tuple[int, ...]:
    network = getattr(vae, "decoder" if half == "decode" else "encoder", None)
    parts = [module for part in (vae, network) if isinstance(part, nn.Module) for module in part.modules()]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []))
        # caches that a network keeps on itself must not be fakes when it runs
        stack.enter_context(_nothing_kept(list(dict.fromkeys(parts))))
        try:
            with mode:
                made = tensor_of(work(mode.from_tensor(x)))
        except HalotileError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"how {half} of {type(vae).__name__} maps latents to its sample cannot be seen without computing it "
                f"({type(error).__name__}: {error}), and it has no row in halotile.families"
            ) from error
    assert made is not None
    return tuple(made.shape)


@contextmanager
def _nothing_kept(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Take back what modules set on themselves, and only that: other threads may be running them."""
    before = [dict(vars(part)) for part in parts]
    lists = [[(value, list(value)) for value in was.values() if type(value) is list] for was in before]
    try:
        yield
    finally:
        for part, was, held in zip(parts, before, lists, strict=True):
            for name in [name for name, value in vars(part).items() if name not in was or value is not was[name]]:
                if name in was:
                    vars(part)[name] = was[name]
                else:
                    del vars(part)[name]
            for value, elements in held:
                if len(value) != len(elements) or any(map(operator.is_not, value, elements)):
                    value[:] = elements

"""A tile loop that stands in for the one of a class that knows squares alone: any window and overlap an axis."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from halotile.families import AxisLoop, Family, Half, Overlaid, family_of

Loops = tuple[AxisLoop, AxisLoop]
Run = Callable[[torch.Tensor], torch.Tensor]


def stand_ins(vae: Any, half: Half) -> dict[str, Callable[..., Any]]:
    """The method that runs the class's loop and what stands in for it, where attributes are set that it does not know.

    Mostly nothing. The stand-in reads the attributes when it is called, and calls `vae.decoder` (or `encoder`) and the
    class's own blending just as the class's loop does, so that it is recorded and dealt like that.
    """
    family = family_of(vae)
    if family is None or family.rectangles is None or own_loop_does(vae, half, family):
        return {}
    method = family.rectangles.decode if half == "decode" else family.rectangles.encode

    def loop(x: torch.Tensor, return_dict: bool = True) -> Any:
        return _finished(family, half, run_loop(vae, half, family, x), return_dict)

    return {method: loop}


def own_loop_does(vae: Any, half: Half, family: Family) -> bool:
    """Whether the class's own loop does what is set, the attributes that it does not know included."""
    layout, ratio = family.layout, family.ratio(vae)
    if all(getattr(vae, name, None) is None for name in layout.extra_names):
        return True
    own: Any = Overlaid(vae, dict.fromkeys(layout.extra_names))
    return [_cut(loop) for loop in layout.axes(vae, half, 1, 1, ratio)] == [
        _cut(loop) for loop in layout.axes(own, half, 1, 1, ratio)
    ]


def run_loop(vae: Any, half: Half, family: Family, x: torch.Tensor) -> torch.Tensor:
    """Decode (or encode) `x` tile by tile, as the attributes say; one tile where the window holds all of it."""
    parts = family.rectangles
    assert parts is not None

    def run(tile: torch.Tensor) -> torch.Tensor:
        if half == "decode":
            return vae.decoder(parts.before_decoder(vae, tile))  # type: ignore[no-any-return]
        return parts.after_encoder(vae, vae.encoder(tile))  # type: ignore[no-any-return]

    height, width, ratio = x.shape[-2], x.shape[-1], family.ratio(vae)
    if not family.layout.enters(vae, half, height, width, ratio):
        return run(x)
    loops = family.layout.axes(vae, half, height, width, ratio)
    return _MIXED[parts.mix](vae, x, loops, run)


def _blended(vae: Any, x: torch.Tensor, loops: Loops, run: Run) -> torch.Tensor:
    """Each tile blended with the one above, then with the one to the left, then cut: AutoencoderKL.tiled_decode."""
    tall, wide = loops
    tiles = [[run(x[..., i : i + tall.window, j : j + wide.window]) for j in wide.starts] for i in tall.starts]
    rows = []
    for i, row in enumerate(tiles):
        cut = []
        for j, tile in enumerate(row):
            if i > 0:
                tile = vae.blend_v(tiles[i - 1][j], tile, tall.blend)  # noqa: PLW2901 - in place, as the class does it
            if j > 0:
                tile = vae.blend_h(row[j - 1], tile, wide.blend)  # noqa: PLW2901
            cut.append(tile[..., : tall.kept, : wide.kept])
        rows.append(torch.cat(cut, dim=-1))
    return torch.cat(rows, dim=-2)


def _masked(vae: Any, x: torch.Tensor, loops: Loops, run: Run) -> torch.Tensor:
    """Each result laid over what is there with ramps at its upper and left edge: AutoencoderTiny._tiled_decode."""
    tall, wide = loops
    ramps = [(torch.arange(loop.out(loop.window)) / (loop.blend - 1)).clamp(0, 1).to(x.device) for loop in loops]
    out: torch.Tensor | None = None
    for i in tall.starts:
        for j in wide.starts:
            tile = run(x[..., i : i + tall.window, j : j + wide.window])
            if out is None:
                # as the class has it: in float32 whatever the network returns
                sides = tall.out(tall.length), wide.out(wide.length)
                out = torch.zeros(*tile.shape[:-2], *sides, device=x.device)
            h, w = tile.shape[-2:]
            place = out[..., tall.out(i) : tall.out(i) + h, wide.out(j) : wide.out(j) + w]
            down = torch.ones_like(ramps[0]) if i == 0 else ramps[0]
            right = torch.ones_like(ramps[1]) if j == 0 else ramps[1]
            mask = (down[:, None] * right[None, :])[:h, :w]
            place.copy_(mask * tile + (1 - mask) * place)
    assert out is not None
    return out


_MIXED = {"blend": _blended, "mask": _masked}


def _cut(loop: AxisLoop) -> tuple[int, int, int, int]:
    return loop.window, loop.stride, loop.kept, loop.blend


def _finished(family: Family, half: Half, result: torch.Tensor, return_dict: bool) -> Any:
    """The result in the form in which the class's own method returns it."""
    assert family.rectangles is not None
    if half == "encode" or (return_dict and not family.rectangles.wraps):
        return result
    if not return_dict:
        return (result,)
    # only its classes come here, so diffusers is there
    return importlib.import_module("diffusers.models.autoencoders.vae").DecoderOutput(sample=result)

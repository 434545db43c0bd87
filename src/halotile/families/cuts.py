"""How a class's loops cut a decode: the tiles of one axis for any window, and the chunks of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halotile.errors import PlanError
from halotile.families.axis_loop import AxisLoop
from halotile.families.check import temporal_loop_runs
from halotile.families.rows import family_of
from halotile.geometry import DimTiling, tile_by_loop


def cut_of(vae: Any) -> Callable[[int, int, int], DimTiling]:
    """The tiles that the loop of `vae`'s class cuts along an axis: a function of (length, window, stride) in latents.

    Where the loop would lose the last rows (Allegro's, which makes whole tiles alone) they are those of a loop that
    clips its last tile: `possible` refuses such a request.
    """
    family = family_of(vae)
    last = "clip" if family is None else family.layout.axes(vae, "decode", 1, 1, family.ratio(vae))[0].last

    def cut(length: int, window: int, stride: int) -> DimTiling:
        try:
            return AxisLoop(
                "height", "decode", length, window, stride, stride, window - stride, 1, str(window), str(stride),
                last=last,
            ).tiling  # fmt: skip
        except PlanError:
            return tile_by_loop(length, window, stride)

    return cut


def temporal_chunks(vae: Any, shape: tuple[int, ...]) -> DimTiling | None:
    """The chunks of latent frames that the class's own loop over frames decodes; None where it does not run.

    A chunk has the window's latent frames and one more before it, of which the first frame of pixels comes; 12 latent
    frames with a window of 16 frames, a stride of 12 and 4 frames a latent are [0, 5) [3, 8) [6, 11) [9, 12).
    """
    family = family_of(vae)
    if family is None or family.temporal is None or not temporal_loop_runs(vae, "decode", shape):
        return None
    ratio = vae.temporal_compression_ratio
    window, stride = (int(getattr(vae, name)) // ratio for name in (family.temporal.window, family.temporal.stride))
    return tile_by_loop(shape[2], window + 1, stride)

"""`tiled_decode_for`: what to call in place of a VAE's own `tiled_decode` for windows that this one does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Group, Ranks
from halotile.decode.options import Options
from halotile.decode.run import run_call
from halotile.decode.stitch import stand_ins


def tiled_decode_for(
    vae: Any, group: Group | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Callable[..., Any] | None:
    """None when the VAE's own tile loop does what is set on it; else what to call in place of `vae.tiled_decode`.

    The classes whose own loop knows one square window (AutoencoderKL, Flux2, KVAE, HunyuanImage, AutoencoderTiny), or
    one overlap factor for two axes (HunyuanVideo 1.5), ignore the rectangles and overlaps an axis that
    `tile_shape_plan` and `tile_overlap_plan` give them. The stand-in decodes them: `loop(z, return_dict=True)` takes
    latents `B C H W` (`B C F H W`) and returns what the class's own method does (a bare tensor for AutoencoderTiny,
    where it is called `_tiled_decode`, and HunyuanVideo 1.5). It blends as the class does, and is bitwise equal to the
    class's own loop on what both can do. It reads the attributes when it is called.

    With `group` its tiles are dealt to the ranks, all of which call it with the same latents; the result is bitwise
    that of one rank, and every rank gets it. `parallelize` does all this by itself, also for `encode`.

    >>> apply_tile_plan(vae, tile_shape_plan(vae, 432, 296))
    >>> loop = tiled_decode_for(vae)
    >>> picture = (loop or vae.tiled_decode)(latents, return_dict=False)[0]

    Raises UnsupportedError and PlanError for what the class cannot decode, when the dealt stand-in is called, and
    MembershipError when this process is not in `group`.
    """
    method, loop = next(iter(stand_ins(vae, "decode").items()), (None, None))
    if method is None or loop is None or group is None:
        return loop
    ranks = Ranks.of(group, timeout_s)
    options = Options(strategy="tile")

    def own(x: torch.Tensor, return_dict: bool = True) -> Any:
        # the attributes may have changed since
        now = stand_ins(vae, "decode").get(method) or getattr(type(vae), method).__get__(vae)
        return now(x) if return_dict else now(x, return_dict=False)

    def dealt(z: torch.Tensor, return_dict: bool = True) -> Any:
        kwargs = {} if return_dict else {"return_dict": False}
        return run_call(vae, "decode", own, z, (), kwargs, ranks, options)[0]

    return dealt

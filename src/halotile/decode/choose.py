"""Which strategy runs a call, and what it needs of the VAE's own loops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from halotile.comm import Ranks
from halotile.decode.options import Options
from halotile.decode.patch import patched
from halotile.decode.stitch import stand_ins
from halotile.errors import UnsupportedError
from halotile.families import UNREAD, Half, check_frames, check_loop, family_of, temporal_loop_runs
from halotile.planning.tilings import Tiling, splits_frames


def check_class(vae: Any, halves: Sequence[Half], options: Options) -> None:
    """Raise UnsupportedError, with class and reason, if the class of `vae` can never do what `options` ask."""
    name = type(vae).__name__
    for half in halves:
        if not callable(getattr(vae, half, None)):
            hint = "; pass the pipeline's .vae" if hasattr(vae, "vae") else ""
            raise UnsupportedError(f"{name} has no method {half!r}{hint}")
    if options.tiling is not None:
        check_grid_class(vae, options.tiling)
    elif options.strategy in ("tile", "hybrid"):
        reason = no_tile_loop(vae, halves)
        if reason is not None:
            raise UnsupportedError(f"{name} cannot be run with strategy={options.strategy!r}: {reason}")


def choose(vae: Any, half: Half, options: Options, ranks: Ranks) -> tuple[str, str]:
    """The strategy that runs, and why."""
    if options.tiling is not None:
        return "tile", "tiling= was given"
    if options.strategy != "auto":
        return options.strategy, f"strategy={options.strategy!r} was asked for"
    if ranks.size == 1:
        return "serial", "auto: serial, since the group has one rank"
    if not getattr(vae, "use_tiling", False):
        return "serial", "auto: serial, since tiling is off and there is nothing to deal"
    missing = no_tile_loop(vae, [half])
    if missing is not None:
        return "serial", f"auto: serial, since {missing}"
    return "tile", "auto: tile, since tiling is on"


def check_grid_class(vae: Any, tiling: Tiling) -> None:
    """Raise UnsupportedError if tiles of `tiling` can never be laid over what the class of `vae` decodes."""
    family = family_of(vae)
    if family is None:
        return
    frames = family.frames.apart if family.frames is not None and splits_frames(tiling) else ""
    if family.no_grid or frames:
        asked = "tiling=" if family.no_grid else "a tiling= that cuts frames"
        raise UnsupportedError(f"{family.name} cannot be run with {asked}: {family.no_grid or frames}")


def prepare(vae: Any, half: Half, shape: tuple[int, ...], strategy: str, stack: ExitStack) -> str:
    """Set the VAE's own loops for the call as `strategy` needs them, and say what else was changed for it."""
    if strategy == "shard":
        check_frames(vae, half, shape)
        if getattr(vae, "use_tiling", False):
            stack.enter_context(patched(vae, use_tiling=False))
            return "; the VAE's own tiling was off for this call"
        return ""
    if strategy in ("tile", "hybrid"):
        stack.enter_context(patched(vae, use_tiling=True))
    if not (getattr(vae, "use_tiling", False) or temporal_loop_runs(vae, half, shape)):
        return ""
    mended = check_loop(vae, half, shape)
    loops = stand_ins(vae, half)
    stack.enter_context(patched(vae, **mended, **loops))
    notes = [
        f"; {name} set to {value} for this call: the last tile was thinner than the class takes"
        for name, value in mended.items()
    ]
    notes += [f"; halotile's loop stood in for {name}, which does not know such a window" for name in loops]
    return "".join(notes)


def no_tile_loop(vae: Any, halves: Sequence[Half]) -> str | None:
    if not hasattr(vae, "use_tiling"):
        return "the class has no tile loop of its own (no attribute use_tiling)"
    unread = next((UNREAD[cls.__name__] for cls in type(vae).__mro__ if cls.__name__ in UNREAD), None)
    if unread is not None:
        return f"the class has no tile loop of its own: {unread}"
    for half in halves:
        name = "decoder" if half == "decode" else "encoder"
        if not isinstance(getattr(vae, name, None), torch.nn.Module):
            return f"it has no module named {name!r}, whose calls could be dealt to ranks"
    return None

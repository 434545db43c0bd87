"""What of a clip can be decoded once some of its latent frames are there, and which frames are then finished."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from halotile.decode.carried import Carried
from halotile.decode.patch import patched
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Causal, Family, Windows, check_frames

Piece = tuple[int, int]
"""Latent frames to decode next, and how many of them are not needed again."""


class FrameLoop(Protocol):
    """One clip's way through its latent frames."""

    @property
    def carried(self) -> Carried | None:
        """The state that pieces hand on."""

    @property
    def off(self) -> dict[str, Any]:
        """Attributes of the VAE to set while a piece is decoded."""

    def due(self, have: int, ended: bool) -> Piece | None:
        """The next piece when `have` latent frames wait, and no more will come if `ended`; None for none yet."""

    def finished(self, decoded: torch.Tensor) -> torch.Tensor:
        """The finished frames, given what the piece that was due was decoded to."""

    def rest(self) -> torch.Tensor | None:
        """Frames that are finished only now that the clip has ended."""


def loop_of(vae: Any, family: Family, total: int | None, shape: tuple[int, ...]) -> FrameLoop:
    """The loop of `vae` for a clip of `total` latent frames (None: not known), whose first chunk has `shape`.

    Raises PlanError for windows that would lose or shift frames, UnsupportedError for what the class cannot do.
    """
    if family.causal is not None:
        reason = family.causal.refuse(vae, shape)
        if reason is not None:
            raise UnsupportedError(f"{type(vae).__name__} cannot be decoded in chunks: {reason}")
        return CausalLoop(Carried(vae, family.causal, total), family.causal.batch(vae), total)
    assert family.windows is not None
    windows = family.windows(vae)
    if family.temporal is not None:
        with patched(vae, **{family.temporal.decode_flag: True}):
            check_frames(vae, "decode", (*shape[:2], max(windows.window, shape[2]), *shape[3:]))
    return WindowLoop(windows)


def check_total(vae: Any, causal: Causal | None, total: int | None) -> None:
    """Raise PlanError unless the number of a clip's latent frames can be `total`; None says that it is not known."""
    if total is not None and (type(total) is not int or total < 1):
        raise PlanError(f"frames={total!r}: give the clip's number of latent frames, at least 1, or None")
    batch = 1 if causal is None else causal.batch(vae)
    if total is None and batch > 1:
        raise PlanError(
            f"{type(vae).__name__} decodes {batch} latent frames at a time, and what the clip has more than a multiple "
            "of that comes with the first: give frames=, the number of latent frames of the whole clip"
        )


class CausalLoop:
    """Chunk after chunk, each with the state that the one before left."""

    def __init__(self, carried: Carried, batch: int, total: int | None) -> None:
        self.carried = carried
        self.off: dict[str, Any] = {}
        self._batch = batch
        self._total = total
        self._begun = False

    def due(self, have: int, ended: bool) -> Piece | None:
        batch = self._batch
        if self._begun or self._total is None:
            ready = have - have % batch
        else:
            # what is more than a multiple of a batch comes with the first one
            ready = have - (have - self._total) % batch
            ready = ready if ready >= min(batch, self._total) else 0
        self._begun = self._begun or ready > 0
        return (ready, ready) if ready else None

    def finished(self, decoded: torch.Tensor) -> torch.Tensor:
        return decoded

    def rest(self) -> torch.Tensor | None:
        return None


class WindowLoop:
    """Window after window, blended over the frames that two have in common, as the class's own loop does."""

    carried = None

    def __init__(self, windows: Windows) -> None:
        self.off = dict(windows.off)
        self._windows = windows
        self._begun = self._short = False
        self._earlier: torch.Tensor | None = None
        self._rest: torch.Tensor | None = None

    def due(self, have: int, ended: bool) -> Piece | None:
        windows = self._windows
        if have < windows.window:
            # of a clip shorter than a window all is decoded as one; after that, what no window has begun with
            seen = windows.window - windows.stride if windows.tail and self._begun else 0
            if not ended or have <= seen:
                return None
            self._short = not self._begun
        self._begun = True
        return min(windows.window, have), have if self._short else min(windows.stride, have)

    def finished(self, decoded: torch.Tensor) -> torch.Tensor:
        windows = self._windows
        if self._short:
            return decoded
        kept = windows.kept
        if self._earlier is None:
            kept += windows.lead
        else:
            if windows.dropped:
                decoded = decoded[:, :, 1:] if windows.dropped == "first" else decoded[:, :, :-1]
            if windows.blend:
                decoded = windows.mix(self._earlier, decoded)
        self._earlier = decoded[:, :, max(0, decoded.shape[2] - windows.blend) :].clone()
        self._rest = decoded[:, :, kept:].clone() if windows.tail else None
        return decoded[:, :, :kept]

    def rest(self) -> torch.Tensor | None:
        return self._rest

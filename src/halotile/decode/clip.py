"""One clip that is decoded in chunks: what was taken in, what waits, and whether the next chunk fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halotile.decode.carried import Carried
from halotile.decode.frame_loops import loop_of
from halotile.decode.patch import patched
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Family

Decode = Callable[[Carried | None, torch.Tensor], torch.Tensor | None]
"""Decodes some latent frames after those whose state is carried; None on a rank that is to have nothing."""


class Clip:
    """A clip from its first chunk on; `total` is its number of latent frames, None where it is not known.

    Raises PlanError and UnsupportedError for what the VAE as it is set cannot decode.
    """

    def __init__(self, vae: Any, family: Family, first: torch.Tensor, total: int | None) -> None:
        self.taken = 0
        """latent frames so far"""
        self._vae = vae
        self._family = family
        self._total = total
        self._loop = loop_of(vae, family, total, tuple(first.shape))
        self._like = torch.empty_like(first[:, :, :0])
        self._setting = self._settings()
        self._pending = torch.empty_like(first[:, :, :0])
        self._sample: tuple[int, ...] | None = None

    def check(self, chunk: torch.Tensor) -> None:
        """Raise PlanError unless `chunk` can be the next one."""
        first, now = _kind(self._like), _kind(chunk)
        if first != now:
            raise PlanError(f"the chunks of a clip differ in frames alone: the first was {first}, this one is {now}")
        if self._total is not None and self.taken + chunk.shape[2] > self._total:
            raise PlanError(
                f"the clip was to have frames={self._total} latent frames; it has {self.taken}, and this chunk "
                f"{chunk.shape[2]} more"
            )
        now_set = self._settings()
        changed = {name: (value, now_set[name]) for name, value in self._setting.items() if value != now_set[name]}
        if changed:
            words = ", ".join(f"{name} from {was} to {now}" for name, (was, now) in changed.items())
            raise PlanError(
                f"in the midst of a clip {type(self._vae).__name__} was changed: {words}; set it back, or reset()"
            )

    def check_end(self) -> None:
        """Raise PlanError or UnsupportedError unless the clip can end here."""
        if self._total is not None and self.taken != self._total:
            raise PlanError(f"the clip was to have frames={self._total} latent frames, and ends after {self.taken}")
        shape = (*self._like.shape[:2], self.taken, *self._like.shape[3:])
        for refuse in self._family.refuse_frames:
            reason = refuse(self._vae, "decode", shape)
            if reason is not None:
                raise UnsupportedError(f"{type(self._vae).__name__} cannot decode this clip: {reason}")

    def take(self, chunk: torch.Tensor, dtype: torch.dtype) -> None:
        """The next chunk, which is copied, in the dtype that the VAE is given."""
        self._pending = torch.cat([self._pending.to(dtype), chunk.detach().to(dtype)], dim=2)
        self.taken += chunk.shape[2]

    def advance(self, decode: Decode, ended: bool) -> torch.Tensor | None:
        """Decode what is due; returns the frames that are finished, in the chunks' dtype, or None for none."""
        parts: list[torch.Tensor] = []
        while (piece := self._loop.due(self._pending.shape[2], ended)) is not None:
            take, step = piece
            with patched(self._vae, **self._loop.off):
                decoded = decode(self._loop.carried, self._pending[:, :, :take])
            self._pending = self._pending[:, :, step:].clone()
            if decoded is not None:
                parts.append(self._loop.finished(decoded))
        rest = self._loop.rest() if ended else None
        parts += [] if rest is None else [rest]
        if not parts:
            return None
        frames = torch.cat(parts, dim=2).to(self._like.dtype)
        self._sample = tuple(frames.shape)
        return frames

    def no_frames(self) -> torch.Tensor:
        """Frames of the clip, but none of them."""
        if self._sample is None:
            # only loops that wait for further latents come here, and their classes name the channels
            batch, _, _, height, width = self._like.shape
            ratio = self._family.ratio(self._vae)
            self._sample = (batch, int(self._vae.config.out_channels), 0, height * ratio, width * ratio)
        batch, channels, _, height, width = self._sample
        return self._like.new_empty((batch, channels, 0, height, width))

    def _settings(self) -> dict[str, Any]:
        """What decides which calls of the network a decode makes."""
        layout = self._family.layout
        names = ("use_tiling", "use_slicing", *layout.window_names, *layout.overlap_names)
        return {name: getattr(self._vae, name, None) for name in names}


def _kind(chunk: torch.Tensor) -> str:
    batch, channels, _, height, width = chunk.shape
    return f"{batch} x {channels} x f x {height} x {width} of {chunk.dtype} on {chunk.device}"

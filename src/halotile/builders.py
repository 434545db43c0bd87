"""LTX-style objects around the grid decode: a decoder of videos, and a builder that makes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Group, Mailbox, Ranks
from halotile.decode import stream
from halotile.decode.placement import Placement
from halotile.errors import MembershipError, PlanError, UnsupportedError
from halotile.planning.tilings import Tiling


class DistributedVideoDecoder:
    """Decodes videos over the ranks of a group; the driver gets the frames, batch by batch.

    decoder: an object with `decode_video(latent, ...)` whose frames are `F H W C` in 0 to 1 (a tensor, or an iterator
        of several), or a diffusers autoencoder.
    queue: a `Mailbox` that carries tiles between processes of one machine; None sends them over the group.
    vae_group: the ranks that decode; None is the default group. vae_tiling: the tiles that are dealt to them.
    driver_rank: the global rank that gets the frames.

    The usual setting for LTX-2 on 8 GPUs is height in 8 tiles that share 4 latent rows:

        tiling = TileCountConfig(height=DimensionTilingConfig(num_tiles=8, overlap=4))
        decoder = DistributedVideoDecoder(decoder, None, group, tiling, driver_rank=0)
        for frames in decoder.decode_video(latent):  # nothing on ranks that do not drive
            writer.write(frames)

    Raises UnsupportedError for a decoder of another kind, MembershipError when the driver is not in the group.
    """

    def __init__(
        self,
        decoder: Any,
        queue: Mailbox | None,
        vae_group: Group | None,
        vae_tiling: Tiling,
        driver_rank: int = 0,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not callable(getattr(decoder, "decode_video", None)) and not callable(getattr(decoder, "decode", None)):
            raise UnsupportedError(f"{type(decoder).__name__} has neither decode_video nor decode")
        self.decoder = decoder
        self._ranks = Ranks.of(vae_group, timeout_s)
        self._queue = queue
        self._tiling = vae_tiling
        members = [self._ranks.global_rank(rank) for rank in range(self._ranks.size)]
        if driver_rank not in members:
            raise MembershipError(f"driver_rank={driver_rank} is a global rank; those of the group are {members}")
        self._driver = members.index(driver_rank)

    def decode_video(
        self,
        latent: torch.Tensor,
        tiling_config: Any = None,
        generator: torch.Generator | None = None,
        device_fn: Placement | None = None,
    ) -> Iterator[torch.Tensor]:
        """The frames of `latent` (`B C F H W` or `C F H W`, B = 1) as batches `f H W C` in 0 to 1; none elsewhere.

        tiling_config: tiles within a tile, to bound memory: handed to the decoder's own `decode_video`. generator: of
        the noise that a decoder draws. device_fn: as in `stream`. Every rank of the group must call it;
        the work of those that do not drive is done when it returns.

        Raises PlanError for a latent of another shape, and what `halotile.stream` raises.
        """
        clip = latent[None] if latent.dim() == 4 else latent
        if clip.dim() != 5 or clip.shape[0] != 1:
            raise PlanError(f"the latent is {tuple(latent.shape)}; one video is C F H W or 1 C F H W")
        own: dict[str, Any] = {} if generator is None else {"generator": generator}
        if callable(getattr(self.decoder, "decode_video", None)):
            if tiling_config is not None:
                own["tiling_config"] = tiling_config
            target, pixels = _Frames(self.decoder), _as_they_are
        else:
            if tiling_config is not None:
                name = type(self.decoder).__name__
                raise UnsupportedError(f"tiling_config is for decoders with decode_video; call enable_tiling of {name}")
            target, pixels = self.decoder, _from_signed
        batches = stream(
            target,
            clip,
            self._ranks,
            tiling=self._tiling,
            driver=self._driver,
            device_fn=device_fn,
            timeout_s=self._ranks.timeout_s,
            mailbox=self._queue,
            **own,
        )
        return (pixels(batch[0].movedim(0, -1)) for batch in batches)


class DistributedDecoderBuilder:
    """Builds what `inner.build()` builds, spread over the ranks of a group; for the rest see `DistributedVideoDecoder`.

    inner: anything whose `build(device=..., dtype=..., **kw)` gives such a decoder. registry: handed to
    `inner.build` where it is given.
    """

    def __init__(
        self,
        inner: Any,
        queue: Mailbox | None,
        vae_group: Group | None,
        vae_tiling: Tiling,
        driver_rank: int = 0,
        registry: Any = None,
    ) -> None:
        if not callable(getattr(inner, "build", None)):
            raise UnsupportedError(f"{type(inner).__name__} has no build()")
        self.inner = inner
        self._given = (queue, vae_group, vae_tiling, driver_rank)
        self._registry = registry

    def build(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **kw: Any
    ) -> DistributedVideoDecoder:
        """The decoder; what is None is not handed on."""
        given = {"device": device, "dtype": dtype, "registry": self._registry}
        decoder = self.inner.build(**{name: value for name, value in given.items() if value is not None}, **kw)
        return DistributedVideoDecoder(decoder, *self._given)


class _Frames:
    """A decoder of videos as one that halotile can cut: `B C F H W` to `B C F H W`."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decode(self, latent: torch.Tensor, **own: Any) -> torch.Tensor:
        made = self._decoder.decode_video(latent, **own)
        frames = made if isinstance(made, torch.Tensor) else torch.cat(list(made))
        return frames.movedim(-1, 0)[None]


def _as_they_are(frames: torch.Tensor) -> torch.Tensor:
    return frames


def _from_signed(frames: torch.Tensor) -> torch.Tensor:
    """From -1 to 1 to 0 to 1, clipped: as diffusers' processors do."""
    return (frames / 2 + 0.5).clamp(0, 1)

"""A stream without a grid of tiles: the clip goes through a `ChunkDecoder`, latent frame by latent frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from halotile.comm import Call, Ranks
from halotile.decode.chunks import ChunkDecoder
from halotile.decode.door import arguments_fact, check_input
from halotile.decode.options import Progress
from halotile.decode.placement import DeviceOf, Placement, check_placement, device_of, place_note
from halotile.decode.report import DecodeReport
from halotile.decode.streams import Leavable, begin_stream, end_stream, forget_streams, refuse_open_stream
from halotile.errors import PlanError, RemoteRankError
from halotile.families import family_of
from halotile.planning import Scheduler


def comes_in_chunks(vae: Any) -> bool:
    """Whether a clip of `vae` can be streamed without a grid of tiles."""
    family = family_of(vae)
    return family is not None and (family.causal is not None or family.windows is not None)


def stream_chunks(
    vae: Any,
    latents: torch.Tensor,
    ranks: Ranks,
    driver: int,
    device_fn: Placement | None,
    scheduler: Scheduler,
    progress: Progress | None,
    own: dict[str, Any],
) -> ChunkStream:
    """`stream` in chunks; see there. On ranks other than the driver it returns when the driver's iterator has ended."""
    with Call(ranks) as call:
        tensor = check_input(latents, "decode")
        if tensor.dim() != 5:
            raise PlanError(f"a stream in chunks is of a clip B C F H W, got {tuple(tensor.shape)}")
        check_placement(device_fn)
        decoder = ChunkDecoder(
            vae, ranks, "auto", "driver", frames=tensor.shape[2], driver=driver, scheduler=scheduler, **own
        )
        refuse_open_stream(ranks.transport)
        call.note(place_note(tensor.device))
        facts = {"call": "stream in chunks", "class": type(vae).__name__, "shape": str(tuple(tensor.shape))}
        call.meet({**facts, "dtype": str(tensor.dtype), "driver": str(driver), "arguments": arguments_fact((), own)})
        forget_streams(ranks.transport)
        place = device_of(device_fn, call.notes("start"), driver)
    # a copy: the caller may change its latents before they are asked for
    out = ChunkStream(decoder, tensor.detach().clone(), ranks, driver, place, progress)
    if ranks.rank != driver:
        out.work()
    return out


class ChunkStream(Leavable):
    """What `stream` returns for a clip in chunks; also a context manager.

    `decoder.report` is the account of its chunks, with the time to the first frames.
    """

    def __init__(
        self,
        decoder: ChunkDecoder,
        latents: torch.Tensor,
        ranks: Ranks,
        driver: int,
        place: DeviceOf | None,
        progress: Progress | None,
    ) -> None:
        self.decoder = decoder
        self._latents, self._ranks, self._place, self._progress = latents, ranks, place, progress
        # as it is on the other ranks now, wherever batches are asked for later
        kind = latents.device.type
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._drives = ranks.rank == driver
        self._over = not self._drives
        self._done = self._batches = 0
        self._calls = ranks.transport.calls
        if self._drives:
            begin_stream(ranks.transport, self)

    @property
    def where(self) -> str:
        """How far it is."""
        return f"after latent frame {self._done} of {self._latents.shape[2]}"

    @property
    def report(self) -> DecodeReport | None:
        """That of the whole clip; None before its end."""
        chunks = self.decoder.report
        if not self._over or chunks.last is None:
            return None
        loads = tuple(map(sum, zip(*(piece.loads for piece in chunks.pieces), strict=True)))
        return replace(
            chunks.last,
            reason=f"stream in {chunks.pushes} chunks: {chunks.pieces[0].reason}",
            calls=sum(piece.calls for piece in chunks.pieces),
            loads=loads,
            messages=chunks.messages,
            bytes_sent=chunks.bytes_sent,
            collectives=chunks.collectives,
            seconds=chunks.seconds,
        )

    def __next__(self) -> torch.Tensor:
        while not self._over:
            # the group is the stream's own for as long as this takes
            end_stream(self._ranks.transport)
            try:
                self._check_undisturbed()
                with self._autocast:
                    frames = self._step()
            except BaseException:
                self._over = True
                raise
            self._calls = self._ranks.transport.calls
            if not self._over:
                begin_stream(self._ranks.transport, self)
            if self._progress is not None:
                self._progress(self._done, self._latents.shape[2])
            if frames is not None and frames.shape[2]:
                self._batches += 1
                return frames if self._place is None else frames.to(self._place(self._batches - 1))
        raise StopIteration

    def work(self) -> None:
        """On a rank that does not drive: its part of every chunk, until the driver has the last or wants no more."""
        self._over = False
        try:
            while not self._over:
                self._step()
        except RemoteRankError as error:
            if error.kind != _Left.__name__:
                raise
        finally:
            self._over = True

    def close(self) -> None:
        """On the driver: want no more; the other ranks are told, and return. Does nothing the second time."""
        if self._drives and not self._over:
            self._over = True
            end_stream(self._ranks.transport)
            if self._calls == self._ranks.transport.calls:
                Call(self._ranks).fail(_Left())

    def _check_undisturbed(self) -> None:
        """Raise PlanError if the driver made another call of the group meanwhile: it was told to the other ranks."""
        if self._calls != self._ranks.transport.calls:
            raise PlanError(
                f"this stream ended {self.where}, when another call of its group was made while it was open"
            )

    def _step(self) -> torch.Tensor | None:
        """The next latent frame, or the end of the clip."""
        if self._done < self._latents.shape[2]:
            self._done += 1
            return self.decoder.push(self._latents[:, :, self._done - 1 : self._done])
        self._over = True
        return self.decoder.finish()


class _Left(Exception):
    """What the driver of a stream that it leaves makes of the call that the other ranks wait in."""

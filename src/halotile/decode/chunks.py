"""`ChunkDecoder`: a clip decoded while its latent frames still come."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Deliver, Group, Ranks
from halotile.decode.carried import Carried
from halotile.decode.choose import check_class
from halotile.decode.clip import Clip
from halotile.decode.door import arguments_fact, check_input, dtype_of, tensor_of
from halotile.decode.frame_loops import check_total
from halotile.decode.functions import as_vae
from halotile.decode.options import Options, Strategy
from halotile.decode.report import DecodeReport
from halotile.decode.run import run_call
from halotile.decode.streams import forget_streams, refuse_open_stream
from halotile.errors import PlanError, UnsupportedError
from halotile.families import FAMILIES, Family, family_of
from halotile.planning import Scheduler


@dataclass(frozen=True)
class ChunkReport:
    """The account of a clip so far, as one rank sees it.

    pushes: calls of `push`. latent_frames: taken in. frames: given out on this rank. first_frames_s: wall time from the
    start of the first push until the first frames were there, the caller's own time between pushes included; None
    before. seconds: wall time inside of `push` and `finish`. messages, bytes_sent, collectives: this rank's traffic.
    pieces: the report of each decode that it came to; strategy and exactness are those of all.
    """

    pushes: int = 0
    latent_frames: int = 0
    frames: int = 0
    first_frames_s: float | None = None
    seconds: float = 0.0
    messages: int = 0
    bytes_sent: int = 0
    collectives: int = 0
    pieces: tuple[DecodeReport, ...] = ()

    @property
    def last(self) -> DecodeReport | None:
        """The latest piece."""
        return self.pieces[-1] if self.pieces else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


class ChunkDecoder:
    """Decodes clips over the ranks of a group, one after the other, each in chunks of latent frames, in order.

        decoder = halotile.ChunkDecoder(vae)
        for latents in source:              # B C f H W, any number of latent frames at a time
            write(decoder.push(latents))    # the frames that are finished now: B C F H W, where F may be 0
        write(decoder.finish())

    Every rank of the group makes the same calls with the same latents. What they return, put together along frames, is
    what the VAE's own `decode` makes of the whole clip:

    * for classes whose network hands state from frame to frame (Wan, QwenImage, CogVideoX, Magvit) bitwise with
      `serial` and `tile`, to rounding with `shard` (of the untiled decode). Each latent frame's frames are finished
      when it is pushed (of CogVideoX: each two latent frames'). What these classes do with all latent frames at once, a
      convolution of 1 x 1 x 1, they do with those of a chunk: where torch takes another kernel for it, the rounding is
      another (seen with Magvit's tiles on CPU).
    * for classes with a loop over frames in windows that overlap, what that loop makes of it, in the same way
      (HunyuanVideo, LTX-Video and LTX-2: the loop that `use_framewise_decoding` turns on, whether or not it is on;
      MiniMax-H3). Frames are finished a window's stride at a time.

    The state is the decoder's: between two calls the VAE is as it was, and may be used. Its tiling must stay as it is
    until the clip ends.
    """

    def __init__(
        self,
        vae: Any,
        group: Group | None = None,
        strategy: Strategy = "auto",
        deliver: Deliver = "all",
        *,
        frames: int | None = None,
        driver: int = 0,
        scheduler: Scheduler = "balanced",
        strict: bool = False,
        shards_per_tile: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **own: Any,
    ) -> None:
        """Nothing travels yet.

        frames: the number of latent frames of each clip. CogVideoX needs it, since its loop takes an odd frame first;
        elsewhere it is checked when it is given. strategy: where state is kept, `auto` chooses at the first chunk for
        the whole clip. own: further arguments of the VAE's `decode`. The rest is as in `parallelize`.

        Raises UnsupportedError for a class that cannot be decoded in chunks, PlanError, MembershipError.
        """
        if deliver == "sharded":
            raise UnsupportedError("deliver='sharded' is not for chunks; choose 'all' or 'driver'")
        self._asked = Options(
            strategy=strategy,
            deliver=deliver,
            driver=driver,
            scheduler=scheduler,
            strict=strict,
            shards_per_tile=shards_per_tile,
        )
        self._vae = as_vae(vae, "decode")
        check_class(self._vae, ["decode"], self._asked)
        self._family = _chunked(self._vae)
        if strategy == "hybrid" and self._family.causal is not None:
            raise UnsupportedError(
                f"{type(self._vae).__name__} hands state from frame to frame, which strategy='hybrid' does not keep "
                "between chunks; choose 'tile' or 'shard'"
            )
        check_total(self._vae, self._family.causal, frames)
        self._ranks = Ranks.of(group, timeout_s)
        self._asked.check_group(self._ranks)
        self._frames = frames
        self._own = own
        self._decode = self._vae.decode
        self.reset()

    def reset(self) -> None:
        """Forget the clip: the next push begins another. Nothing travels, but all ranks must do it."""
        self.report = ChunkReport()
        self._clip: Clip | None = None
        self._options = self._asked
        self._began = 0.0
        self._over = ""

    def push(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Take the clip's next latent frames (`B C f H W`); returns the frames that are finished now (`B C F H W`).

        F may be 0. In the dtype of the latents, and None on a rank that is to have nothing. Raises PlanError, with the
        clip as it was, for a chunk that does not fit the ones before and after `finish`, UnsupportedError for what the
        class cannot do, MismatchError and MissingRankError with the clip as it was, on every rank. After an error of
        the decode itself, which is RemoteRankError on every rank, the clip is lost until `reset`.
        """
        started = time.perf_counter()
        with Call(self._ranks) as call:
            self._check_open("push")
            chunk = check_input(latents, "decode")
            if chunk.dim() != 5:
                raise PlanError(f"a chunk of a clip has the shape B C f H W, got {tuple(chunk.shape)}")
            clip = self._clip or Clip(self._vae, self._family, chunk, self._frames)
            clip.check(chunk)
            self._meet(call, "push", clip.taken, {"shape": str(tuple(chunk.shape)), "dtype": str(chunk.dtype)})
        if self._clip is None:
            self._clip, self._began = clip, started
        clip.take(chunk, dtype_of(self._vae, "decode", chunk.dtype))
        self.report = replace(self.report, pushes=self.report.pushes + 1, latent_frames=clip.taken)
        return self._advance(clip, started, ended=False)

    def finish(self) -> torch.Tensor | None:
        """End the clip; returns the frames that were not finished before (`B C F H W`, F may be 0).

        Returns and raises as `push` does, and PlanError without a clip or before its last latent frame.
        """
        started = time.perf_counter()
        with Call(self._ranks) as call:
            self._check_open("finish")
            if self._clip is None:
                raise PlanError("finish() before any push: there is no clip to end")
            self._clip.check_end()
            self._meet(call, "finish", self._clip.taken, {})
        frames = self._advance(self._clip, started, ended=True)
        self._over = "finish() has ended the clip"
        return frames

    def _check_open(self, asked: str) -> None:
        if self._over:
            raise PlanError(f"{asked}(): {self._over}; reset() begins another")

    def _meet(self, call: Call, asked: str, taken: int, chunk: dict[str, str]) -> None:
        refuse_open_stream(self._ranks.transport)
        facts = {
            "call": f"ChunkDecoder.{asked}",
            "class": type(self._vae).__name__,
            "options": f"{self._asked}, frames={self._frames}",
            "arguments": arguments_fact((), self._own),
            "before": f"{taken} latent frames",
        }
        call.meet({**facts, **chunk})
        forget_streams(self._ranks.transport)

    def _advance(self, clip: Clip, started: float, ended: bool) -> torch.Tensor | None:
        self._over = "an earlier call failed, and the state of its clip is lost"
        with torch.no_grad():
            frames = clip.advance(self._run, ended)
        self._over = ""
        if frames is None and self._ranks.rank in self._asked.receivers(self._ranks):
            frames = clip.no_frames()
        self.report = replace(
            self.report,
            frames=self.report.frames + (0 if frames is None else frames.shape[2]),
            seconds=self.report.seconds + time.perf_counter() - started,
        )
        return frames

    def _run(self, carried: Carried | None, x: torch.Tensor) -> torch.Tensor | None:
        """Decode one piece over the ranks."""
        output, piece = run_call(
            self._vae, "decode", self._decode, x, (), self._own, self._ranks, self._options, carried=carried
        )
        if carried is not None:
            # state is kept as the strategy cuts it
            self._options = replace(self._options, strategy=cast("Strategy", piece.strategy))
        if not self.report.pieces:
            self.report = replace(self.report, first_frames_s=time.perf_counter() - self._began)
        self.report = replace(
            self.report,
            messages=self.report.messages + piece.messages,
            bytes_sent=self.report.bytes_sent + piece.bytes_sent,
            collectives=self.report.collectives + piece.collectives,
            pieces=(*self.report.pieces, piece),
        )
        return tensor_of(output)


def _chunked(vae: Any) -> Family:
    """The row of `vae`'s class. Raises UnsupportedError for one that cannot be decoded in chunks."""
    family = family_of(vae)
    if family is None or (family.causal is None and family.windows is None):
        able = ", ".join(sorted(row.name for row in FAMILIES.values() if row.causal or row.windows))
        raise UnsupportedError(
            f"{type(vae).__name__} cannot be decoded in chunks: halotile knows of no state that it hands from frame to "
            f"frame, and of no windows over frames; it does of {able}"
        )
    return family

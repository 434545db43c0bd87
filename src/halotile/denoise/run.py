"""One tiled forward over the ranks of a group: agree, run the own tiles, blend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from halotile.comm import Call
from halotile.denoise.options import DenoiseOptions
from halotile.denoise.positions import positions_for
from halotile.denoise.protocol import ModelCall, still_audio
from halotile.denoise.report import DenoiseReport
from halotile.denoise.sums import RunningSums, Slots, average_audio
from halotile.denoise.tokens import TokenPlan, TokenTile
from halotile.errors import UnsupportedError
from halotile.planning import deal, loads_of


def run_tiled(
    call: ModelCall,
    plan: TokenPlan,
    options: DenoiseOptions,
    handshake: Call,
    warn: Callable[[float | None, bool], None],
) -> tuple[Any, DenoiseReport]:
    """Run the tiles of `plan`, each on the rank that it is dealt to, and return what the model would, and the report.

    `warn(sigma, averaged)` is called once the ranks agree: how noisy the tokens are, and whether audio is averaged.
    Every rank gets the same result. Nothing is exchanged but agreements over the board and one `all_reduce`, and one
    more where audio is averaged.
    """
    started, ranks = time.perf_counter(), handshake.ranks
    before = ranks.counters.snapshot()
    own, own_audio = call.own(), call.own_audio()
    plan = plan.to(own.device)
    # what attention costs
    costs = [len(tile.kept) ** 2 for tile in plan.tiles]
    owners = deal(costs, ranks.size, options.scheduler)
    handshake.meet(_facts(call, plan, options, own, own_audio))
    sigma, averaged = call.sigma, own_audio is not None and options.audio == "average"
    warn(sigma, averaged)
    dtype = torch.promote_types(own.dtype, torch.float32)
    sums = (Slots if options.deterministic else RunningSums)(plan, own, dtype)
    heard: dict[int, torch.Tensor] = {}
    with handshake.together("work"):
        for tile, owner in zip(plan.tiles, owners, strict=True):
            if owner == ranks.rank:
                video, audio = _run_tile(call, tile, options, own, own_audio)
                sums.add(tile, video)
                if averaged and audio is not None:
                    heard[tile.index] = audio
                handshake.piece_done()
    reduced, blended_audio = ranks.counters.snapshot(), None
    with handshake.shared_fate():
        blended = sums.reduce(ranks)
        if averaged:
            assert own_audio is not None
            sound = torch.promote_types(own_audio.dtype, torch.float32)
            count = len(plan.tiles)
            blended_audio = average_audio(heard, count, own_audio, sound, options.deterministic, ranks)
    reduces = ranks.counters.since(reduced).collectives
    if len(plan.unkept):
        # no tile has a prediction for them: a velocity of zero leaves them, a sample of themselves does as well
        blended.video[:, plan.unkept] = 0 if call.prediction == "velocity" else own[:, plan.unkept].to(dtype)
    if blended_audio is not None and own_audio is not None:
        blended_audio = blended_audio.to(own_audio.dtype)
    else:
        blended_audio = still_audio(call)
    output = call.finish(blended.video.to(own.dtype), blended_audio)
    return output, DenoiseReport(
        grid=plan.grid,
        tokens=plan.total,
        tiles=len(plan.tiles),
        ranks=ranks.size,
        loads=loads_of([len(tile.kept) for tile in plan.tiles], owners, ranks.size),
        unkept=len(plan.unkept),
        drift=blended.drift,
        sigma=sigma,
        all_reduces=reduces,
        reduced_bytes=sums.buffer.nbytes,
        collectives=ranks.counters.since(before).collectives,
        seconds=time.perf_counter() - started,
    )


def _run_tile(
    call: ModelCall, tile: TokenTile, options: DenoiseOptions, own: torch.Tensor, own_audio: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    positions = call.positions
    if positions is not None:
        positions = positions_for(positions, tile, options.normalize_positions, options.reference_positions)
    video, audio = call.run(tile, positions)
    expected = (own.shape[0], len(tile.kept), own.shape[2])
    if not isinstance(video, torch.Tensor):
        raise UnsupportedError(
            f"the model returned a {type(video).__name__} for the video; it must return a tensor of {expected}, the "
            "shape of the tokens, to be blended"
        )
    if tuple(video.shape) != expected:
        raise UnsupportedError(
            f"the prediction for {expected[1]} tokens of a tile is {tuple(video.shape)}; it must be {expected}, the "
            "shape of the tokens, to be blended"
        )
    if (audio is None) != (own_audio is None) or (own_audio is not None and _shape(audio) != _shape(own_audio)):
        raise UnsupportedError(
            f"the model returned {_shape(audio)} for audio of {_shape(own_audio)}; it must return a prediction of the "
            "same shape, to be averaged"
        )
    return video, audio


def _facts(
    call: ModelCall, plan: TokenPlan, options: DenoiseOptions, own: torch.Tensor, own_audio: torch.Tensor | None
) -> dict[str, str]:
    return {
        "tokens": _shape(own),
        "dtype": str(own.dtype),
        "audio tokens": _shape(own_audio),
        "grid": str(call.grid),
        "arguments": call.given_fact(),
        "predicts": call.prediction,
        **{each.name: str(getattr(options, each.name)) for each in fields(options)},
        "kept": plan.digest,
    }


def _shape(tensor: torch.Tensor | None) -> str:
    return str(tuple(tensor.shape)) if isinstance(tensor, torch.Tensor) else type(tensor).__name__

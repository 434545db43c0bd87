"""`TiledDenoiser`: a transformer that runs on tiles of its tokens, and is called as before."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Group, Ranks
from halotile.denoise.layout import grid_from
from halotile.denoise.models import call_for
from halotile.denoise.options import FIRST_SIGMA_LIMIT, Audio, Dealing, DenoiseOptions
from halotile.denoise.plain import PlainCall
from halotile.denoise.protocol import ModelCall, Prediction, References, still_audio
from halotile.denoise.report import DenoiseReport
from halotile.denoise.run import run_tiled
from halotile.denoise.tokens import plan_tokens
from halotile.errors import GradientError, PlanError, UnsupportedError
from halotile.families.transformers import uncompiled
from halotile.planning.tilings import DIMS, TileCountConfig

_NOT_GIVEN = object()
_REMEMBERED = 1024
"""Forwards whose drift is kept."""


class TiledDenoiser(nn.Module):
    """A diffusion transformer on tiles of its token grid, dealt to the ranks of a group; predictions are blended.

    Each rank runs the whole model on its tiles. Self-attention is quadratic, so T tiles cost about 1/T of the whole
    sequence, before they are dealt. It is an approximation, for an upscaling stage: a tile sees nothing of the others,
    and from pure noise tiles do not agree on a picture. Make the first stage full-frame, and upscale from it.

    model: a diffusers transformer of a known class (`halotile.families`), or any function of tokens:
        `model(tokens, positions, **keywords)` with tokens `B N D` and positions `B 3 N 2`, half-open intervals along
        time, height and width; it returns a prediction `B N D`, or (video, audio) where it is given `audio`. The model
        itself is not changed: `denoiser.model` is it.
    tiling: tiles along frames, height and width, counted in tokens of the grid.
    group: the ranks, each of which calls with the same tokens, and gets the same result; None is the default group, or
        this process alone.
    normalize_positions: move the positions of each tile to begin at zero, so that they are in the range of training;
        audio positions move by the same seconds. reference_positions: what becomes of conditioning tokens of negative
        time, which all tiles keep. "shift" moves them along, so that all relative positions stay true: right for a
        reference that is aligned with the picture. "keep" leaves them, so that every tile sees them at the same
        coordinates: right for a reference of something else, a style or a face.
    prediction: what is neutral for a conditioning token that no tile keeps: 0 ("velocity"), or its own value
        ("sample"). Of known classes the row in `halotile.families` says it.
    audio: it goes untiled through the forward of every tile, which gives as many answers. Their "average" keeps ranks
        in step, but is not a meaningful latent: final audio comes from the first stage, and is kept frozen. "frozen"
        skips the average and returns what leaves the audio as it is: zeros where the model predicts a velocity, the
        audio that was put in where it predicts a sample; with one tile as well.
    scheduler: deals tiles by the square of their tokens ("balanced"), or in turn ("round_robin"). deterministic: the
        same bits for every number of ranks, for memory and traffic of all tiles whole; else equal to rounding.
    first_sigma_limit: warn when the first noise that is seen is above it. timeout_s: how long to wait for a rank (of
        `halotile.Ranks` their own holds). per_token: names of further keywords with one entry a token.

    For a function of tokens the call is `denoiser(tokens, positions, grid=(F, H, W), **keywords)`: the F * H * W
    generated tokens come first, row-major, conditioning tokens after them. `grid` is not handed on, the rest is:
    `timesteps`, `keyframes_mask`, `denoise_mask`, `segment_ids`, `guide` and those of `per_token` (`B N`, `B N ...`)
    are cut to the tile's tokens, and so is `attention_mask` (`... N N` both ways, `... 1 N` and `B N` along keys; two
    dims of which the first is N are `N N`, also where B is N: give `B 1 N` then), tensors in lists and tuples too; dims
    of 1 and all other keywords stay as they are. `audio` (`B A D`) and `audio_positions` (`B 1 A 2`) are whole.
    `sigma`, else `timesteps`, tell how noisy the tokens are, where the largest is from 0 to 1. Where there is one tile,
    or tokens are None, the model is called as it is, and its result is not touched, but for frozen audio.

    In a diffusers pipeline it takes the place of the transformer; the scheduler is stepped once, on the blend (not all
    pipelines take `sigmas`: docs/denoise.md):

        tiling = TileCountConfig(height=DimensionTilingConfig(2, 4), width=DimensionTilingConfig(2, 4))
        pipe.transformer = TiledDenoiser(pipe.transformer, tiling)
        pipe(prompt, latents=upscaled, sigmas=[0.9, 0.7, 0.4])
        pipe.transformer = pipe.transformer.model

    Take it off again before `save_pretrained` of a pipeline, which leaves out classes that are not of diffusers. It can
    be deep-copied, with its model, and then has the same ranks; it cannot be pickled.

    `report` is the last forward's, `drift` the drift of each of the last 1024 (`DenoiseReport.drift`). Windows and sums
    are float32 (sums float64 for float64 tokens). The result has the dtype of the tokens; that of one tile is the
    model's own, which under autocast may be another.

    Raises PlanError, UnsupportedError and MembershipError; a call raises those, GradientError, and on every rank
    MismatchError, MissingRankError and RemoteRankError.
    """

    def __init__(
        self,
        model: Any,
        tiling: TileCountConfig,
        group: Group | None = None,
        *,
        normalize_positions: bool = True,
        reference_positions: References = "shift",
        prediction: Prediction = "velocity",
        audio: Audio = "average",
        scheduler: Dealing = "balanced",
        deterministic: bool = False,
        first_sigma_limit: float = FIRST_SIGMA_LIMIT,
        per_token: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__()
        if not callable(model):
            raise UnsupportedError(f"a model of type {type(model).__name__} cannot be called")
        if isinstance(uncompiled(model), TiledDenoiser):
            raise UnsupportedError("this model is tiled already; wrap its `model`")
        self.options = DenoiseOptions(
            tiling,
            normalize_positions=normalize_positions,
            reference_positions=reference_positions,
            prediction=prediction,
            audio=audio,
            scheduler=scheduler,
            deterministic=deterministic,
            first_sigma_limit=first_sigma_limit,
            per_token=per_token,
        )
        self.ranks = Ranks.of(group, timeout_s)
        self.model = model
        self.training = bool(getattr(model, "training", False))
        self.report: DenoiseReport | None = None
        self.drift: list[float] = []
        self._seen_sigma = self._heard_average = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, made of tiles."""
        tiling = self.options.tiling
        if self.without_video(args, kwargs) or all(getattr(tiling, name).num_tiles == 1 for name in DIMS):
            # a call of this rank alone, which the group does not count
            return self._forward_whole(args, kwargs)
        with Call(self.ranks) as handshake:
            _refuse_gradients((args, kwargs))
            with torch.no_grad():
                call = self.call_of(args, kwargs)
                plan = plan_tokens(call.grid, tiling, call.positions, call.total)
                output, self.report = run_tiled(call, plan, self.options, handshake, self._warn)
        self._remember(self.report.drift)
        return output

    def without_video(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call of the model has no tokens to be tiled."""
        return (args[0] if args else kwargs.get("tokens", _NOT_GIVEN)) is None

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
        """A call of the model taken apart."""
        options = self.options
        how = options.normalize_positions, options.reference_positions, options.per_token
        known = call_for(self.model, args, kwargs, *how)
        return known if known is not None else self._plain_call(*args, **kwargs)

    def _forward_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_gradients((args, kwargs))
        with torch.no_grad():
            if self.without_video(args, kwargs):
                return self.model(*args, **{name: value for name, value in kwargs.items() if name != "grid"})
            call, started = self.call_of(args, kwargs), time.perf_counter()
            output = call.plain()
            self.report = _whole_report(call, self.ranks, time.perf_counter() - started)
            self._remember(0.0)
            still = still_audio(call) if self.options.audio == "frozen" else None
            return output if still is None else call.with_audio(output, still)

    def _remember(self, drift: float) -> None:
        self.drift.append(drift)
        del self.drift[:-_REMEMBERED]

    def _plain_call(
        self, tokens: Any = _NOT_GIVEN, positions: Any = None, *more: Any, grid: Any = None, **keywords: Any
    ) -> PlainCall:
        if not isinstance(tokens, torch.Tensor) or not isinstance(positions, torch.Tensor) or more:
            raise UnsupportedError(
                f"{type(self.model).__name__} is not of a known class, so it is called with (tokens, positions, "
                f"grid=(frames, height, width), **keywords), tokens and positions tensors; got {_kind(tokens)} and "
                f"{_kind(positions)}, {len(more)} more without a name, and {', '.join(keywords) or 'no keywords'}"
            )
        known = grid_from(grid)
        if known is None:
            raise PlanError(f"grid={grid!r}: give the frames, height and width of the generated tokens, three integers")
        return PlainCall(self.model, tokens, positions, known, keywords, self.options)

    def _warn(self, sigma: float | None, averaged: bool) -> None:
        first, limit = self.ranks.rank == 0, self.options.first_sigma_limit
        if first and not self._seen_sigma and sigma is not None and sigma > limit:
            warnings.warn(
                f"the first sigma that this TiledDenoiser sees is {sigma:.4g}, above {limit:g}; "
                "from so much noise the tiles do not agree on one picture. Make the first stage full-frame, and "
                "upscale from its result with a smaller first sigma, or with image conditioning at a negative frame "
                "index",
                stacklevel=6,
            )
        if first and averaged and not self._heard_average:
            warnings.warn(
                "audio goes through the forward of every tile, and the average over tiles that is returned is not a "
                "meaningful latent: take the final audio from the first stage, and keep it frozen (audio='frozen' "
                "leaves it as it is put in)",
                stacklevel=6,
            )
        self._seen_sigma = self._seen_sigma or sigma is not None
        self._heard_average = self._heard_average or averaged

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model, such as `config`, `dtype` or `cache_context`: pipelines ask for them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledDenoiser:
        """A copy of the model on tiles, over the same ranks."""
        memo[id(self.ranks)] = self.ranks
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            "a TiledDenoiser belongs to the ranks of this process, so it cannot be pickled or saved; pickle or save "
            "its `model`, and wrap that again where it is loaded"
        )

    def to(self, *args: Any, **kwargs: Any) -> TiledDenoiser:
        """Move the model, by its own method: some keep a part of their weights in float32."""
        self.model.to(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, under its own names."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model, by its own names."""
        return self.model.load_state_dict(*args, **kwargs)


def _kind(value: object) -> str:
    return "nothing" if value is _NOT_GIVEN else type(value).__name__


def _whole_report(call: ModelCall, ranks: Ranks, seconds: float) -> DenoiseReport:
    return DenoiseReport(
        grid=call.grid,
        tokens=call.total,
        tiles=1,
        ranks=ranks.size,
        loads=(call.total,) * ranks.size,
        unkept=0,
        drift=0.0,
        sigma=None,
        all_reduces=0,
        reduced_bytes=0,
        collectives=0,
        seconds=seconds,
    )


def _refuse_gradients(value: Any) -> None:
    if not torch.is_grad_enabled():
        return
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise GradientError(
                "halotile is for inference, but an argument of this call requires gradients; call it under "
                "torch.no_grad() or torch.inference_mode(), or pass a detached tensor"
            )
    elif isinstance(value, Mapping):
        _refuse_gradients(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _refuse_gradients(each)
    elif is_dataclass(value) and not isinstance(value, type):
        _refuse_gradients(tuple(getattr(value, each.name) for each in fields(value)))

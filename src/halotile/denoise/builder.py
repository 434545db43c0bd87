"""LTX-style models on tiles: a builder whose models take (video, audio, perturbations)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Group, Ranks
from halotile.decode.door import arguments_fact
from halotile.denoise.layout import Grid, grid_from, require_whole
from halotile.denoise.options import FIRST_SIGMA_LIMIT, Audio, Dealing, DenoiseOptions
from halotile.denoise.plain import MASKS, PER_TOKEN, require_positions, sigma_of, tokens_of, video_of
from halotile.denoise.positions import shift_time, start_of
from halotile.denoise.protocol import ModelCall, Prediction, References
from halotile.denoise.report import DenoiseReport
from halotile.denoise.tiled import TiledDenoiser
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError, UnsupportedError
from halotile.planning.tilings import TileCountConfig


class TiledDataParallelBuilder:
    """Builds what `inner.build()` builds, on tiles of the video tokens, dealt to the ranks of a group.

    inner: anything whose `build(device=..., dtype=..., **kw)` gives a model that is called with
        (video, audio, perturbations) and returns (video prediction, audio prediction). `video` is a dataclass with
        `latent` (`B N D`), `timesteps`, `positions` (`B 3 N 2`, seconds and pixels), `attention_mask` and
        `keyframes_mask`; `audio` one with `latent` and `positions`, or None.
    registry: handed on, to `inner.with_registry` where there is one, else to `inner.build`. tracker: called with the
        `DenoiseReport` of every forward; or, with a `build` as LTX-2's tracker of weights has, it makes the model in
        the place of `inner`: `tracker.build(inner, device=..., dtype=..., **kw)`.
    prediction: "sample", since the models that LTX-2's pipelines build return the denoised video; "velocity" for its
        bare transformer. per_token: further fields of `video` with one entry a token. The rest is explained at
        `TiledDenoiser`.

    Raises UnsupportedError, PlanError and MembershipError.
    """

    def __init__(
        self,
        inner: Any,
        group: Group | None,
        tiling: TileCountConfig,
        registry: Any = None,
        tracker: Any = None,
        normalize_positions: bool = True,
        *,
        reference_positions: References = "shift",
        prediction: Prediction = "sample",
        audio: Audio = "average",
        scheduler: Dealing = "balanced",
        deterministic: bool = False,
        first_sigma_limit: float = FIRST_SIGMA_LIMIT,
        per_token: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not callable(getattr(inner, "build", None)):
            raise UnsupportedError(f"{type(inner).__name__} has no build()")
        if tracker is not None and not callable(tracker) and not callable(getattr(tracker, "build", None)):
            raise UnsupportedError(f"tracker={tracker!r} can neither be called with a report nor build a model")
        self.inner = inner
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
        self._ranks = Ranks.of(group, timeout_s)
        self._registry = registry
        self._tracker = tracker

    def build(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        video_tools: Any = None,
        **kw: Any,
    ) -> TiledVideoModel:
        """The model on tiles; what is None is not handed on.

        video_tools: says how many frames, rows and columns of tokens are generated. It has `grid`, three integers, or,
            as LTX-2's `VideoLatentTools`, `target_shape` with `frames`, `height` and `width` in latents, and
            `patchifier` with `patch_size` in latents along each.

        Raises PlanError without it.
        """
        grid = _grid_of(video_tools)
        inner = self.inner
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        if self._registry is not None and callable(getattr(inner, "with_registry", None)):
            inner = inner.with_registry(self._registry)
        else:
            given["registry"] = self._registry
        kw.update({name: value for name, value in given.items() if value is not None})
        if callable(getattr(self._tracker, "build", None)):
            model = self._tracker.build(inner, **kw)
        else:
            model = inner.build(**kw)
        tracker = self._tracker if callable(self._tracker) else None
        return TiledVideoModel(model, grid, self.options, self._ranks, tracker)


class TiledVideoModel(TiledDenoiser):
    """What `TiledDataParallelBuilder` builds: called as the model, with (video, audio, perturbations).

    Without video (None, or one that is not `enabled`) the model runs as it is, and nothing is exchanged.
    """

    def __init__(
        self,
        model: Any,
        grid: Grid,
        options: DenoiseOptions,
        ranks: Ranks,
        tracker: Callable[[DenoiseReport], Any] | None,
    ) -> None:
        super().__init__(model, group=ranks, **{each.name: getattr(options, each.name) for each in fields(options)})
        self._grid = grid
        self._tracker = tracker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The predictions for video and audio."""
        earlier = self.report
        output = super().forward(*args, **kwargs)
        if self._tracker is not None and self.report is not None and self.report is not earlier:
            self._tracker(self.report)
        return output

    def without_video(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        video = args[0] if args else kwargs.get("video")
        return video is None or not getattr(video, "enabled", True)

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
        return self._taken_apart(*args, **kwargs)

    def _taken_apart(self, video: Any, audio: Any = None, *more: Any, **keywords: Any) -> VideoCall:
        if not is_dataclass(video) or not isinstance(getattr(video, "latent", None), torch.Tensor):
            raise UnsupportedError(f"video is a {type(video).__name__}; it must be a dataclass with a latent B N D")
        heard = audio is not None and getattr(audio, "enabled", True)
        if heard and not isinstance(getattr(audio, "latent", None), torch.Tensor):
            raise UnsupportedError(f"audio is a {type(audio).__name__} without a latent B A D that is a tensor")
        return VideoCall(self.model, video, audio, more, keywords, self._grid, self.options)


@dataclass(frozen=True)
class VideoCall:
    """The call `model(video, audio, *more, **keywords)`."""

    model: Callable[..., Any]
    video: Any
    audio: Any
    more: tuple[Any, ...]
    keywords: dict[str, Any]
    grid: Grid
    options: DenoiseOptions

    def __post_init__(self) -> None:
        require_positions("video.positions", self.positions, self.video.latent.shape[0], self.total)
        require_whole(self.grid, self.positions)

    @property
    def total(self) -> int:
        return int(self.video.latent.shape[1])

    @property
    def positions(self) -> torch.Tensor:
        found = getattr(self.video, "positions", None)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"video.positions must be a tensor B 3 {self.total} 2, got {type(found).__name__}")
        return found

    @property
    def prediction(self) -> Prediction:
        return self.options.prediction

    @property
    def sigma(self) -> float | None:
        return sigma_of(getattr(self.video, "sigma", None), getattr(self.video, "timesteps", None))

    def own(self) -> torch.Tensor:
        latent: torch.Tensor = self.video.latent
        return latent

    def own_audio(self) -> torch.Tensor | None:
        heard = self.audio is not None and getattr(self.audio, "enabled", True)
        return self.audio.latent if heard else None

    def run(self, tile: TokenTile, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        sliced = {
            name: tokens_of(name, getattr(self.video, name), tile, self.total, self.options.per_token)
            for name in (*PER_TOKEN, *self.options.per_token, *MASKS)
            if hasattr(self.video, name)
        }
        video = replace(self.video, latent=self.video.latent[:, tile.kept], positions=positions, **sliced)
        audio = self.audio
        if audio is not None and self.options.normalize_positions and audio.positions is not None:
            audio = replace(audio, positions=shift_time(audio.positions, start_of(self.positions, tile)[:, 0]))
        made = self.model(video, audio, *self.more, **self.keywords)
        return video_of(made), made[1]

    def plain(self) -> Any:
        return self.model(self.video, self.audio, *self.more, **self.keywords)

    def given_fact(self) -> str:
        given = {"video": self.video, "audio": self.audio}
        parts = {
            f"{name}.{each.name}": getattr(value, each.name)
            for name, value in given.items()
            if is_dataclass(value)
            for each in fields(value)
        }
        return arguments_fact((*given.values(), *self.more), {**parts, **self.keywords})

    def finish(self, video: torch.Tensor, audio: torch.Tensor | None) -> Any:
        return video, audio

    def with_audio(self, output: Any, audio: torch.Tensor) -> Any:
        return video_of(output), audio


def _grid_of(video_tools: Any) -> Grid:
    if video_tools is None:
        raise PlanError(
            "build() needs video_tools, which say how many frames, rows and columns of tokens are generated: give "
            "LTX-2's VideoLatentTools, or an object with grid=(frames, height, width)"
        )
    grid = getattr(video_tools, "grid", None)
    shape, patchifier = getattr(video_tools, "target_shape", None), getattr(video_tools, "patchifier", None)
    if grid is None and shape is not None and patchifier is not None:
        latents = (shape.frames, shape.height, shape.width)
        if any(cells % size for cells, size in zip(latents, patchifier.patch_size, strict=True)):
            raise PlanError(f"a latent of {latents} is not whole patches of {tuple(patchifier.patch_size)}")
        grid = tuple(cells // size for cells, size in zip(latents, patchifier.patch_size, strict=True))
    known = grid_from(grid)
    if known is None:
        raise PlanError(
            f"video_tools={video_tools!r} give no grid of tokens (frames, height, width), three positive integers, but "
            f"{grid!r}"
        )
    return known

"""One call of a diffusers transformer, taken apart as denoise/protocol.py asks, for any row of families."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from halotile.decode.door import arguments_fact
from halotile.denoise.contexts import tile_context
from halotile.denoise.layout import Grid
from halotile.denoise.protocol import Prediction
from halotile.denoise.tokens import TokenTile
from halotile.errors import PlanError, UnsupportedError
from halotile.families.transformers import Transformer, uncompiled

_HARMLESS = ("scale", "ip_adapter_image_embeds", "ip_hidden_states")
"""Options of attention processors that have nothing a token."""


class Call(ABC):
    """What all rows have in common; a kind of places (coords, ids, shapes, grid) says what a tile changes.

    Raises PlanError for arguments that do not go together, UnsupportedError for those that nobody has looked at.
    """

    grid: Grid
    total: int
    positions: torch.Tensor | None

    def __init__(
        self, row: Transformer, cls: type, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.row, self.model, self.inside = row, model, uncompiled(model)
        self._cls, self._args, self._kwargs = cls, args, kwargs
        self.given = _arguments(row, cls, self.inside, args, kwargs)
        for name in ("hidden_states", *(("audio_hidden_states",) if row.audio else ())):
            if not isinstance(self.given.get(name), torch.Tensor):
                raise PlanError(f"{name} of {row.name} must be a tensor, got {type(self.given.get(name)).__name__}")
        self.tokens: torch.Tensor = self.given["hidden_states"]
        if self.tokens.shape[-1 if row.places != "grid" else 1] < row.channels(self.inside):
            raise UnsupportedError(
                f"{row.name} predicts {row.channels(self.inside)} channels from {tuple(self.tokens.shape)}; tiles are "
                "blended where the input begins with the noisy latent, which has as many"
            )

    @property
    def sigma(self) -> float | None:
        """The greatest share of noise of any token, 0 to 1: conditioning tokens have less than the others."""
        timestep = self.given.get("timestep")
        return None if timestep is None else float(torch.as_tensor(timestep).max()) / self.row.noise(self.inside)

    @property
    def prediction(self) -> Prediction:
        """Of all rows so far a velocity."""
        return self.row.prediction

    @abstractmethod
    def own(self) -> torch.Tensor:
        """The noisy latent's tokens, `B N D`."""

    def own_audio(self) -> torch.Tensor | None:
        """The audio tokens, `B A D`; None without audio."""
        if self.row.audio is None:
            return None
        audio: torch.Tensor = self.given["audio_hidden_states"]
        return audio[..., : self.row.audio(self.inside)]

    def run(self, tile: TokenTile, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model on one tile. It keeps no trace of that."""
        if (reason := self.row.whole_frames(self.inside)) and len(tile.region[0]) != self.grid[0]:
            raise UnsupportedError(
                f"{self.row.name} cannot be run on {len(tile.region[0])} of {self.grid[0]} frames: {reason}; leave the "
                "frames of the tiling in one tile"
            )
        arguments = {**self.given, **self.arguments(tile, positions), "return_dict": False}
        with tile_context(self.inside, tile.index), self.around(tile):
            result = self.model(**arguments)
        return self.as_tokens(result[0]), result[1] if self.row.audio else None

    def plain(self) -> Any:
        """The model's own call."""
        return self.model(*self._args, **self._kwargs)

    def given_fact(self) -> str:
        """Of the arguments by name, however they were given."""
        return arguments_fact((), self.given)

    def finish(self, video: torch.Tensor, audio: torch.Tensor | None) -> Any:
        """A tuple, or the model's own class of output, as `return_dict` asks."""
        return self._output(self.from_tokens(video), *(() if audio is None else (audio,)))

    def with_audio(self, output: Any, audio: torch.Tensor) -> Any:
        """The same, with the video of the model's own output."""
        return self._output(output[0], audio)

    def _output(self, *results: torch.Tensor) -> Any:
        if not self.given.get("return_dict", True):
            return results
        output: Callable[..., Any] = getattr(sys.modules[self._cls.__module__], self.row.output)
        return output(*results)

    @abstractmethod
    def arguments(self, tile: TokenTile, positions: torch.Tensor | None) -> dict[str, Any]:
        """The arguments that are others for a tile."""

    def around(self, tile: TokenTile) -> AbstractContextManager[None]:
        """What holds while the model runs on a tile."""
        return nullcontext()

    def as_tokens(self, result: torch.Tensor) -> torch.Tensor:
        """The model's prediction for a tile as tokens, in the order of `tile.kept`."""
        return result

    def from_tokens(self, video: torch.Tensor) -> torch.Tensor:
        """Blended tokens in the shape of the model's prediction."""
        return video

    @contextmanager
    def other_rope(self, make: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]) -> Iterator[None]:
        """Let the model's rope return `make(rope, args, kwargs, its own result)` meanwhile."""
        rope = getattr(self.inside, self.row.rope[0])
        if self.model is not self.inside or getattr(self.inside, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{self.row.name} is compiled, and its positions can then not be set from outside; leave "
                "normalize_positions at True and references where they are (reference_positions='keep'), or compile "
                "its blocks only"
            )
        handle = rope.register_forward_hook(make, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _arguments(
    row: Transformer, cls: type, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name; those that halotile does not know must be at their default."""
    signature = inspect.signature(type(model).forward)
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.parameters.values()):
        # a subclass that hands on whatever it is given: diffusers' own forward names it
        signature = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    try:
        given = dict(signature.bind(model, *args, **kwargs).arguments)
    except TypeError as error:
        raise PlanError(f"{row.name} cannot be called like this: {error}") from None
    del given[next(iter(signature.parameters))]
    known = {"hidden_states", "return_dict", *row.shared, *row.per_token, *row.square, *row.per_cell, *row.placing}
    for name, value in given.items():
        if name not in known and name not in row.options and value is not signature.parameters[name].default:
            raise UnsupportedError(
                f"halotile does not know the argument {name} of {row.name}, and so not whether it has one entry a "
                "token; leave it out"
            )
    for name in row.options:
        _require_harmless(row, name, given.get(name) or {})
    return given


def _require_harmless(row: Transformer, name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option not in _HARMLESS and _has_tensor(value):
            raise UnsupportedError(
                f"{name}[{option!r}] of {row.name} has a tensor, and halotile does not know whether it has one entry a "
                f"token; it knows {', '.join(_HARMLESS)}"
            )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)

"""What a tiled forward needs of a call of a model: `ModelCall`, which adapters implement."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from halotile.denoise.tokens import TokenTile

Prediction = Literal["velocity", "sample"]
References = Literal["shift", "keep"]


class ModelCall(Protocol):
    """One call of a wrapped model, taken apart: B samples, N tokens (conditioning tokens last), D numbers a token.

    Everything here but `run`, `plain` and `finish` is known without running the model, and alike on every rank.
    """

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, height and width of the generated tokens, which come first, in row-major order."""

    @property
    def total(self) -> int:
        """N: generated tokens and conditioning tokens."""

    @property
    def positions(self) -> torch.Tensor | None:
        """`B 3 N 2`, half-open intervals along time, height and width; None: the model makes them from the grid."""

    @property
    def sigma(self) -> float | None:
        """How noisy the tokens are, 0 to 1; None where that is unknown. Read once a tiled forward."""

    @property
    def prediction(self) -> Prediction:
        """What the model predicts, which says what is neutral for a token that no tile keeps."""

    def own(self) -> torch.Tensor:
        """The tokens' own values `B N D`; the result has this dtype, device and shape."""

    def own_audio(self) -> torch.Tensor | None:
        """Audio tokens `B A D`, of the dtype and shape of what `run` returns for them; None without audio."""

    def given_fact(self) -> str:
        """Names, shapes and dtypes of all arguments, for the ranks to compare."""

    def run(self, tile: TokenTile, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model on the kept tokens of a tile: `B m D`, and its prediction for all audio tokens.

        `positions`, `B 3 m 2`, are those to give to the model, shifted where that was asked for. What a shift does to
        audio positions is this method's work: `positions.start_of(self.positions, tile)[:, 0]` is the shift in time.
        """

    def plain(self) -> Any:
        """The model's own call, with nothing changed: what runs where there is one tile."""

    def finish(self, video: torch.Tensor, audio: torch.Tensor | None) -> Any:
        """`video` (`B N D`) and, where there is any, `audio` as the model returns them."""

    def with_audio(self, output: Any, audio: torch.Tensor) -> Any:
        """What `plain` returned, with `audio` in the place of its own."""


def still_audio(call: ModelCall) -> torch.Tensor | None:
    """The prediction that leaves audio as it is: a velocity of zeros, or the audio itself; None without audio."""
    audio = call.own_audio()
    return audio if audio is None or call.prediction == "sample" else torch.zeros_like(audio)

"""What a layout of tiling attributes is, and the arithmetic that several share.

A layout reads a VAE's tiling attributes into one `AxisLoop` an axis, and writes a request (`AxisAsk`) as attributes.
Nothing here runs a model.
"""

from __future__ import annotations

from typing import Any, Protocol

from halotile.families.axis_loop import Axis, AxisAsk, AxisLoop, Half

Attributes = dict[str, Any]
Asks = tuple[AxisAsk, AxisAsk]

SIDES = ("tile_sample_min_height", "tile_sample_min_width")
LATENT_SIDES = ("tile_latent_min_height", "tile_latent_min_width")
STRIDES = ("tile_sample_stride_height", "tile_sample_stride_width")


class Layout(Protocol):
    """How a class keeps its tile window, and what its loop makes of it.

    `window_names` and `overlap_names` are the attributes that hold them. `extra_names` are those among them that the
    class itself does not have: halotile reads them where they are set, and its own loop stands in for the class's.
    `least_overlap` is how many latents neighbours must share.
    """

    @property
    def window_names(self) -> tuple[str, ...]: ...

    @property
    def overlap_names(self) -> tuple[str, ...]: ...

    @property
    def extra_names(self) -> tuple[str, ...]: ...

    @property
    def least_overlap(self) -> int: ...

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        """The loop's two axes for an input of `height` x `width` cells (latents to decode, pixels to encode)."""

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        """Whether `use_tiling` makes the class run its loop on such an input."""

    def window_px(self, vae: Any) -> tuple[int, int]:
        """The height and width of the window that is set, in pixels."""

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        """All attributes for a request, or why there are none; with `own`, such as the class's own loop obeys."""


def factor_axis(
    axis: Axis, half: Half, length: int, sample: int, latent: int, factor: float, ratio: int, names: tuple[str, str]
) -> AxisLoop:
    """The loop of classes that keep a window in pixels, one in latents, and an overlap factor."""
    window, result = (latent, sample) if half == "decode" else (sample, latent)
    stride, blend = int(window * (1 - factor)), int(result * factor)
    return AxisLoop(
        axis, half, length, window, stride, result - blend, blend, ratio,
        f"{sample} px / {latent} latents ({names[0]})", f"from {names[1]}={factor:g}",
    )  # fmt: skip


def stride_axis(axis: Axis, half: Half, length: int, sample: int, latent: int, stride: int, ratio: int) -> AxisLoop:
    """The loop that stands in for a class's own, where a stride of this axis is set."""
    words = f"{sample} px (tile_sample_min_{axis})", f"{stride} px (tile_sample_stride_{axis})"
    if half == "decode":
        return AxisLoop(axis, half, length, latent, stride // ratio, stride, sample - stride, ratio, *words)
    return AxisLoop(axis, half, length, sample, stride, stride // ratio, latent - stride // ratio, ratio, *words)


def strides(asks: Asks, ratio: int) -> Attributes:
    return {name: (ask.window - ask.overlap) * ratio for name, ask in zip(STRIDES, asks, strict=True)}

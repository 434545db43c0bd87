"""Layouts of classes with a window an axis: with factors, strides, or a least overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halotile.families.axis_loop import Axis, AxisLoop, Half
from halotile.families.factors import axis_factor, fallback_factor, shared_factor
from halotile.families.layout import (
    LATENT_SIDES,
    SIDES,
    STRIDES,
    Asks,
    Attributes,
    factor_axis,
    stride_axis,
    strides,
)


@dataclass(frozen=True)
class AxisFactor:
    """A window an axis in pixels; one factor for both axes, or one an axis (`factors`).

    With `latent_pair` the class keeps the window in latents as well, else it divides where it needs it. `extras`: where
    one factor cannot do what is asked of both axes, `tile_sample_stride_height` and `_width` hold the strides.
    """

    factors: tuple[str, str]
    latent_pair: bool = True
    extras: bool = False
    least_overlap: int = 0

    @property
    def window_names(self) -> tuple[str, ...]:
        return (*SIDES, *LATENT_SIDES) if self.latent_pair else SIDES

    @property
    def overlap_names(self) -> tuple[str, ...]:
        return (*self.factors, *self.extra_names)

    @property
    def extra_names(self) -> tuple[str, ...]:
        return STRIDES if self.extras else ()

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        tall, wide = self.factors
        return (
            self._axis(vae, "height", half, height, tall, ratio),
            self._axis(vae, "width", half, width, wide, ratio),
        )

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, factor: str, ratio: int) -> AxisLoop:
        sample, latent = getattr(vae, f"tile_sample_min_{axis}"), self._latent(vae, axis, ratio)
        stride = getattr(vae, f"tile_sample_stride_{axis}", None) if self.extras else None
        if stride is not None:
            return stride_axis(axis, half, length, sample, latent, int(stride), ratio)
        names = (f"tile_sample_min_{axis}", factor)
        return factor_axis(axis, half, length, sample, latent, getattr(vae, factor), ratio, names)

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        if half == "decode":
            return height > self._latent(vae, "height", ratio) or width > self._latent(vae, "width", ratio)
        return bool(height > vae.tile_sample_min_height or width > vae.tile_sample_min_width)

    def window_px(self, vae: Any) -> tuple[int, int]:
        return vae.tile_sample_min_height, vae.tile_sample_min_width

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        out: Attributes = {name: ask.window * ratio for name, ask in zip(SIDES, asks, strict=True)}
        if self.latent_pair:
            out |= {name: ask.window for name, ask in zip(LATENT_SIDES, asks, strict=True)}
        if self.factors[0] == self.factors[1]:
            factor = shared_factor(asks, ratio)
            if isinstance(factor, str) and self.extras and not own:
                windows = [ask.window for ask in asks]
                return out | {self.factors[0]: fallback_factor(asks, windows, ratio)} | strides(asks, ratio)
            return factor if isinstance(factor, str) else out | {self.factors[0]: factor}
        for name, ask in zip(self.factors, asks, strict=True):
            factor = axis_factor(ask, ratio)
            if isinstance(factor, str):
                return factor
            out[name] = factor
        return out

    def _latent(self, vae: Any, axis: Axis, ratio: int) -> int:
        return int(
            getattr(vae, f"tile_latent_min_{axis}")
            if self.latent_pair
            else getattr(vae, f"tile_sample_min_{axis}") // ratio
        )


@dataclass(frozen=True)
class AxisStride:
    """A window and a stride an axis, in pixels; the loop divides by the ratio where it needs latents.

    `crossed` marks a class that compares the width with the window's height, and the height with its width, to see
    whether to tile. `patch` reads the side of the patches that the class folds into channels around its network (Wan
    2.2): its loop then counts folded pixels on the encoder's side. `latent_pair` marks a class that also keeps the
    window in latents.
    """

    patch: Callable[[Any], int] = lambda vae: 1
    latent_pair: bool = False
    crossed: bool = False
    overlap_names: tuple[str, ...] = STRIDES
    extra_names: tuple[str, ...] = ()
    least_overlap: int = 0

    @property
    def window_names(self) -> tuple[str, ...]:
        return (*SIDES, *LATENT_SIDES) if self.latent_pair else SIDES

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        patch = self.patch(vae)
        return (
            self._axis(vae, "height", half, height, patch, ratio),
            self._axis(vae, "width", half, width, patch, ratio),
        )

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, patch: int, ratio: int) -> AxisLoop:
        window, stride = getattr(vae, f"tile_sample_min_{axis}"), int(getattr(vae, f"tile_sample_stride_{axis}"))
        inner = ratio // patch
        words = f"{window} px (tile_sample_min_{axis})", f"{stride} px (tile_sample_stride_{axis})"
        if half == "decode":
            kept = stride // patch
            cells = (length, window // ratio, stride // ratio, kept, window // patch - kept)
        else:
            kept = stride // inner
            cells = (length // patch, window, stride, kept, window // inner - kept)
        return AxisLoop(axis, half, *cells, inner, *words)

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        tall, wide = vae.tile_sample_min_height, vae.tile_sample_min_width
        if self.crossed:
            tall, wide = wide, tall
        if half == "decode":
            return bool(height > tall // ratio or width > wide // ratio)
        return bool(height > tall or width > wide)

    def window_px(self, vae: Any) -> tuple[int, int]:
        return vae.tile_sample_min_height, vae.tile_sample_min_width

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        out: Attributes = {name: ask.window * ratio for name, ask in zip(SIDES, asks, strict=True)}
        if self.latent_pair:
            out |= {name: ask.window for name, ask in zip(LATENT_SIDES, asks, strict=True)}
        return out | strides(asks, ratio)


@dataclass(frozen=True)
class AxisMinOverlap:
    """A window and a least overlap an axis, in pixels; the loop widens overlaps until its tiles fit (MiniMax-H3)."""

    window_names: tuple[str, ...] = SIDES
    overlap_names: tuple[str, ...] = ("tile_sample_min_overlap_height", "tile_sample_min_overlap_width")
    extra_names: tuple[str, ...] = ()
    # it cuts the last -overlap rows of a tile off, which for 0 are all
    least_overlap: int = 1

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        return self._axis(vae, "height", half, height, ratio), self._axis(vae, "width", half, width, ratio)

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, ratio: int) -> AxisLoop:
        window, overlap = getattr(vae, f"tile_sample_min_{axis}"), getattr(vae, f"tile_sample_min_overlap_{axis}")
        into, out = (ratio, 1) if half == "decode" else (1, ratio)
        stride = window - overlap
        return AxisLoop(
            axis, half, length, window // into, stride // into, stride // out, overlap // out, ratio,
            f"{window} px (tile_sample_min_{axis})",
            f"{stride} px ({window} less tile_sample_min_overlap_{axis}={overlap})", needs_overlap=True, last="spread",
        )  # fmt: skip

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        scale = ratio if half == "decode" else 1
        return bool(height * scale > vae.tile_sample_min_height or width * scale > vae.tile_sample_min_width)

    def window_px(self, vae: Any) -> tuple[int, int]:
        return vae.tile_sample_min_height, vae.tile_sample_min_width

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        out: Attributes = {name: ask.window * ratio for name, ask in zip(SIDES, asks, strict=True)}
        return out | {name: ask.overlap * ratio for name, ask in zip(self.overlap_names, asks, strict=True)}


@dataclass(frozen=True)
class HardCoded:
    """A window and a stride in pixels that the class sets for itself, `(frames, height, width)`: Allegro.

    Its loop makes whole tiles alone, of the one window that it was trained for: any other is refused.
    """

    window_names: tuple[str, ...] = ("kernel",)
    overlap_names: tuple[str, ...] = ("stride",)
    extra_names: tuple[str, ...] = ()
    least_overlap: int = 0

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        return self._axis(vae, "height", 1, half, height, ratio), self._axis(vae, "width", 2, half, width, ratio)

    def _axis(self, vae: Any, axis: Axis, place: int, half: Half, length: int, ratio: int) -> AxisLoop:
        window, stride = vae.kernel[place], vae.stride[place]
        into, out = (ratio, 1) if half == "decode" else (1, ratio)
        return AxisLoop(
            axis, half, length, window // into, stride // into, stride // out, (window - stride) // out, ratio,
            f"{window} px (kernel[{place}])", f"{stride} px (stride[{place}])", last="drop",
        )  # fmt: skip

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        # the class has no other way to decode
        return True

    def window_px(self, vae: Any) -> tuple[int, int]:
        return vae.kernel[1], vae.kernel[2]

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        for ask, window, stride in zip(asks, vae.kernel[1:], vae.stride[1:], strict=True):
            if ask.window * ratio != window or (ask.tiled and ask.overlap * ratio != window - stride):
                return (
                    f"the class has one window, {vae.kernel[1]} x {vae.kernel[2]} px with an overlap of "
                    f"{vae.kernel[1] - vae.stride[1]} x {vae.kernel[2] - vae.stride[2]} px, and no other"
                )
        return {"kernel": vae.kernel, "stride": vae.stride}

"""Layouts of classes whose own loop knows one square window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halotile.families.axis_loop import Axis, AxisLoop, Half
from halotile.families.factors import fallback_factor, shared_factor
from halotile.families.layout import SIDES, STRIDES, Asks, Attributes, factor_axis, stride_axis, strides


@dataclass(frozen=True)
class SquareFactor:
    """One square window in pixels and in latents, and a factor: AutoencoderKL and its kin.

    Rectangles are `tile_sample_min_height` and `tile_sample_min_width`, overlaps `tile_sample_stride_height` and
    `tile_sample_stride_width`, in pixels, as other classes call them. The class enters its loop where a side is larger
    than its square window, so that is the shorter side of a rectangle. `cut_stride` is whether the class cuts the
    stride, too, or subtracts.
    """

    cut_stride: bool = True
    least_overlap: int = 0
    extra_names: tuple[str, ...] = (*SIDES, *STRIDES)
    window_names: tuple[str, ...] = ("tile_sample_min_size", "tile_latent_min_size", *SIDES)
    overlap_names: tuple[str, ...] = ("tile_overlap_factor", *STRIDES)

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        return self._axis(vae, "height", half, height, ratio), self._axis(vae, "width", half, width, ratio)

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, ratio: int) -> AxisLoop:
        sample, latent = self._side(vae, axis, ratio)
        stride = getattr(vae, f"tile_sample_stride_{axis}", None)
        if stride is not None:
            return stride_axis(axis, half, length, sample, latent, int(stride), ratio)
        names = ("tile_sample_min_size", "tile_overlap_factor")
        return self.own_axis(axis, half, length, sample, latent, vae.tile_overlap_factor, ratio, names)

    def own_axis(
        self, axis: Axis, half: Half, length: int, sample: int, latent: int, factor: float, ratio: int,
        names: tuple[str, str],
    ) -> AxisLoop:  # fmt: skip
        """The loop by the class's factor."""
        return factor_axis(axis, half, length, sample, latent, factor, ratio, names)

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        unit = 1 if half == "decode" else 0
        return height > self._side(vae, "height", ratio)[unit] or width > self._side(vae, "width", ratio)[unit]

    def window_px(self, vae: Any) -> tuple[int, int]:
        return self._side(vae, "height", 1)[0], self._side(vae, "width", 1)[0]

    def attributes(self, vae: Any, asks: Asks, ratio: int, own: bool) -> Attributes | str:
        tall, wide = (ask.window for ask in asks)
        if tall == wide:
            factor = shared_factor(asks, ratio, self.cut_stride)
            if own or isinstance(factor, float):
                return factor if isinstance(factor, str) else self._square(tall, factor, ratio)
        elif own:
            return f"the class has one square window, not {tall * ratio} x {wide * ratio} px"
        side = min(tall, wide)
        out = self._square(side, fallback_factor(asks, [side], ratio, self.cut_stride), ratio)
        if tall != wide:
            out |= {name: ask.window * ratio for name, ask in zip(SIDES, asks, strict=True)}
        return out | strides(asks, ratio)

    def _side(self, vae: Any, axis: Axis, ratio: int) -> tuple[int, int]:
        """The window of an axis in pixels and in latents."""
        side = getattr(vae, f"tile_sample_min_{axis}", None)
        if side is None:
            return vae.tile_sample_min_size, vae.tile_latent_min_size
        return side, side // ratio

    def _square(self, window: int, factor: float, ratio: int) -> Attributes:
        return {
            "tile_sample_min_size": window * ratio,
            "tile_latent_min_size": window,
            "tile_overlap_factor": factor,
        }


@dataclass(frozen=True)
class SquareMask(SquareFactor):
    """A square window whose results are laid over each other with a ramp mask, and not cut (AutoencoderTiny)."""

    cut_stride: bool = False
    # its ramp divides by the rows that it has less one
    least_overlap: int = 1

    def own_axis(
        self, axis: Axis, half: Half, length: int, sample: int, latent: int, factor: float, ratio: int,
        names: tuple[str, str],
    ) -> AxisLoop:  # fmt: skip
        window = latent if half == "decode" else sample
        blend = int(window * factor)
        kept, ramp = (cells * ratio if half == "decode" else cells // ratio for cells in (window - blend, blend))
        return AxisLoop(
            axis, half, length, window, window - blend, kept, ramp, ratio,
            f"{sample} px / {latent} latents ({names[0]})", f"from {names[1]}={factor:g}",
        )  # fmt: skip

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        # the class runs its loop on whatever comes, also for one tile
        return True

"""The arithmetic of the tile loops that autoencoder classes bring along, one layout of attributes a class below.

A layout turns a VAE's tiling attributes into one `AxisLoop` an axis: what the loop will do, in integers. `fault` then
says whether that loses, shifts or repeats rows. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Half = Literal["decode", "encode"]
Axis = Literal["height", "width"]
AXES: tuple[Axis, Axis] = ("height", "width")


@dataclass(frozen=True)
class AxisLoop:
    """One axis of a tile loop: inputs of `window` cells every `stride`, results cut to `kept` and blended over `blend`.

    `length`, `window` and `stride` are cells of what the network is given, `kept` and `blend` of what it returns.
    Decoding multiplies lengths by `ratio`, encoding divides them. `window_set` and `stride_set` word the attributes
    as the user set them.
    """

    axis: Axis
    half: Half
    length: int
    window: int
    stride: int
    kept: int
    blend: int
    ratio: int
    window_set: str
    stride_set: str
    needs_overlap: bool = False

    @property
    def starts(self) -> range:
        """Where the loop's tiles start."""
        return range(0, self.length, self.stride)

    @property
    def thinnest(self) -> int:
        """The length of the last, clipped tile in latent cells."""
        last = min(self.window, self.length - self.starts[-1])
        return last if self.half == "decode" else last // self.ratio

    def out(self, cells: int) -> int:
        """The length of the result of `cells` input cells."""
        return cells * self.ratio if self.half == "decode" else cells // self.ratio

    def fault(self) -> str | None:
        """Why the loop would lose, shift or repeat rows along this axis; None when it would not.

        Source: the slices of diffusers' `tiled_decode` and `tiled_encode`. Tile i is read at i * stride, its result
        is put at i * kept, and the last `blend` rows of one result are mixed with the first of the next: these
        agree only when kept = out(stride) and blend = out(window - stride).
        """
        asked = f"{self.half} along {self.axis}: window {self.window_set}, stride {self.stride_set}"
        if self.window < 1 or self.stride < 1:
            return f"{asked} make tiles of {self.window} cells every {self.stride}; both must be at least 1"
        if self.needs_overlap and self.blend < 1 and self.window < self.length:
            return f"{asked}: without an overlap of at least one row of the result the class cuts every tile to nothing"
        if self.stride > self.window < self.length:
            return f"{asked}: the stride exceeds the window, so the rows between two tiles would be lost"
        if len(self.starts) == 1:
            if self.kept < self.out(self.length):
                return f"{asked} keep {self.kept} of the {self.out(self.length)} rows of the only tile"
            return None
        unit = "latent" if self.half == "decode" else "pixel"
        if self.kept != self.out(self.stride) or (self.half == "encode" and self.stride % self.ratio):
            return (
                f"{asked}: stride and crop disagree: tiles are {self.stride} {unit} rows apart, which is "
                f"{self._exact(self.stride)} rows of the result, but {self.kept} of each are kept"
            )
        if self.blend != self.out(self.window - self.stride):
            return (
                f"{asked}: overlap and blend disagree: neighbours share {self.window - self.stride} {unit} rows, which "
                f"is {self._exact(self.window - self.stride)} rows of the result, but {self.blend} are blended"
            )
        return None

    def _exact(self, cells: int) -> str:
        return f"{cells * self.ratio}" if self.half == "decode" else f"{cells / self.ratio:g}"


class Layout(Protocol):
    """How a class keeps its tile window, and what its loop makes of it."""

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        """The loop's two axes for an input of `height` x `width` cells (latents to decode, pixels to encode)."""

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        """Whether `use_tiling` makes the class run its loop on such an input."""

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        """The attributes for a window of `height_px` x `width_px` with square stride; may not be exact."""


def _factor_axis(
    axis: Axis, half: Half, length: int, sample: int, latent: int, factor: float, ratio: int, names: tuple[str, str]
) -> AxisLoop:
    """The loop of classes that keep a window in pixels, one in latents, and an overlap factor."""
    window, result = (latent, sample) if half == "decode" else (sample, latent)
    stride, blend = int(window * (1 - factor)), int(result * factor)
    return AxisLoop(
        axis, half, length, window, stride, result - blend, blend, ratio,
        f"{sample} px / {latent} latents ({names[0]})", f"from {names[1]}={factor:g}",
    )  # fmt: skip


@dataclass(frozen=True)
class SquareFactor:
    """One square window in pixels and in latents, and a factor: AutoencoderKL and its kin."""

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        one, two = (
            _factor_axis(
                axis, half, length, vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor, ratio,
                ("tile_sample_min_size", "tile_overlap_factor"),
            )
            for axis, length in zip(AXES, (height, width), strict=True)
        )  # fmt: skip
        return one, two

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        size = vae.tile_latent_min_size if half == "decode" else vae.tile_sample_min_size
        return bool(max(height, width) > size)

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        size = max(height_px, width_px)
        return {
            "tile_sample_min_size": size,
            "tile_latent_min_size": size // ratio,
            "tile_overlap_factor": (size - stride_px) / size,
        }


@dataclass(frozen=True)
class AxisFactor:
    """A window an axis in pixels; one factor for both axes, or one an axis (`factors`).

    With `latent_pair` the class keeps the window in latents as well, else it divides where it needs it.
    """

    factors: tuple[str, str]
    latent_pair: bool = True

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        one, two = (
            _factor_axis(
                axis, half, length, getattr(vae, f"tile_sample_min_{axis}"), self._latent(vae, axis, ratio),
                getattr(vae, factor), ratio, (f"tile_sample_min_{axis}", factor),
            )
            for axis, length, factor in zip(AXES, (height, width), self.factors, strict=True)
        )  # fmt: skip
        return one, two

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        if half == "decode":
            return height > self._latent(vae, "height", ratio) or width > self._latent(vae, "width", ratio)
        return bool(height > vae.tile_sample_min_height or width > vae.tile_sample_min_width)

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        size = max(height_px, width_px)
        out: dict[str, int | float] = {"tile_sample_min_height": height_px, "tile_sample_min_width": width_px}
        if self.latent_pair:
            out |= {"tile_latent_min_height": height_px // ratio, "tile_latent_min_width": width_px // ratio}
        return out | dict.fromkeys(self.factors, (size - stride_px) / size)

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

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        one, two = (
            self._axis(vae, axis, half, length, ratio) for axis, length in zip(AXES, (height, width), strict=True)
        )
        return one, two

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, ratio: int) -> AxisLoop:
        window, stride = getattr(vae, f"tile_sample_min_{axis}"), int(getattr(vae, f"tile_sample_stride_{axis}"))
        patch = self.patch(vae)
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

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        out: dict[str, int | float] = {
            "tile_sample_min_height": height_px,
            "tile_sample_min_width": width_px,
            "tile_sample_stride_height": stride_px,
            "tile_sample_stride_width": stride_px,
        }
        if self.latent_pair:
            out |= {"tile_latent_min_height": height_px // ratio, "tile_latent_min_width": width_px // ratio}
        return out


@dataclass(frozen=True)
class AxisMinOverlap:
    """A window and a least overlap an axis, in pixels; the loop widens overlaps until its tiles fit (MiniMax-H3)."""

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        one, two = (
            self._axis(vae, axis, half, length, ratio) for axis, length in zip(AXES, (height, width), strict=True)
        )
        return one, two

    def _axis(self, vae: Any, axis: Axis, half: Half, length: int, ratio: int) -> AxisLoop:
        window, overlap = getattr(vae, f"tile_sample_min_{axis}"), getattr(vae, f"tile_sample_min_overlap_{axis}")
        into, out = (ratio, 1) if half == "decode" else (1, ratio)
        stride = window - overlap
        return AxisLoop(
            axis, half, length, window // into, stride // into, stride // out, overlap // out, ratio,
            f"{window} px (tile_sample_min_{axis})",
            f"{stride} px ({window} less tile_sample_min_overlap_{axis}={overlap})", needs_overlap=True,
        )  # fmt: skip

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        scale = ratio if half == "decode" else 1
        return bool(height * scale > vae.tile_sample_min_height or width * scale > vae.tile_sample_min_width)

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        return {
            "tile_sample_min_height": height_px,
            "tile_sample_min_width": width_px,
            "tile_sample_min_overlap_height": height_px - stride_px,
            "tile_sample_min_overlap_width": width_px - stride_px,
        }


@dataclass(frozen=True)
class SquareMask:
    """A square window whose results are laid over each other with a ramp mask, and not cut (AutoencoderTiny)."""

    def axes(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> tuple[AxisLoop, AxisLoop]:
        window = vae.tile_latent_min_size if half == "decode" else vae.tile_sample_min_size
        blend = int(window * vae.tile_overlap_factor)
        stride, scale = window - blend, vae.spatial_scale_factor
        put = (stride * scale, blend * scale) if half == "decode" else (stride // scale, blend // scale)
        one, two = (
            AxisLoop(
                axis, half, length, window, stride, *put, ratio,
                f"{vae.tile_sample_min_size} px / {vae.tile_latent_min_size} latents (tile_sample_min_size)",
                f"from tile_overlap_factor={vae.tile_overlap_factor:g}",
            )
            for axis, length in zip(AXES, (height, width), strict=True)
        )  # fmt: skip
        return one, two

    def enters(self, vae: Any, half: Half, height: int, width: int, ratio: int) -> bool:
        # the class runs its loop on whatever comes, also for one tile
        return True

    def window(self, height_px: int, width_px: int, stride_px: int, ratio: int) -> dict[str, int | float]:
        return SquareFactor().window(height_px, width_px, stride_px, ratio)

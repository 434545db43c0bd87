"""One axis of a class's tile loop, and one axis of a request for a window: integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halotile.errors import PlanError
from halotile.geometry import DimTiling, Interval, tile_by_loop

Half = Literal["decode", "encode"]
Axis = Literal["height", "width"]
AXES: tuple[Axis, Axis] = ("height", "width")


@dataclass(frozen=True)
class AxisLoop:
    """One axis of a tile loop: inputs of `window` cells every `stride`, results cut to `kept` and blended over `blend`.

    `length`, `window` and `stride` are cells of what the network is given, `kept` and `blend` of what it returns.
    Decoding multiplies lengths by `ratio`, encoding divides them. `window_set` and `stride_set` word the attributes
    as the user set them. `last` is what becomes of a tile that does not fit in: it is clipped, or all tiles are whole
    and `spread` so that they fit, or the loop leaves out (`drop`) what its whole tiles do not reach.
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
    last: Literal["clip", "spread", "drop"] = "clip"

    @property
    def count(self) -> int:
        """How many tiles the loop makes."""
        if self.last == "spread":
            # the fewest with window * n - overlap * (n - 1) >= length
            return 1 if self.window >= self.length else -(-(self.length - self.window + self.stride) // self.stride)
        if self.last == "drop":
            return max(0, (self.length - self.window) // self.stride + 1)
        return len(range(0, self.length, self.stride))

    @property
    def starts(self) -> Sequence[int]:
        """Where the loop's tiles start."""
        count = self.count
        if self.last != "spread" or count == 1:
            return range(0, count * self.stride, self.stride)
        # what is too much goes to the overlaps, a latent at a time and in turn
        step = 1 if self.half == "decode" else self.ratio
        turns, rest = divmod(((count - 1) * self.stride + self.window - self.length) // step, count - 1)
        return [i * self.stride - step * (i * turns + min(i, rest)) for i in range(count)]

    @property
    def thinnest(self) -> int:
        """The length of the thinnest tile in latent cells."""
        cells = min(self.window, self.length)
        if self.last == "clip":
            cells = min(self.window, self.length - (self.count - 1) * self.stride)
        return cells if self.half == "decode" else cells // self.ratio

    @property
    def tiling(self) -> DimTiling:
        """The tiles that the loop cuts, in cells of what the network is given. Raises PlanError when it loses cells."""
        if self.last == "clip":
            return tile_by_loop(self.length, self.window, self.stride)
        tiles = (Interval(start, min(start + self.window, self.length)) for start in self.starts)
        return DimTiling(self.length, tuple(tiles))

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
        if self.last == "drop" and (self.length < self.window or (self.length - self.window) % self.stride):
            return (
                f"{asked}: the class makes whole tiles alone, and {self.length} cells are not {self.window} and a "
                f"multiple of {self.stride}, so the last rows would be lost"
            )
        if self.count == 1:
            if self.last == "clip" and self.kept < self.out(self.length):
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


@dataclass(frozen=True)
class AxisAsk:
    """What is asked for on one axis, in latents: a window, an overlap, and the picture (None: any that is larger)."""

    axis: Axis
    window: int
    overlap: int
    length: int | None

    @property
    def tiled(self) -> bool:
        """Whether the picture is larger than the window; else the axis is to be one tile."""
        return self.length is None or self.length > self.window

    @property
    def cells(self) -> int:
        """The picture's latents; where any will do, a length of several tiles."""
        return self.window + 3 * (self.window - self.overlap) if self.length is None else self.length

    @classmethod
    def of(
        cls, axis: Axis, window_px: int, overlap_px: int, length_px: int | None, ratio: int, least_lat: int
    ) -> AxisAsk | str:
        """The request in latents, or why these pixels cannot be for any loop: `ratio` pixels are one latent."""
        if window_px < ratio:
            return f"{ratio} px are one latent: a window along {axis} needs at least those, got {window_px} px"
        if window_px % ratio:
            return _not_whole("a window", window_px, axis, ratio)
        if window_px < least_lat * ratio:
            return f"the class takes no window of fewer than {least_lat * ratio} px, got {window_px} px along {axis}"
        if not 0 <= overlap_px < window_px:
            return (
                f"an overlap of {overlap_px} px on a window of {window_px} px along {axis} is a stride of "
                f"{window_px - overlap_px} px, which must be at least 1 and at most the window"
            )
        if overlap_px % ratio:
            return _not_whole("an overlap", overlap_px, axis, ratio)
        if length_px is None:
            return cls(axis, window_px // ratio, overlap_px // ratio, None)
        if length_px < 1 or length_px % ratio:
            return _not_whole("a picture", length_px, axis, ratio)
        if length_px <= window_px and overlap_px:
            return (
                f"the window of {window_px} px clears the {length_px} px along {axis}, so that axis is one tile and "
                f"its overlap 0, not {overlap_px} px"
            )
        return cls(axis, window_px // ratio, overlap_px // ratio, length_px // ratio)


def require_pair(name: str, value: object) -> tuple[int, int]:
    """`value` as two whole numbers (height, width); raises PlanError for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise PlanError(f"{name} is {value!r}; it must be two whole numbers of pixels, (height, width)")
    for side in value:
        if not isinstance(side, int) or isinstance(side, bool):
            raise PlanError(f"{name} is {value!r}; both must be whole pixels, such as (512, 512)")
    return value[0], value[1]


def _not_whole(what: str, pixels: int, axis: Axis, ratio: int) -> str:
    return (
        f"{ratio} px are one latent: {what} of {pixels} px along {axis} is not whole latents; try "
        f"{max(pixels // ratio, 1) * ratio} or {(pixels // ratio + 1) * ratio}"
    )

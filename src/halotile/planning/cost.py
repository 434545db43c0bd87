"""What a grid of tiles costs: memory of one tile, work done again, seams, and how even the ranks' loads are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Any, Literal, get_args

from halotile.errors import PlanError
from halotile.geometry import DimTiling, TileGrid
from halotile.geometry.whole import require_whole
from halotile.planning.deal import Scheduler, deal, loads_of

PlanName = Literal["coarse", "balanced", "fine", "asked"]


def price(
    grid: TileGrid,
    ratio: int,
    ranks: int,
    *,
    window_px: tuple[int, int],
    overlap_px: tuple[int, int],
    name: PlanName = "asked",
    scheduler: Scheduler = "balanced",
    frames: int = 1,
    time: DimTiling | None = None,
    predicted_bytes: int | None = None,
) -> TilePlan:
    """Deal the tiles of `grid` (H, W in latent cells) to `ranks` by their cells, and say what that costs.

    The arguments are the fields of `TilePlan`; `scheduler` is one of `halotile.planning.SCHEDULERS`. A temporal loop
    that decodes some frames twice is given as its chunks, `time`, and every tile of every chunk is dealt on its own.

    Example: full-width strips of 43 latent rows, 32 apart, of a picture of 1024 × 1024 pixels at 8 pixels a latent:

    >>> from halotile.geometry import TileGrid, tile_by_loop
    >>> grid = TileGrid((tile_by_loop(128, 43, 32), tile_by_loop(128, 128, 128)))
    >>> plan = price(grid, 8, 4, window_px=(344, 1024), overlap_px=(88, 0))
    >>> plan.tiles, plan.seams, plan.loads
    (4, 3, (5504, 5504, 5504, 4096))
    >>> plan.window_share, plan.decoded_ratio, plan.imbalance
    (Fraction(43, 128), Fraction(161, 128), Fraction(11, 161))

    Raises `PlanError` for numbers that cannot be, which it names.
    """
    require_whole("ranks", ranks, least=1)
    require_whole("frames", frames, least=1)
    owners = deal(tuple(_costs(grid, frames, time)), ranks, scheduler)
    return TilePlan(name, window_px, overlap_px, grid, ratio, ranks, owners, frames, time, predicted_bytes)


@dataclass(frozen=True)
class TilePlan:
    """One grid of tiles over a picture, dealt to ranks, and what it costs. `price` makes one.

    All costs are exact: whole numbers or fractions. They describe geometry; none of them is a time.
    """

    name: PlanName
    """`coarse`, `balanced` or `fine` of a search, or `asked`: an exact request."""
    window_px: tuple[int, int]
    """Height and width of a tile as asked for, in pixels; it may exceed the picture."""
    overlap_px: tuple[int, int]
    """Pixels that neighbours share along height and width as asked for; 0 where the window clears the picture."""
    grid: TileGrid
    """The tiles that the VAE's loop will cut: two dims (H, W), in latent cells."""
    ratio: int
    """Pixels a latent, along height and width."""
    ranks: int
    owners: tuple[int, ...]
    """The rank of each tile, in row-major order; with several chunks of frames, chunk by chunk."""
    frames: int = 1
    """Latent frames of the picture; 1 for a still."""
    time: DimTiling | None = None
    """The chunks of latent frames that a temporal loop decodes apart from each other, such as HunyuanVideo's: window
    and stride in frames. None when every frame goes through the network once, also where a class feeds a tile's
    frames in batches that share a cache (CogVideoX, Wan): those repeat no frame."""
    predicted_bytes: int | None = None
    """Peak bytes of the activations of one tile, when there is an estimate."""

    def __post_init__(self) -> None:
        if self.name not in get_args(PlanName):
            raise PlanError(f"name={self.name!r} is not known; choose one of {', '.join(get_args(PlanName))}")
        for name, least in (("ratio", 1), ("ranks", 1), ("frames", 1)):
            require_whole(name, getattr(self, name), least=least)
        if self.predicted_bytes is not None:
            require_whole("predicted_bytes", self.predicted_bytes, least=0)
        if len(self.grid.dims) != 2:
            raise PlanError(f"a plan's grid has two dims (H, W), got {len(self.grid.dims)}; frames go into `time`")
        if self.time is not None and self.time.length != self.frames:
            raise PlanError(f"the chunks in time cover {self.time.length} latent frames, but frames is {self.frames}")
        if any(len(pair) != 2 for pair in (self.window_px, self.overlap_px)):
            raise PlanError(f"window_px {self.window_px} and overlap_px {self.overlap_px} are (height, width) each")
        for axis in (0, 1):
            self._check_axis(axis)
        if len(self.owners) != self.tiles * self.chunks:
            raise PlanError(
                f"{len(self.owners)} owners for {self.tiles} tiles of {self.chunks} chunks of frames: "
                f"each of the {self.tiles * self.chunks} needs one"
            )
        for owner in self.owners:
            require_whole("an owner", owner)
            if owner not in range(self.ranks):
                raise PlanError(f"owner {owner} is not one of {self.ranks} ranks; ranks are 0 to {self.ranks - 1}")

    @property
    def picture_px(self) -> tuple[int, int]:
        """Height and width of the picture in pixels."""
        height, width = self.grid.lengths
        return height * self.ratio, width * self.ratio

    @property
    def window_lat(self) -> tuple[int, int]:
        """Height and width of the largest tile in latent cells: the window, clipped to the picture."""
        height, width = (max(len(tile) for tile in dim.tiles) for dim in self.grid.dims)
        return height, width

    @property
    def rows(self) -> int:
        """Tiles along height."""
        return self.grid.shape[0]

    @property
    def columns(self) -> int:
        """Tiles along width."""
        return self.grid.shape[1]

    @property
    def tiles(self) -> int:
        """Tiles of the picture, `rows` × `columns`."""
        return self.grid.count

    @property
    def chunks(self) -> int:
        """Chunks of frames that are decoded apart from each other; 1 without a temporal loop. Each has all tiles."""
        return 1 if self.time is None else self.time.count

    @property
    def window_share(self) -> Fraction:
        """Area of the largest tile over the picture's: of the activations of a whole decode, those that a tile holds.

        Frames are not counted: a temporal loop holds less of them in the same proportion for every window.
        """
        height, width = self.window_lat
        return Fraction(height * width, self._area)

    @property
    def decoded_ratio(self) -> Fraction:
        """Latent cells that all ranks decode, over those that there are: area and, with a temporal loop, frames."""
        return Fraction(sum(self.loads), self._area * self.frames)

    @property
    def seams(self) -> int:
        """Borders between neighbouring tiles: `rows` × (`columns` − 1) + `columns` × (`rows` − 1).

        Strips in 4 rows have 3; 3 × 5 tiles have 3 · 4 + 5 · 2 = 22. A temporal loop has `chunks` − 1 more, in time.
        """
        return self.rows * (self.columns - 1) + self.columns * (self.rows - 1)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Latent cells (times frames) that each rank decodes."""
        return loads_of(tuple(_costs(self.grid, self.frames, self.time)), self.owners, self.ranks)

    @property
    def heaviest(self) -> int:
        """Latent cells (times frames) of the rank that decodes the most: the others wait for it."""
        return max(self.loads)

    @property
    def imbalance(self) -> Fraction:
        """Heaviest rank over the mean of all ranks, idle ones included, minus 1: 0 when all decode the same."""
        return Fraction(self.heaviest * self.ranks, sum(self.loads)) - 1

    @property
    def idle_ranks(self) -> int:
        """Ranks that get no tile: there are fewer tiles than ranks, so more ranks would not help."""
        return self.ranks - len(set(self.owners))

    def to_dict(self) -> dict[str, Any]:
        """All costs as JSON takes them; `exact` has those that are fractions as text, such as 43/128."""
        fractions = {name: getattr(self, name) for name in ("window_share", "decoded_ratio", "imbalance")}
        return {
            "name": self.name,
            "picture_px": list(self.picture_px),
            "ratio": self.ratio,
            "ranks": self.ranks,
            "window_px": list(self.window_px),
            "overlap_px": list(self.overlap_px),
            "rows": self.rows,
            "columns": self.columns,
            "tiles": self.tiles,
            "frames": self.frames,
            "chunks": self.chunks,
            "seams": self.seams,
            "owners": list(self.owners),
            "loads": list(self.loads),
            "idle_ranks": self.idle_ranks,
            "predicted_bytes": self.predicted_bytes,
            **{name: float(value) for name, value in fractions.items()},
            "exact": {name: str(value) for name, value in fractions.items()},
        }

    @property
    def _area(self) -> int:
        height, width = self.grid.lengths
        return height * width

    def _check_axis(self, axis: int) -> None:
        name = ("height", "width")[axis]
        window, overlap, dim = self.window_px[axis], self.overlap_px[axis], self.grid.dims[axis]
        require_whole(f"the window's {name}", window, least=1)
        require_whole(f"the overlap along {name}", overlap, least=0)
        asked = f"along {name}: a window of {window} px with an overlap of {overlap} px"
        if window % self.ratio or overlap % self.ratio:
            raise PlanError(f"{asked} is not whole latents; both must be multiples of {self.ratio} px")
        if overlap >= window:
            raise PlanError(f"{asked} does not advance; the overlap must be less than the window")
        if overlap and window >= self.picture_px[axis]:
            raise PlanError(
                f"{asked} clears the {self.picture_px[axis]} px of the picture: there is no neighbour to share with, "
                f"so the overlap must be 0"
            )
        if self.window_lat[axis] != min(window // self.ratio, dim.length):
            raise PlanError(
                f"{asked} is {window // self.ratio} latents, but the largest tile of the grid has "
                f"{self.window_lat[axis]} of {dim.length}"
            )


def _costs(grid: TileGrid, frames: int, time: DimTiling | None) -> Iterator[int]:
    """Latent cells times frames of each tile, chunk by chunk, tiles in row-major order."""
    chunks = [frames] if time is None else [len(chunk) for chunk in time.tiles]
    return (
        chunk * len(row) * len(column) for chunk, row, column in product(chunks, grid.dims[0].tiles, grid.dims[1].tiles)
    )

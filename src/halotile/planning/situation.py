"""What a strategy is chosen from: what the call is, how fast ranks are, what is predicted of each way to run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from halotile.errors import PlanError
from halotile.geometry.whole import require_whole
from halotile.planning.deal import Scheduler

Chosen = Literal["serial", "shard", "tile", "hybrid"]
Term = tuple[float, float, float]
"""What does not grow, what grows with the latent cells (height x width), what grows with their square."""
Pair = tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """How fast one rank is while all of them work, for one class, dtype and machine.

    flops_per_s: floating point operations of a call, over the seconds that grow with it. call_s: seconds of a call of
    the network that do not grow. slowdown: seconds of a sharded call's own rows over those of the same rows of a whole
    call, at least 1: seams computed again, halos waited for. exchange_s: seconds for each place where a sharded call
    looks across rows, that do not grow. bytes_per_s: of results on their way. source: where the numbers come from.
    """

    flops_per_s: float
    call_s: float
    slowdown: float
    exchange_s: float
    bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "call_s", "slowdown", "exchange_s", "bytes_per_s"):
            if type(getattr(self, name)) not in (int, float):
                raise PlanError(f"{name} must be a number, got {getattr(self, name)!r}")
        for name in ("flops_per_s", "bytes_per_s"):
            if not 1 <= getattr(self, name) < 1e30:
                raise PlanError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("call_s", "exchange_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise PlanError(f"{name} must be at least 0 and some seconds at most, got {getattr(self, name)}")
        if not 1 <= self.slowdown < 1e6:
            raise PlanError(f"slowdown must be at least 1 and no more than some times, got {self.slowdown}")


@dataclass(frozen=True)
class Situation:
    """All that the choice depends on, from shapes alone.

    shape_lat: height and width of the latent. flops: of the whole call, as a function of its cells. peak: terms of the
    peak of live activation bytes (`halotile.decode.footprint`); empty where it is not known. exchanges: places in one
    pass of the network that look across rows. result_bytes: of what comes out. min_rows: the least latent rows of a
    rank that the class's network takes. tiling: whether the VAE's own tiling is on. tiles: (rows, columns) of each tile
    that its loop cuts, or would; empty where it has no loop. chunks: the loop over frames deals every tile in so many
    pieces. no_tile: why the class's tiles cannot be dealt. budget_bytes: what a rank
    may hold; None where that is not known. hybrid: whether ranks may share a tile.
    """

    ranks: int
    shape_lat: Pair
    flops: Term
    peak: tuple[Term, ...]
    exchanges: int
    result_bytes: int
    min_rows: int = 1
    tiling: bool = False
    tiles: tuple[Pair, ...] = ()
    chunks: int = 1
    no_tile: str = ""
    budget_bytes: int | None = None
    hybrid: bool = True
    scheduler: Scheduler = "balanced"

    def __post_init__(self) -> None:
        require_whole("ranks", self.ranks, least=1)
        if self.budget_bytes is not None:
            require_whole("memory_budget_bytes", self.budget_bytes, least=1)
        for name, side in zip(("height", "width"), self.shape_lat, strict=True):
            require_whole(name, side, least=1)

    @property
    def cells(self) -> int:
        """Of the latent, height x width."""
        return self.shape_lat[0] * self.shape_lat[1]

    @property
    def tiled(self) -> bool:
        """Whether the VAE's own loop runs, with more than one tile."""
        return self.tiling and len(self.tiles) > 1


@dataclass(frozen=True)
class Prediction:
    """One way to run the call. refused: why it may not run; empty where it may. peak_bytes: None where not known."""

    strategy: Chosen
    shards_per_tile: int
    seconds: float
    peak_bytes: int | None
    refused: str = ""

    @property
    def name(self) -> str:
        """The strategy, with the shards of a hybrid one."""
        return f"hybrid, {self.shards_per_tile} shards a tile" if self.strategy == "hybrid" else self.strategy


@dataclass(frozen=True)
class Decision:
    """What runs, why, and every number that led to it: `situation`, `rates`, and the predictions in their order."""

    best: Prediction
    reason: str
    predictions: tuple[Prediction, ...]
    situation: Situation
    rates: Rates

    @property
    def strategy(self) -> Chosen:
        """The strategy that runs."""
        return self.best.strategy

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


def peak_of(terms: Sequence[Term], cells: float, share: float = 1.0) -> int | None:
    """Predicted bytes of a tile of so many cells, of which a rank has the part `share`; None without terms."""
    if not terms:
        return None
    return math.ceil(max(fixed + share * cells * (a + cells * b) for fixed, a, b in terms))


def grown(term: Term, cells: float) -> float:
    """A term's value for so many cells."""
    return term[0] + cells * (term[1] + cells * term[2])


def tiles_of(rows: Sequence[int], columns: Sequence[int]) -> tuple[Pair, ...]:
    """(rows, columns) of every tile of a grid, row by row."""
    return tuple(product(rows, columns))

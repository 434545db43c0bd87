"""How calls are to be run: `Options`, checked when built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halotile.comm import Deliver, Ranks
from halotile.errors import PlanError, UnsupportedError
from halotile.planning import SCHEDULERS, Scheduler
from halotile.planning.tilings import TileCountConfig, TileSizeConfig, Tiling

Strategy = Literal["auto", "serial", "tile", "shard", "hybrid"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How calls are to be run; see `parallelize`. Raises PlanError and UnsupportedError for what cannot be."""

    strategy: Strategy = "auto"
    deliver: Deliver = "all"
    driver: int = 0
    scheduler: Scheduler = "balanced"
    strict: bool = False
    dim: int | None = None
    tiling: Tiling | None = None
    shards_per_tile: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("strategy", self.strategy, get_args(Strategy)),
            ("deliver", self.deliver, get_args(Deliver)),
            ("scheduler", self.scheduler, SCHEDULERS),
        ):
            if value not in known:
                raise PlanError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
        if self.tiling is not None and not isinstance(self.tiling, (TileCountConfig, TileSizeConfig)):
            raise UnsupportedError(
                f"tiling={self.tiling!r} is not a tiling; give a TileCountConfig or a TileSizeConfig, or None for the "
                "VAE's own tile loop"
            )
        if self.tiling is not None and self.strategy not in ("auto", "tile"):
            raise PlanError(
                f"tiling= is a grid of tiles, which strategy={self.strategy!r} would ignore; use strategy='tile', or "
                "leave tiling out"
            )
        self._check_shards()
        if self.strict and self.strategy not in ("shard", "hybrid"):
            raise PlanError(
                "strict=True is about the operations of strategy='shard' and 'hybrid'; "
                f"with strategy={self.strategy!r} it would be ignored"
            )
        if self.dim is not None and type(self.dim) is not int:
            raise PlanError(f"dim={self.dim!r}: give the number of a spatial dim, such as -2, or None")
        if self.dim is not None and self.strategy != "shard" and self.deliver != "sharded":
            raise PlanError(
                f"dim={self.dim} says which rows are dealt by strategy='shard', or left by deliver='sharded'; "
                f"with strategy={self.strategy!r} and deliver={self.deliver!r} it would be ignored"
            )

    def _check_shards(self) -> None:
        shards = self.shards_per_tile
        if self.strategy == "hybrid" and (type(shards) is not int or shards < 1):
            raise PlanError(
                f"strategy='hybrid' needs shards_per_tile, how many ranks share one tile; got {shards!r}, give a whole "
                "number of at least 1 that divides the group's ranks"
            )
        if self.strategy != "hybrid" and shards is not None:
            raise PlanError(
                f"shards_per_tile={shards!r} is about strategy='hybrid'; with strategy={self.strategy!r} it would be "
                "ignored"
            )

    def check_group(self, ranks: Ranks) -> None:
        """Raise PlanError for a group that does not fit, MembershipError for a driver that is not in it."""
        shards, size = self.shards_per_tile, ranks.size
        if shards is not None and size % shards:
            fitting = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
            raise PlanError(
                f"shards_per_tile={shards} does not cut the {size} ranks of the group into equal subgroups; for {size} "
                f"ranks choose one of {fitting}"
            )
        ranks.check(self.driver, "driver")

    def receivers(self, ranks: Ranks) -> Sequence[int]:
        """The ranks that get the result."""
        ranks.check(self.driver, "driver")
        return [self.driver] if self.deliver == "driver" else range(ranks.size)

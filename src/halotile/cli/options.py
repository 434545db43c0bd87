"""The options that commands share, in one wording."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from halotile.errors import PlanError
from halotile.planning.tilings import DimensionTilingConfig, TileCountConfig


class Strategy(str, Enum):
    """How the work is spread; see `halotile.parallelize`."""

    auto = "auto"
    serial = "serial"
    tile = "tile"
    shard = "shard"
    hybrid = "hybrid"


class Profile(str, Enum):
    """A window that `halotile plan` proposes."""

    coarse = "coarse"
    balanced = "balanced"
    fine = "fine"


class DType(str, Enum):
    """The precision that the VAE runs in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """Where the VAE runs."""

    cpu = "cpu"
    cuda = "cuda"


VaeOption = Annotated[Path, typer.Option("--vae", metavar="DIR", help="VAE folder made by diffusers' save_pretrained.")]
DemoRanksOption = Annotated[int | None, typer.Option("--ranks", min=1, help="Local ranks to start. (default: 2)")]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Local ranks to start. Under torchrun: leave it out. (default: 1)")
]
StrategyOption = Annotated[
    Strategy,
    typer.Option(
        "--strategy",
        help="serial: one rank. tile: the VAE's own tiles, shared. shard: no tiles, each rank has some of the rows. "
        "hybrid: tiles, each shared by --shards-per-tile ranks. auto: what is predicted best, or tile with a window.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="With shard and hybrid: refuse operations that would have to gather all rows."),
]
ShardsOption = Annotated[
    int | None, typer.Option("--shards-per-tile", min=1, help="With --strategy hybrid: how many ranks share a tile.")
]
TileOption = Annotated[
    int | None, typer.Option("--tile", min=1, metavar="PX", help="Tile window in pixels; switches the VAE's tiling on.")
]
StrideOption = Annotated[
    int | None, typer.Option("--stride", min=1, metavar="PX", help="Pixels from tile to tile. (default: 3/4 of --tile)")
]
WindowOption = Annotated[
    str | None,
    typer.Option("--window", metavar="HxW", help="Exactly this tile window in pixels, height and width apart."),
]
OverlapOption = Annotated[
    str | None,
    typer.Option("--overlap", metavar="HxW", help="Pixels shared with the next tile. (default: 1/4 of --window)"),
]
ProfileOption = Annotated[
    Profile | None, typer.Option("--profile", help="A window that `halotile plan` proposes for these ranks.")
]
GridOption = Annotated[
    str | None,
    typer.Option(
        "--grid", metavar="FxHxW", help="halotile's own tiles: how many along frames, height and width, such as 1x8x1."
    ),
]
GridOverlapOption = Annotated[
    str | None,
    typer.Option("--grid-overlap", metavar="FxHxW", help="Latents that tiles of --grid share. (default: 0x0x0)"),
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Precision that the VAE runs in.")]
DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="(default: cuda where it has a device for each rank, else cpu)")
]


@dataclass(frozen=True)
class Spread:
    """How a VAE's work is to be spread. Windows, strides and overlaps in pixels; None leaves them to the VAE."""

    strategy: Literal["auto", "serial", "tile", "shard", "hybrid"] = "auto"
    tile_px: int | None = None
    stride_px: int | None = None
    strict: bool = False
    window_px: tuple[int, int] | None = None
    overlap_px: tuple[int, int] | None = None
    profile: Literal["coarse", "balanced", "fine"] | None = None
    shards_per_tile: int | None = None

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        tile_px: int | None,
        stride_px: int | None,
        strict: bool = False,
        window: str | None = None,
        overlap: str | None = None,
        profile: Profile | None = None,
        shards_per_tile: int | None = None,
    ) -> Spread:
        """From a command's options. Raises `PlanError` for options that do not go together."""
        asked = {"--tile": tile_px, "--window": window, "--profile": profile and profile.value}
        given = [f"{name} {value}" for name, value in asked.items() if value is not None]
        if strategy == Strategy.shard and given:
            raise PlanError(f"{given[0]} would be ignored: --strategy shard cuts no tiles")
        if strategy == Strategy.auto and given:
            # whoever asks for a window means tiles
            strategy = Strategy.tile
        if strict and strategy not in (Strategy.shard, Strategy.hybrid):
            raise PlanError(f"--strict would be ignored: it is about shard and hybrid, not {strategy.value}")
        if len(given) > 1:
            raise PlanError(f"{' and '.join(given)} are different windows; give one of them")
        if stride_px is not None and tile_px is None:
            raise PlanError(f"--stride {stride_px} needs --tile")
        if overlap is not None and window is None:
            raise PlanError(f"--overlap {overlap} needs --window")
        if tile_px is not None and stride_px is not None and stride_px > tile_px:
            raise PlanError(f"--stride {stride_px} exceeds --tile {tile_px}: rows between two tiles would be lost")
        return cls(
            strategy.value,
            tile_px,
            stride_px,
            strict,
            None if window is None else pixels_of("--window", window),
            None if overlap is None else pixels_of("--overlap", overlap),
            None if profile is None else profile.value,
            shards_per_tile,
        )


def grid_of(grid: str | None, overlap: str | None) -> TileCountConfig | None:
    """Tiles by count from --grid and --grid-overlap; raises `PlanError` for what is none."""
    if grid is None:
        if overlap is not None:
            raise PlanError(f"--grid-overlap {overlap} needs --grid")
        return None
    counts = _numbers("--grid", grid, 3, "FxHxW: tiles along frames, height and width, such as 1x8x1")
    shared: tuple[int, ...] = (0, 0, 0)
    if overlap is not None:
        shared = _numbers("--grid-overlap", overlap, 3, "FxHxW: latents along frames, height and width, such as 0x4x0")
    return TileCountConfig(*map(DimensionTilingConfig, counts, shared))


def pixels_of(option: str, text: str) -> tuple[int, int]:
    """Height and width of an option such as 432x296; raises `PlanError` for anything else."""
    height, width = _numbers(option, text, 2, "HxW: height and width in pixels, such as 432x296")
    return height, width


def sigmas_of(text: str) -> tuple[float, ...]:
    """Noise levels of an option such as 0.5,0.9; raises `PlanError` for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--sigmas {text!r} is not a list of numbers such as 0.5,0.9") from None


def _numbers(option: str, text: str, count: int, what: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) != count or not all(part.isascii() and part.isdigit() for part in parts):
        raise PlanError(f"{option} {text!r} is not {what}")
    return tuple(map(int, parts))

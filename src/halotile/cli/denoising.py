"""What `halotile demo --denoise` does: upscale the held-out photograph, whole and in tiles, and compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import halotile
from halotile.cli.demo_dit import PATCH, PhotoDiT, from_tokens, grid_positions, load_dit, to_tokens
from halotile.cli.launch import Seat
from halotile.cli.media import read_image, write_image
from halotile.cli.panels import Panel, Tile, picture_of, write_side_by_side
from halotile.comm import Ranks
from halotile.decode.folder import load_vae
from halotile.denoise import plan_tokens
from halotile.errors import PlanError
from halotile.planning import deal
from halotile.planning.tilings import DimensionTilingConfig, TileCountConfig
from halotile.verify import psnr_db

DATA = Path(__file__).parent.parent / "data"
OVERLAP = 4  # tokens
NOISE_SEED = 0
CELL_PX = 8 * PATCH  # pixels along the side of a token


@dataclass(frozen=True)
class Study:
    """A model of the package's data, and whether it is shown the guide beside the re-noised start."""

    model: str
    guided: bool

    @property
    def name(self) -> str:
        """For titles."""
        return f"{self.model} positions, {'guided' if self.guided else 'no guide'}"


@dataclass(frozen=True)
class Layout:
    """How the tokens are cut: `side` x `side` tiles, whose positions begin at zero or stay (`normalised`)."""

    side: int
    normalised: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        if self.side == 1:
            return "whole frame"
        return f"{self.side**2} tiles" + ("" if self.normalised else ", unshifted")

    @property
    def tiling(self) -> TileCountConfig:
        """In tokens."""
        along = DimensionTilingConfig(self.side, OVERLAP)
        return TileCountConfig(height=along, width=along)


STUDIES = (Study("rotary", False), Study("rotary", True), Study("absolute", False), Study("absolute", True))
WHOLE = Layout(1)
SHOWN = STUDIES[1]
LAYOUTS = (Layout(2), Layout(2, normalised=False), Layout(3), Layout(4))


@dataclass(frozen=True)
class Settings:
    """What to run: first noise levels (0 to 1), Euler steps from each down to 0, and the picture's side in pixels."""

    sigmas: tuple[float, ...]
    steps: int
    side_px: int

    def __post_init__(self) -> None:
        for sigma in self.sigmas:
            if not 0 < sigma <= 1:
                raise PlanError(f"--sigmas {sigma:g}: a first sigma is above 0 and at most 1")
        if self.steps < 1:
            raise PlanError(f"--steps {self.steps}: at least 1")
        least = (OVERLAP + LAYOUTS[-1].side) * CELL_PX
        if self.side_px % CELL_PX or self.side_px < least:
            raise PlanError(
                f"--side {self.side_px}: pixels along the picture's side, a multiple of {CELL_PX} and at least {least}"
            )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, height and width in tokens."""
        return (1, self.side_px // CELL_PX, self.side_px // CELL_PX)


@dataclass(frozen=True)
class Run:
    """One denoising. seconds: of its forwards. drift: mean over its steps. psnr_db: of the decoded picture against the
    source. same: whether one rank made the same bits; None where that was not asked.
    """

    study: Study
    layout: Layout
    sigma: float
    seconds: float
    drift: float
    alone_s: float | None = None
    same: bool | None = None
    psnr_db: float = 0.0


@dataclass(frozen=True)
class Findings:
    """What the demonstration tells. start_db: the guide, decoded; best_db: the source's own latent, decoded."""

    ranks: int
    threads: int
    start_db: float
    best_db: float
    runs: tuple[Run, ...]

    @property
    def agree(self) -> bool:
        """Whether the ranks together made what one rank makes, everywhere."""
        return all(run.same is not False for run in self.runs)


@torch.no_grad()
def denoise_work(seat: Seat, out: Path, settings: Settings) -> Findings | None:
    """Run all studies over the ranks, then alone what is to be compared; write the pictures. None but on the driver."""
    scene = _Scene.load(seat, settings)
    cases = [(study, sigma) for study in STUDIES for sigma in settings.sigmas]
    tiled = [_denoise(scene, *case, layout, Ranks.of(seat.group)) for case in cases for layout in LAYOUTS]
    if not seat.is_driver:
        return None
    # all shared work is done: while the driver works alone, nobody waits for it
    done = [_denoise(scene, *case, WHOLE, Ranks.alone()) for case in cases]
    done += [each if seat.ranks == 1 else _compared(scene, *each) for each in tiled]
    pictures = {run: scene.decode(tokens) for run, tokens in done}
    runs = [replace(run, psnr_db=psnr_db(pixels, scene.source)) for run, pixels in pictures.items()]
    start, best = scene.decode(scene.guide), scene.decode(scene.latent)
    _write_pictures(out, scene, seat.ranks, settings.sigmas[-1], start, pictures)
    return Findings(
        seat.ranks, torch.get_num_threads(), psnr_db(start, scene.source), psnr_db(best, scene.source), tuple(runs)
    )


@dataclass(frozen=True)
class _Scene:
    """source: `1 3 H W`. latent and guide: the source's tokens and those that a picture of half its size gives."""

    vae: Any
    models: dict[str, PhotoDiT]
    settings: Settings
    source: Tensor
    latent: Tensor
    guide: Tensor

    @classmethod
    def load(cls, seat: Seat, settings: Settings) -> _Scene:
        vae = load_vae(DATA / "photo_vae", seat.device)
        models = {name: load_dit(DATA / "photo_dit" / name).to(seat.device) for name in ("rotary", "absolute")}
        config = models["rotary"].config
        photo = read_image(DATA / "photo.jpg")
        source = F.interpolate(photo, settings.grid[1] * CELL_PX, mode="bilinear", antialias=True)
        small = F.interpolate(source, scale_factor=0.5, mode="area")
        latent, low = (vae.encode(pixels.to(seat.device)).latent_dist.mode() for pixels in (source, small))
        guide = F.interpolate(low, scale_factor=2, mode="bilinear")
        return cls(vae, models, settings, source, to_tokens(latent, config), to_tokens(guide, config))

    def decode(self, tokens: Tensor) -> Tensor:
        """Pixels `1 3 H W` on the CPU."""
        latents = from_tokens(tokens, self.settings.grid, self.models["rotary"].config)
        pixels: Tensor = self.vae.decode(latents).sample
        return pixels.clamp(-1, 1).cpu()


def _denoise(scene: _Scene, study: Study, sigma: float, layout: Layout, ranks: Ranks) -> tuple[Run, Tensor]:
    """Euler steps from the guide, noised to `sigma`, down to no noise."""
    denoiser = halotile.TiledDenoiser(
        scene.models[study.model],
        layout.tiling,
        ranks,
        normalize_positions=layout.normalised,
        deterministic=True,
        first_sigma_limit=1.0,  # the demonstration is there to show what such a start does
    )
    grid, guide = scene.settings.grid, scene.guide
    positions = grid_positions(grid).to(guide.device)
    given = {"guide": guide} if study.guided else {}
    noise = torch.randn(guide.shape, generator=torch.Generator().manual_seed(NOISE_SEED)).to(guide.device)
    tokens = (1 - sigma) * guide + sigma * noise
    levels = torch.linspace(sigma, 0, scene.settings.steps + 1).tolist()
    started = time.perf_counter()
    for now, after in pairwise(levels):
        tokens = tokens + (after - now) * denoiser(tokens, positions, grid=grid, sigma=now, **given)
    seconds = time.perf_counter() - started
    return Run(study, layout, sigma, seconds, sum(denoiser.drift) / len(denoiser.drift)), tokens


def _compared(scene: _Scene, run: Run, tokens: Tensor) -> tuple[Run, Tensor]:
    again, alone = _denoise(scene, run.study, run.sigma, run.layout, Ranks.alone())
    return replace(run, alone_s=again.seconds, same=torch.equal(tokens, alone)), tokens


def _write_pictures(
    out: Path, scene: _Scene, ranks: int, sigma: float, start: Tensor, pictures: dict[Run, Tensor]
) -> None:
    shown = {(run.study, run.layout): pixels for run, pixels in pictures.items() if run.sigma == sigma}
    tiled = LAYOUTS[0]
    captions = ("the photograph", "the start: a latent of half the size, made twice as large")
    panels = [Panel(picture_of(scene.source), picture_of(start), (), captions)]
    for study in STUDIES:
        captions = (f"{study.name}, from sigma {sigma:g}: {WHOLE.name}", tiled.name)
        whole, in_tiles = (picture_of(shown[study, layout]) for layout in (WHOLE, tiled))
        panels.append(Panel(whole, in_tiles, _boxes(scene.settings.grid, tiled, ranks), captions))
    write_side_by_side(out / "denoise.png", panels)
    for name, layout in (("whole.png", WHOLE), ("tiled.png", tiled)):
        write_image(out / name, shown[SHOWN, layout])


def _boxes(grid: tuple[int, int, int], layout: Layout, ranks: int) -> tuple[Tile, ...]:
    tiles = plan_tokens(grid, layout.tiling, None, prod(grid)).tiles
    owners = deal([len(tile.kept) ** 2 for tile in tiles], ranks)
    boxes = []
    for tile in tiles:
        _, rows, columns = tile.region
        left, top, right, bottom = (side * CELL_PX for side in (columns.start, rows.start, columns.stop, rows.stop))
        boxes.append((left, top, right, bottom))
    return tuple(Tile(box, owner) for box, owner in zip(boxes, owners, strict=True))


def print_findings(findings: Findings, out: Path) -> None:
    """One table a study, a row a run."""
    console = Console()
    ranks = f"{findings.ranks} ranks" if findings.ranks > 1 else "1 rank"
    console.print(
        f"halotile demo --denoise on {ranks} of {findings.threads} thread{'s' * (findings.threads > 1)}; "
        f"PSNR against the photograph: the start {findings.start_db:.2f} dB, "
        f"the photograph's own latent {findings.best_db:.2f} dB",
        soft_wrap=True,
    )
    for study in STUDIES:
        alone = ("s alone", "same") if findings.ranks > 1 else ()
        table = Table("sigma", "", f"s, {ranks}", *alone, "drift", "dB", title=study.name)
        for run in sorted(findings.runs, key=lambda run: run.sigma):
            if run.study == study:
                table.add_row(*_cells(run, findings.ranks > 1))
        console.print(table)
    console.print(f"{out}: denoise.png whole.png tiled.png", soft_wrap=True)


def _cells(run: Run, many: bool) -> list[str]:
    """The whole frame runs on one rank only, and has no tiles that could differ."""
    seconds = [f"{run.seconds:.2f}"]
    if many:
        same = {True: "yes", False: "NO", None: ""}[run.same]
        seconds = ["", *seconds, same] if run.alone_s is None else [*seconds, f"{run.alone_s:.2f}", same]
    drift = "" if run.layout == WHOLE else f"{run.drift:.5f}"
    return [f"{run.sigma:g}", run.layout.name, *seconds, drift, f"{run.psnr_db:.2f}"]

"""halotile's own grid of tiles: which there are, how one runs, and a call that delivers the blend of all."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from halotile.blend import Blend
from halotile.comm import Call
from halotile.decode.choose import prepare
from halotile.decode.door import map_tensors
from halotile.decode.latent_maps import Maps, maps_of
from halotile.decode.reach import NO_MARGINS, Margins, margins_of
from halotile.decode.report import Exactness
from halotile.decode.tile_checks import check_tiles, source_shape
from halotile.decode.tile_noise import TileNoise
from halotile.errors import MismatchError, UnsupportedError
from halotile.families import Half, family_of
from halotile.geometry import DimTiling, Interval
from halotile.planning import Scheduler, deal, loads_of
from halotile.planning.deal import deal_early
from halotile.planning.latent_grid import LatentGrid, Part, cut_latent
from halotile.planning.tilings import DIMS, Tiling

Work = Callable[[Any], Any]


@dataclass(frozen=True)
class GridPlan:
    """A grid over one input, with a rank for each tile; made from shapes alone, so the same on every rank."""

    half: Half
    grid: LatentGrid
    owners: tuple[int, ...]
    loads: tuple[int, ...]
    margins: Margins
    whole_frames: bool
    """Whether tiles have all frames, so that their number is what comes out."""
    notes: str
    """What the VAE's own loops do inside of tiles."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tiles in row-major order: those of early frames first."""
        return self.grid.parts(self.half)

    @property
    def rows(self) -> list[range]:
        """The indices of the tiles of the same frames, in order."""
        frames, height, width = self.grid.shape
        return [range(row * height * width, (row + 1) * height * width) for row in range(frames)]

    def size(self, index: int, frames: int) -> tuple[int, int, int]:
        """Frames, height and width of what tile `index` adds; `frames` of it where tiles have all frames."""
        along, height, width = (len(side) for side in self.parts[index].target)
        return (frames if self.whole_frames else along), height, width

    def blend(self, frames: int) -> Blend:
        """Where the tiles come together; `frames` as in `size`."""
        along, height, width = self.grid.targets(self.half)
        if self.whole_frames:
            along = DimTiling(frames, (Interval(0, frames),))
        return Blend((along, height, width), self.margins)

    @property
    def exactness(self) -> Exactness:
        """How equal the result is to the untiled call's: tiles see less than the whole, and are mixed."""
        return "bitwise" if self.grid.count == 1 else "approximate"

    @property
    def digest(self) -> str:
        """What all ranks must have alike, in short."""
        text = repr((self.grid.tilings, self.grid.maps, self.owners, self.margins))
        return f"{self.text}, {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def text(self) -> str:
        """The grid in words."""
        frames, height, width = self.grid.shape
        most = [max(tiling.overlaps, default=0) for tiling in self.grid.tilings]
        return f"{frames}x{height}x{width} tiles (frames, height, width) sharing {most[0]}x{most[1]}x{most[2]} latents"


def plan_grid(
    vae: Any,
    half: Half,
    x: torch.Tensor,
    tiling: Tiling,
    ranks: int,
    scheduler: Scheduler,
    work: Work,
    early: bool = False,
) -> GridPlan:
    """Lay `tiling` over `x`, latents to decode or pixels to encode (`B C H W`, `B C F H W`), and deal its tiles.

    With `early`, a balanced deal is even after every row of tiles of the same frames. Nothing of the result is
    computed. Raises PlanError and UnsupportedError for what cannot be, the same on every rank.
    """
    maps = maps_of(vae, half, x, tiling, work)
    grid = cut_latent(tiling, _lengths(half, x, maps), maps)
    parts = grid.parts(half)
    notes = check_tiles(vae, half, x, grid)
    costs = tuple(part.cells for part in parts)
    if early and scheduler == "balanced":
        row = len(parts) // grid.shape[0]
        owners = deal_early([costs[i : i + row] for i in range(0, len(costs), row)], ranks)
    else:
        owners = deal(costs, ranks, scheduler)
    margins = margins_of(vae, half, x, grid, work) if grid.count > 1 else NO_MARGINS
    return GridPlan(half, grid, owners, loads_of(costs, owners, ranks), margins, grid.shape[0] == 1, notes)


def run_grid(
    vae: Any,
    plan: GridPlan,
    call: Call,
    receivers: Sequence[int],
    x: torch.Tensor,
    work: Work,
    values: Sequence[Any],
) -> Any:
    """Run this rank's tiles, deliver all to `receivers`, and blend them there.

    `values` are further arguments of the call, among which may be generators. Returns what the VAE's own call would,
    with the blend of the tiles in it; None on other ranks. Tiles travel row by row (those of the same frames), so a
    receiver holds its own and one row of the others'.
    """
    noise = TileNoise(call.notes("start")[0], x.device, values)
    own = [index for index, owner in enumerate(plan.owners) if owner == call.ranks.rank]
    tiles: dict[int, torch.Tensor] = {}
    with call.together("work"):
        for index in own:
            tiles[index], output = make_tile(vae, plan, index, x, work, noise)
            if index == 0:
                skeleton = base64.b64encode(pickle.dumps(_skeleton(output))).decode()
            call.piece_done()
        call.note(b"" if not own else _note(tiles[own[0]], noise.drew, skeleton if own[0] == 0 else ""))
    notes = [json.loads(note) for note in call.notes("work") if note]
    noise.finish(any(note["drew"] for note in notes))
    kinds = {(note["dtype"], *note["lead"], note["frames"] if plan.whole_frames else 0) for note in notes}
    if len(kinds) > 1:
        raise MismatchError(f"tiles of different ranks differ in dtype, batch, channels or frames: {sorted(kinds)}")
    first = next(note for note in notes if note["skeleton"])
    dtype = getattr(torch, first["dtype"].removeprefix("torch."))
    receives = call.ranks.rank in receivers
    blend, done = plan.blend(first["frames"]), []
    with call.shared_fate():
        for row in plan.rows:
            for index in row:
                if receives and index not in tiles:
                    size = plan.size(index, first["frames"])
                    tiles[index] = torch.empty((*first["lead"], *size), dtype=dtype, device=x.device)
            _exchange(plan, row, tiles, call, receivers)
            for index in row:
                tile = tiles.pop(index, None)
                if receives:
                    assert tile is not None
                    blend.add(tile)
            if receives:
                done.append(blend.finish_row().to(dtype))
    with call.together("end"):
        if not receives:
            return None
        whole = torch.cat(done, 2) if len(done) > 1 else done[0]
        del done
        output = pickle.loads(base64.b64decode(first["skeleton"]))
        return map_tensors(output, lambda _: whole if x.dim() == 5 else whole.squeeze(2))


def make_tile(
    vae: Any, plan: GridPlan, index: int, x: torch.Tensor, work: Work, noise: TileNoise
) -> tuple[torch.Tensor, Any]:
    """What tile `index` adds to the result, `B C f h w` in one piece, and the VAE's output that it was in."""
    part, family = plan.parts[index], family_of(vae)
    shape = source_shape(x, part)
    with ExitStack() as stack:
        if family is not None and family.carries is not None:
            clear = getattr(vae, family.carries)
            clear()
            stack.callback(clear)
        prepare(vae, plan.half, shape, "serial", stack)
        stack.enter_context(noise.tile(index))
        sides = part.source if x.dim() == 5 else part.source[1:]
        output = work(_cut(x, sides))
    found: list[torch.Tensor] = []
    map_tensors(output, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    if len(found) != 1 or not found[0].is_floating_point():
        raise UnsupportedError(
            f"{plan.half} of {type(vae).__name__} returns {len(found)} tensors; only an output of one can be blended"
        )
    result = found[0] if found[0].dim() == 5 else found[0].unsqueeze(2)
    planned = (plan.size(index, result.shape[2])[0] + part.skip[0], *part.made[1:])
    if result.dim() != 5 or tuple(result.shape[2:]) != planned:
        raise RuntimeError(
            f"tile {part.index} of input shape {shape}: planned {planned} frames, rows and columns of result, made "
            f"{tuple(result.shape[2:])}"
        )
    kept = [Interval(skip, size) for skip, size in zip(part.skip, planned, strict=True)]
    return _cut(result, kept), output


def _cut(tensor: torch.Tensor, sides: Sequence[Interval]) -> torch.Tensor:
    """The cells of `sides`, of the last dims, in one piece."""
    for dim, side in enumerate(sides, tensor.dim() - len(sides)):
        tensor = tensor.narrow(dim, side.start, len(side))
    return tensor.contiguous()


def _exchange(plan: GridPlan, row: range, tiles: dict[int, torch.Tensor], call: Call, receivers: Sequence[int]) -> None:
    """The tiles of one row to every receiver that lacks them."""
    me = call.ranks.rank
    sends = [(peer, tiles[i]) for peer in receivers if peer != me for i in row if plan.owners[i] == me]
    wanted = [(plan.owners[i], tiles[i]) for i in row if plan.owners[i] != me] if me in receivers else []
    call.ranks.transport.exchange(sends, wanted)


def _note(tile: torch.Tensor, drew: bool, skeleton: str) -> bytes:
    facts = {"dtype": str(tile.dtype), "lead": list(tile.shape[:2]), "frames": tile.shape[2], "drew": drew}
    return json.dumps({**facts, "skeleton": skeleton}).encode()


def _skeleton(output: Any) -> Any:
    """The output with next to nothing in it: ranks without a tile take its type from there."""
    return map_tensors(output, lambda tensor: torch.zeros([min(side, 2) for side in tensor.shape]))


def _lengths(half: Half, x: torch.Tensor, maps: Maps) -> tuple[int, int, int]:
    """Frames, height and width of the latent."""
    cells = (x.shape[2] if x.dim() == 5 else 1, x.shape[-2], x.shape[-1])
    if half == "decode":
        return cells
    frames, height, width = (along.latents(name, count) for along, name, count in zip(maps, DIMS, cells, strict=True))
    return frames, height, width

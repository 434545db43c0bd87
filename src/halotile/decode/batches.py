"""The iterator of a stream: on the driver temporal batches as their tiles come in, on other ranks their work."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from halotile.blend import Blend
from halotile.comm import Call, Counters
from halotile.decode.grid import GridPlan
from halotile.decode.link import GroupLink
from halotile.decode.options import Progress
from halotile.decode.placement import DeviceOf
from halotile.decode.report import DecodeReport
from halotile.decode.streams import Leavable, begin_stream, end_stream
from halotile.decode.tile_noise import TileNoise
from halotile.errors import HalotileError


class Stream(Leavable):
    """The iterator that `stream` returns; also a context manager. `report` is there once its work is done."""

    def __init__(
        self,
        call: Call,
        plan: GridPlan,
        latents: torch.Tensor,
        make: Callable[[int], tuple[torch.Tensor, Any]],
        noise: TileNoise,
        link: GroupLink,
        device_fn: DeviceOf | None,
        progress: Progress | None,
        driver: int,
        started: float,
        before: Counters,
    ) -> None:
        self.report: DecodeReport | None = None
        self._call, self._plan, self._make, self._noise, self._link = call, plan, make, noise, link
        self._dtype, self._flat = latents.dtype, latents.dim() == 4
        self._device_fn, self._progress = device_fn, progress
        # as it is on the other ranks now, wherever batches are asked for later
        kind = latents.device.type
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._started, self._before = started, before
        self._drives = call.ranks.rank == driver
        self._over = False
        self._row = 0
        self._blend: Blend | None = None
        self._dtype_made = latents.dtype
        self._tiles: dict[int, torch.Tensor] = {}
        self._done = 0
        if self._drives:
            begin_stream(call.ranks.transport, self)

    @property
    def where(self) -> str:
        """How far it is."""
        return f"after batch {self._row} of {len(self._plan.rows)}"

    def __next__(self) -> torch.Tensor:
        if not self._drives:
            self._check_others()
            raise StopIteration
        if self._over:
            raise StopIteration
        try:
            with torch.no_grad(), self._autocast, self._call.shared_fate():
                batch = self._next_batch()
        except BaseException as error:
            self._call.fail(error)
            # of a board that is gone, say: the error on its way out must not be replaced
            with suppress(Exception):
                self._leave()
            raise
        if self._row == len(self._plan.rows):
            self._noise.finish(self._noise.drew)
            self._finish()
        return batch

    def work(self) -> None:
        """On a rank that does not drive: make its tiles, and wait for the others that do not either."""
        with self._call.shared_fate():
            for index in self._own(range(self._plan.grid.count)):
                if self._link.closed:
                    break
                self._link.send(index, self._make(index)[0])
                self._call.piece_done()
            self._noise.finish(self._link.wait_for_peers(self._noise.drew))
        self._finish()

    def close(self) -> None:
        """On the driver: want no more. The other ranks stop at their next tile. Does nothing the second time."""
        if self._drives and not self._over:
            self._leave()

    def _next_batch(self) -> torch.Tensor:
        indices = self._plan.rows[self._row]
        self._link.expect([index for index in indices if self._plan.owners[index] != self._call.ranks.rank])
        following = iter(indices)
        awaited: int | None = next(following)
        own = iter(self._own(indices))
        while awaited is not None:
            mine = next(own, None)
            if mine is not None:
                self._tiles[mine] = self._make(mine)[0]
                self._call.piece_done()
                self._link.expect(())
            else:
                index, tile = self._link.receive()
                self._tiles[index] = tile
            while awaited in self._tiles:
                awaited = self._add(self._tiles.pop(awaited), next(following, None))
        assert self._blend is not None
        self._row += 1
        batch = self._blend.finish_row().to(self._dtype_made).to(self._dtype)
        if self._device_fn is not None:
            batch = batch.to(self._device_fn(self._row - 1))
        return batch.squeeze(2) if self._flat else batch

    def _add(self, tile: torch.Tensor, following: int | None) -> int | None:
        if self._blend is None:
            self._blend = self._plan.blend(tile.shape[2])
            self._dtype_made = tile.dtype
        self._blend.add(tile)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._plan.grid.count)
        return following

    def _own(self, indices: range) -> list[int]:
        return [index for index in indices if self._plan.owners[index] == self._call.ranks.rank]

    def _leave(self) -> None:
        self._finish()
        self._tiles.clear()
        self._blend = None
        self._link.close()

    def _check_others(self) -> None:
        """Raise what another rank raised since; whether the board can still say so does not matter."""
        try:
            self._call.check()
        except HalotileError:
            raise
        except Exception:
            return

    def _finish(self) -> None:
        self._over = True
        if self._drives:
            end_stream(self._call.ranks.transport)
        traffic = self._call.ranks.counters.since(self._before)
        self.report = DecodeReport(
            half="decode",
            strategy="tile",
            reason=f"stream: {self._plan.text}{self._plan.notes}",
            exactness=self._plan.exactness,
            ranks=self._call.ranks.size,
            tiles=self._plan.grid.count,
            calls=self._plan.grid.count,
            loads=self._plan.loads,
            messages=traffic.messages,
            bytes_sent=traffic.bytes_sent,
            collectives=traffic.collectives,
            seconds=time.perf_counter() - self._started,
        )

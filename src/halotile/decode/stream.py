"""`stream`: a decode whose frames come out batch by batch, while other ranks still work on later ones."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Group, Mailbox, Ranks
from halotile.decode.batches import Stream
from halotile.decode.choose import check_class
from halotile.decode.chunk_stream import ChunkStream, comes_in_chunks, stream_chunks
from halotile.decode.door import arguments_fact, check_input, dtype_of
from halotile.decode.functions import as_vae
from halotile.decode.grid import make_tile, plan_grid
from halotile.decode.link import GroupLink
from halotile.decode.mailbox_link import MailboxLink
from halotile.decode.noise import Generators
from halotile.decode.options import Options, Progress
from halotile.decode.placement import Placement, check_placement, device_of, place_note, split_note
from halotile.decode.run import by_samples
from halotile.decode.streams import forget_streams, leave, refuse_open_stream
from halotile.decode.tile_checks import refuse_spatial
from halotile.decode.tile_noise import TileNoise
from halotile.errors import PlanError
from halotile.planning import Scheduler
from halotile.planning.tilings import Tiling


def stream(
    vae: Any,
    latents: torch.Tensor,
    group: Group | None = None,
    *,
    tiling: Tiling | None = None,
    driver: int = 0,
    device_fn: Placement | None = None,
    scheduler: Scheduler = "balanced",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    mailbox: Mailbox | None = None,
    **own: Any,
) -> Stream | ChunkStream:
    """Decode `latents` (`B C F H W`) over the ranks of `group` in tiles of `tiling`, frames first come first.

    Every rank calls it with the same latents. On the `driver` (a group-local rank) it returns an iterator of temporal
    batches `B C f H W`, one for each tile along frames, each as soon as its tiles are there; together they are
    `decode(..., tiling=tiling)`, bit for bit, in the dtype of `latents`. A picture (`B C H W`) is one batch. On the
    other ranks their tiles are decoded before it returns, whether or not the driver iterates, and the iterator is
    empty.

        for frames in halotile.stream(vae, latents, tiling=TileCountConfig(frames=DimensionTilingConfig(4, 2))):
            writer.write(frames)  # only the driver comes here

    device_fn: the device of batch number i; None leaves it where the latents are, and `round_robin` takes the devices
    of the ranks on the driver's machine in turn. scheduler: how tiles are dealt; `balanced` is even after every batch.
    progress: called on the driver as `progress(done, total)` when tiles are in. mailbox: carries the tiles instead of
    the group's messages, between processes of one machine. own: further arguments of the VAE's `decode`. timeout_s, and
    what is raised, are as in `parallelize`.

    Without `tiling`, clips of the classes of `ChunkDecoder` come in chunks: a batch for each latent frame (each two of
    CogVideoX's, each window of a class with windows over frames), each as soon as it is decoded, and together what
    `decode` makes of the whole clip, as exactly as chunks are. The strategy is that of `auto`. All ranks work on each
    chunk, when the driver asks for it: the others return from this call when the driver's iterator has ended or is
    left, and raise MissingRankError when the driver asks for nothing for `timeout_s`.

    The driver decodes its own tiles when a batch is asked for. It holds the frames that are not finished, one batch and
    that batch's tiles. The others hold their finished tiles until the driver takes them, at most their share of the
    result each; they keep them when they go on to the next call or to the end of the program, which waits for the
    driver for at most `timeout_s`.

    An iterator that is left (`close()`, garbage collection, an exception) stops the other ranks at their next tile, and
    the group can be used again; with NCCL it is lost when tiles were on their way, and later calls say so. Until then
    the driver's next call on this group is a PlanError. A rank that fails makes the driver, and all ranks that still
    work, raise RemoteRankError; those that are done see it when they iterate.
    """
    ranks = Ranks.of(group, timeout_s)
    if tiling is None and mailbox is None and comes_in_chunks(vae):
        return stream_chunks(vae, latents, ranks, driver, device_fn, scheduler, progress, own)
    started, before = time.perf_counter(), ranks.counters.snapshot()
    with Call(ranks) as call, torch.no_grad():
        if tiling is None:
            raise PlanError(
                "stream needs a tiling, a TileCountConfig or a TileSizeConfig, for a mailbox and for all classes but "
                f"those of ChunkDecoder, and this is a {type(vae).__name__}; decode() can do without"
            )
        target = as_vae(vae, "decode")
        options = Options(strategy="tile", deliver="driver", driver=driver, scheduler=scheduler, tiling=tiling)
        check_class(target, ["decode"], options)
        options.receivers(ranks)
        check_placement(device_fn)
        tensor = check_input(latents, "decode")
        refuse_open_stream(ranks.transport)
        # a copy: the driver decodes its tiles when they are asked for, and the caller may change its latents meanwhile
        x = tensor.to(dtype_of(target, "decode", tensor.dtype), copy=True)
        refuse_spatial(own.values())
        work = partial(by_samples, target, target.decode, (), own)
        with call.shared_fate():
            plan = plan_grid(target, "decode", x, tiling, ranks.size, scheduler, work, early=True)
        generators = Generators(tensor.device, tuple(own.values()))
        call.note(place_note(x.device) + generators.note())
        carrier = "group" if mailbox is None else "mailbox"
        facts = {
            "call": "stream",
            "carrier": carrier,
            "class": type(target).__name__,
            "shape": str(tuple(x.shape)),
            "driver": str(driver),
            "arguments": arguments_fact((), own),
        }
        call.meet({**facts, "dtype": str(tensor.dtype), "plan": plan.digest})
        forget_streams(ranks.transport)
        notes = call.notes("start")
        noise = TileNoise(split_note(notes[0])[2], tensor.device, tuple(own.values()))
        _join(ranks, x.device)
        if mailbox is None:
            link = GroupLink(call, plan.owners, driver, x.device)
        else:
            link = MailboxLink(call, plan.owners, driver, x.device, mailbox)
        leave(ranks.transport, link)
        made = partial(make_tile, target, plan, x=x, work=work, noise=noise)
        out = Stream(
            call,
            plan,
            tensor,
            made,
            noise,
            link,
            device_of(device_fn, notes, driver),
            progress,
            driver,
            started,
            before,
        )
        if ranks.rank != driver:
            out.work()
    return out


def _join(ranks: Ranks, device: torch.device) -> None:
    """NCCL makes a group's connections in its first operation, which all ranks must join; a tile has two ranks."""
    if device.type == "cuda" and ranks.size > 1:
        ranks.transport.all_reduce(torch.zeros(1, device=device))

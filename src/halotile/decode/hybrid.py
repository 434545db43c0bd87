"""Tiles of the VAE's own loop dealt to subgroups of ranks, and each cut into rows inside its subgroup."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halotile.comm import Call, Delivery, Ranks, SubgroupTransport, receiving
from halotile.decode.deferred import Dealt, clearing, replay, run_chain
from halotile.decode.door import ROWS_DIM
from halotile.decode.memory import Meter
from halotile.decode.noise import Noise
from halotile.decode.record import NetworkCall, network_of, record
from halotile.decode.shard import nothing_kept, wait_for_device
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Family, Half
from halotile.geometry import Extents
from halotile.planning import Scheduler, deal
from halotile.spatial import Ledger, SpatialSpec, SpatialTensor
from halotile.spatial.mode import SpatialMode
from halotile.spatial.move import fetch
from halotile.spatial.tensor import copied_strides


def deal_shared(
    shards: int,
    vae: Any,
    half: Half,
    family: Family | None,
    ranks: Ranks,
    scheduler: Scheduler,
    size: tuple[int, int],
    plain: Callable[[], object],
) -> Dealt:
    """`deal_loop` for subgroups of `shards` consecutive ranks; the first rank of each is the owner of its chains.

    Raises UnsupportedError also for a network whose input is no picture and no clip.
    """
    recording = record(vae, half, family, size, plain)
    subgroups = deal(recording.costs, ranks.size // shards, scheduler)
    loads = [0] * ranks.size
    for chain, subgroup in zip(recording.chains, subgroups, strict=True):
        for index in chain:
            call = recording.calls[index]
            rows = _rows_of(call, shards)
            for shard, own in enumerate(rows.sizes):
                loads[subgroup * shards + shard] += call.cells // rows.total * own
    return Dealt(recording, tuple(subgroup * shards for subgroup in subgroups), tuple(loads))


def run_hybrid(
    shards: int,
    ledger: Ledger,
    meter: Meter,
    vae: Any,
    half: Half,
    family: Family | None,
    dealt: Dealt,
    call: Call,
    receivers: Sequence[int],
    device: torch.device,
    plain: Callable[[], object],
) -> object:
    """`run_dealt` for what `deal_shared` dealt. The gathers of all subgroups are added to `ledger`, on every rank.

    Returns what `plain` returns, to rounding, with bits that depend on `shards` and on no other number of ranks; None
    on ranks that are to have nothing. A rank that fails in its work leaves its subgroup waiting, and the whole group is
    lost. What a subgroup refuses (under `ledger.strict`, say) every rank raises, and the group stays as it was.
    """
    network, clear = network_of(vae, half), clearing(vae, family)
    calls, ranks = dealt.recording.calls, call.ranks
    lead = ranks.rank // shards * shards
    subgroup = Ranks(SubgroupTransport(ranks.transport, range(lead, lead + shards)), ranks.timeout_s)
    # a call counts once, for all ranks that share it
    done = call.piece_done if ranks.rank == lead else call.glance
    noise = Noise(calls, call, device)
    made: dict[int, torch.Tensor] = {}
    counted: list[Ledger] = []
    delivery, refused = None, None
    with call.entangled("work"):
        if device.type == "cuda":
            # NCCL makes a group's connections in its first operation, which all ranks must join
            ranks.transport.all_reduce(torch.zeros(1, device=device))
        noise.foresee(calls)
        try:
            with nothing_kept(vae), meter:
                for chain, owner in zip(dealt.recording.chains, dealt.owners, strict=True):
                    if owner == lead:
                        # a ledger a chain, so that nothing in it follows from what these ranks ran before
                        counted.append(Ledger(subgroup, ledger.strict))
                        rows = [_rows_of(calls[index], shards) for index in chain]
                        shared = _Shared(network, rows, counted[-1], meter)
                        results = run_chain(shared, calls, chain, clear, noise, done)
                        made |= results if ranks.rank == lead else {}
                        counted[-1].closed = True
        except (PlanError, UnsupportedError) as error:
            # the sharded operations raise these on all ranks alike: no message of the subgroup is left on its way
            refused = error
        noise.finish()
        wait_for_device(device, call)
        if refused is None:
            delivery = Delivery(made, dealt.pieces, ranks, receivers, device)
        call.note(_note(delivery, counted if ranks.rank == lead else [], refused))
    del made
    layouts = _read(call.notes("work"), ledger)
    assert delivery is not None, "what was refused here is raised by _read"
    with call.shared_fate():
        delivered = delivery.deliver(layouts)
    with call.together("end"):
        return replay(network, dealt.recording, delivered, plain) if delivered else None


class _Shared:
    """The network as one chain's calls see it: given whole tiles, it runs on this rank's rows of them.

    Its results are whole on the subgroup's first rank, and have no rows on the others. What a call returns beside its
    result, and what it keeps in lists, stays sharded for the next call.
    """

    def __init__(self, network: nn.Module, rows: Sequence[Extents], ledger: Ledger, meter: Meter) -> None:
        self._network = network
        self._rows = iter(rows)
        self._ledger = ledger
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with SpatialMode(self._ledger, self._meter.see):
            names = (*range(len(args)), *kwargs)
            values = dict(zip(names, (*args, *kwargs.values()), strict=True))
            first = next(name for name in names if isinstance(values[name], torch.Tensor))
            values[first] = self._own_rows(values[first])
            output = self._network(*(values[n] for n in names[: len(args)]), **{n: values[n] for n in kwargs})
            result, *rest = output if isinstance(output, (tuple, list)) else (output,)
            if isinstance(result, SpatialTensor):
                result = fetch(result, receiving(result.spec.extents, "driver", 0))
        return (result, *rest)

    def _own_rows(self, tile: torch.Tensor) -> SpatialTensor:
        spec = SpatialSpec(tile.dim() + ROWS_DIM, next(self._rows))
        rows = spec.take(tile.detach(), spec.dim, self._ledger.ranks.rank).clone()
        return SpatialTensor(rows, spec, self._ledger, None, copied_strides(tile))


def _rows_of(call: NetworkCall, shards: int) -> Extents:
    """The rows of a call's first tensor that each of its ranks gets: even at the height of a latent."""
    tile = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor))
    if tile.dim() not in (4, 5):
        raise UnsupportedError(
            "strategy='hybrid' shares the rows of what the network is given, which must be B C H W or B C F H W; in "
            f"the loop of this VAE it is of shape {tuple(tile.shape)}; use strategy='tile'"
        )
    rows, made = tile.shape[ROWS_DIM], call.outcome.shape[ROWS_DIM]
    unit = rows // made if made and rows % made == 0 else 1
    return Extents.even(rows // unit, shards).scaled(unit)


def _note(delivery: Delivery | None, counted: Sequence[Ledger], refused: Exception | None) -> bytes:
    """What the others must know of this rank's work: how its results lie, what was gathered, what it refused."""
    gathers = sum((ledger.gathers for ledger in counted), Counter[str]())
    attention = sum(ledger.attention_gathers for ledger in counted)
    layouts = [] if delivery is None else list(delivery.layouts.items())
    why = None if refused is None else (type(refused).__name__, str(refused))
    return json.dumps((layouts, gathers, attention, why)).encode()


def _read(notes: Sequence[bytes], ledger: Ledger) -> dict[int, tuple[int, ...]]:
    """How all results lie; `ledger` is given what all subgroups gathered. Raises, on every rank, what one refused."""
    layouts: dict[int, tuple[int, ...]] = {}
    for note in notes:
        lie, gathers, attention, why = json.loads(note)
        if why is not None:
            kind, message = why
            raise (PlanError if kind == PlanError.__name__ else UnsupportedError)(message)
        layouts |= {index: tuple(strides) for index, strides in lie}
        ledger.gathers.update(gathers)
        ledger.attention_gathers += attention
    return layouts

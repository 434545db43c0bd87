"""One decode or encode over the ranks of a group, from the door to the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from halotile.comm import Call, Ranks
from halotile.decode.choose import choose, prepare
from halotile.decode.deferred import Dealt, deal_loop, run_dealt
from halotile.decode.door import Undelivered, arguments_fact, cat_outputs, check_input, dtype_of, map_tensors
from halotile.decode.grid import GridPlan, plan_grid, run_grid
from halotile.decode.memory import Meter
from halotile.decode.noise import Generators
from halotile.decode.options import Options, Progress
from halotile.decode.report import DecodeReport, Exactness
from halotile.decode.shard import deal_rows, deliver, rows_dim, run_sharded
from halotile.decode.streams import forget_streams, refuse_open_stream
from halotile.decode.tile_checks import refuse_spatial
from halotile.errors import UnsupportedError
from halotile.families import Half, family_of, temporal_note
from halotile.spatial import Ledger, SpatialSpec


def run_call(
    vae: Any,
    half: Half,
    original: Callable[..., Any],
    x: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: Ranks,
    options: Options,
    progress: Progress | None = None,
) -> tuple[Any, DecodeReport]:
    """Run `original(x, *args, **kwargs)`, the VAE's own decode or encode, over `ranks`.

    Returns what `original` would, in the dtype of `x`, or an output full of None on ranks that are to have nothing; and
    the report. The order is that of DESIGN.md, section 6: check shapes, compare with the other ranks, then work.
    """
    started, before = time.perf_counter(), ranks.counters.snapshot()
    total = 0

    def show(done: int) -> None:
        if progress is not None and ranks.rank == options.driver and total:
            progress(min(done, total), total)

    with Call(ranks, show) as call, ExitStack() as stack:
        tensor = check_input(x, half)
        stack.enter_context(torch.no_grad())
        receivers = options.receivers(ranks)
        shape = tuple(tensor.shape)
        dim = rows_dim(vae, shape, options.dim)
        strategy, reason = choose(vae, half, options, ranks)
        if options.tiling is None:
            reason += prepare(vae, half, shape, strategy, stack) + temporal_note(vae, half, shape)
        cast = tensor.to(dtype_of(vae, half, tensor.dtype))
        work = partial(by_samples, vae, original, args, kwargs)
        plain = partial(work, cast)
        values = (*args, *kwargs.values())
        plan = _plan(vae, half, cast, dim, strategy, reason, options, call, work, values)
        generators = Generators(tensor.device, values)
        if plan.draws:
            call.note(generators.note())
        refuse_open_stream(ranks.transport)
        call.meet({**_facts(vae, half, tensor, options, plan), "arguments": arguments_fact(args, kwargs)})
        forget_streams(ranks.transport)
        meter, ledger = Meter(tensor.device, shown=plan.spec is not None), Ledger(ranks, options.strict)
        extents: tuple[int, ...] | None = None
        if plan.grid is not None:
            total = plan.grid.grid.count
            output = run_grid(vae, plan.grid, call, receivers, cast, work, values)
        elif plan.dealt is not None:
            total = len(plan.dealt.recording.calls)
            output = run_dealt(vae, half, family_of(vae), plan.dealt, call, receivers, tensor.device, plain)
        elif plan.spec is not None:
            with call.entangled("work"):
                generators.take(call.notes("start")[0])
                with meter:
                    output, extents = run_sharded(vae, ledger, cast, plan.spec, options, work, meter.see)
                _wait_for_device(tensor.device, call)
        else:
            with call.together("work"), meter:
                output = plain() if ranks.rank in receivers else None
        if output is None:
            output = (None,) if kwargs.get("return_dict") is False else Undelivered()
        else:
            # indices and masks stay what they are
            output = map_tensors(
                output, lambda result: result.to(tensor.dtype) if result.is_floating_point() else result
            )
            if options.deliver == "sharded" and plan.spec is None:
                output, extents = deliver(output, dim, ranks, options)
    traffic = ranks.counters.since(before)
    return output, DecodeReport(
        half=half,
        strategy=plan.strategy,
        reason=plan.reason + _gathered_note(ledger),
        exactness=_exactness(plan),
        ranks=ranks.size,
        tiles=1 if plan.owners is None else len(plan.owners),
        calls=total if plan.owners is not None else len(receivers) if plan.spec is None else ranks.size,
        loads=_loads(tensor, dim, plan, receivers, ranks),
        messages=traffic.messages,
        bytes_sent=traffic.bytes_sent,
        collectives=traffic.collectives,
        seconds=time.perf_counter() - started,
        extents=extents,
        gathers=dict(ledger.gathers),
        attention_gathers=ledger.attention_gathers,
        peak_activation_bytes=meter.peak_bytes,
    )


def _exactness(plan: _Plan) -> Exactness:
    if plan.spec is not None:
        return "allclose"
    return "bitwise" if plan.grid is None else plan.grid.exactness


def _gathered_note(ledger: Ledger) -> str:
    """That a rank held more than its rows: one gather may leave the rest of the call whole on every rank."""
    if not ledger.gathers:
        return ""
    names = ", ".join(f"{name} ({times})" for name, times in sorted(ledger.gathers.items()))
    return f"; gathered for want of a rule: {names}; what follows from that ran whole on every rank"


@dataclass(frozen=True)
class _Plan:
    """What is to run: a recorded loop with its owners, or rows of the input, or the call as it is; and why."""

    strategy: str
    reason: str
    dealt: Dealt | None = None
    spec: SpatialSpec | None = None
    grid: GridPlan | None = None

    @property
    def owners(self) -> tuple[int, ...] | None:
        """The rank of each tile, where there are tiles."""
        return self.dealt.owners if self.dealt is not None else self.grid.owners if self.grid is not None else None

    @property
    def draws(self) -> bool:
        """Whether noise may be drawn; sharded calls and grids are not looked into beforehand."""
        return self.spec is not None or self.grid is not None or (self.dealt is not None and self.dealt.draws)

    @property
    def digest(self) -> str:
        """What all ranks must have alike."""
        if self.spec is not None:
            return f"rows of dim {self.spec.dim}: {self.spec.extents.sizes}"
        if self.grid is not None:
            return self.grid.digest
        return "" if self.dealt is None else self.dealt.digest


def _plan(
    vae: Any,
    half: Half,
    x: torch.Tensor,
    dim: int,
    strategy: str,
    reason: str,
    options: Options,
    call: Call,
    work: Callable[[Any], Any],
    values: tuple[Any, ...],
) -> _Plan:
    if options.tiling is not None:
        refuse_spatial(values)
        with call.shared_fate():
            grid = plan_grid(vae, half, x, options.tiling, call.ranks.size, options.scheduler, work)
        return _Plan(strategy, f"{reason}; {grid.text}{grid.notes}", grid=grid)
    if strategy == "shard":
        extents = deal_rows(vae, half, x.shape[dim], call.ranks.size)
        return _Plan(strategy, reason, spec=SpatialSpec(x.dim() + dim, extents))
    if strategy == "tile":
        size = (x.shape[-2], x.shape[-1])
        try:
            with call.shared_fate():
                dealt = deal_loop(vae, half, family_of(vae), call.ranks, options.scheduler, size, partial(work, x))
            return _Plan(strategy, reason, dealt)
        except UnsupportedError as error:
            if options.strategy != "auto":
                raise
            return _Plan("serial", f"auto: serial, since {error}")
    return _Plan(strategy, reason)


def by_samples(
    vae: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor
) -> Any:
    """The VAE's own call; sample by sample where its slicing is on and does not work with every argument."""
    family, batch = family_of(vae), x.shape[0]
    if family is None or family.own_slicing or not getattr(vae, "use_slicing", False) or batch == 1:
        return original(x, *args, **kwargs)

    def sample(value: Any, index: int) -> Any:
        batched = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch
        return value[index : index + 1] if batched else value

    return cat_outputs(
        [
            original(x[i : i + 1], *(sample(a, i) for a in args), **{name: sample(a, i) for name, a in kwargs.items()})
            for i in range(batch)
        ]
    )


def _facts(vae: Any, half: Half, x: torch.Tensor, options: Options, plan: _Plan) -> dict[str, str]:
    return {
        "half": half,
        "class": type(vae).__name__,
        "shape": str(tuple(x.shape)),
        "dtype": str(x.dtype),
        "strategy": plan.strategy,
        "deliver": f"{options.deliver} (driver {options.driver})",
        "strict": str(options.strict),
        "plan": plan.digest,
    }


def _wait_for_device(device: torch.device, call: Call) -> None:
    """Wait until this rank's kernels are done, unless another rank fails, for which they would wait."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    while not done.query():  # type: ignore[no-untyped-call]
        call.check()
        time.sleep(0.001)


def _loads(x: torch.Tensor, dim: int, plan: _Plan, receivers: Sequence[int], ranks: Ranks) -> tuple[int, ...]:
    """Work a rank, in cells of the input."""
    if plan.dealt is not None:
        return plan.dealt.loads
    if plan.grid is not None:
        return plan.grid.loads
    cells = x.numel() // x.shape[1]
    if plan.spec is not None:
        return tuple(rows * (cells // x.shape[dim]) for rows in plan.spec.extents.sizes)
    return tuple(cells * (rank in receivers) for rank in range(ranks.size))

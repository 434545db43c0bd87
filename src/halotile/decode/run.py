"""One decode or encode over the ranks of a group, from the door to the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from halotile.comm import Call, Ranks
from halotile.decode.carried import Carried
from halotile.decode.deferred import run_dealt
from halotile.decode.door import Undelivered, arguments_fact, cat_outputs, check_input, dtype_of, map_tensors
from halotile.decode.grid import run_grid
from halotile.decode.hybrid import run_hybrid
from halotile.decode.memory import Meter
from halotile.decode.noise import Generators
from halotile.decode.options import Options, Progress
from halotile.decode.planned import Job, loads_of_plan, settle
from halotile.decode.report import DecodeReport
from halotile.decode.shard import deliver, rows_dim, run_sharded, wait_for_device
from halotile.families import Half, family_of
from halotile.spatial import Ledger


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
    carried: Carried | None = None,
) -> tuple[Any, DecodeReport]:
    """Run `original(x, *args, **kwargs)`, the VAE's own decode or encode, over `ranks`.

    Returns what `original` would, in the dtype of `x`, or an output full of None on ranks that are to have nothing; and
    the report. The order is that of DESIGN.md, section 6: check shapes, compare with the other ranks, then work.
    `carried`: `x` continues a clip, whose state this is.
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
        dim = rows_dim(vae, tuple(tensor.shape), options.dim)
        cast = tensor.to(dtype_of(vae, half, tensor.dtype))
        work = partial(by_samples, vae, original, args, kwargs)
        plain = partial(work, cast)
        values = (*args, *kwargs.values())
        job = Job(vae, half, tensor, cast, dim, work, values, arguments_fact(args, kwargs), options, carried)
        plan = settle(job, call, stack)
        meter, ledger = Meter(tensor.device, shown=plan.sharded), Ledger(ranks, options.strict)
        extents: tuple[int, ...] | None = None
        total = plan.calls
        if plan.grid is not None:
            output = run_grid(vae, plan.grid, call, receivers, cast, work, values)
        elif plan.dealt is not None:
            run = (
                partial(run_hybrid, plan.shards, ledger, meter)
                if plan.shards > 1
                else partial(run_dealt, carried=carried)
            )
            output = run(vae, half, family_of(vae), plan.dealt, call, receivers, tensor.device, plain)
        elif plan.spec is not None:
            with call.entangled("work"):
                Generators(tensor.device, values).take(call.notes("start")[0])
                with meter:
                    output, extents = run_sharded(
                        vae, ledger, cast, plan.spec, options, _live(work, carried), meter.see
                    )
                wait_for_device(tensor.device, call)
        else:
            with call.together("work"), meter:
                output = _live(work, carried)(cast) if ranks.rank in receivers else None
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
        exactness=plan.exactness,
        ranks=ranks.size,
        tiles=1 if plan.owners is None else len(plan.owners),
        calls=total if plan.owners is not None else len(receivers) if plan.spec is None else ranks.size,
        loads=loads_of_plan(job, plan, receivers, ranks.size),
        messages=traffic.messages,
        bytes_sent=traffic.bytes_sent,
        collectives=traffic.collectives,
        seconds=time.perf_counter() - started,
        extents=extents,
        gathers=dict(ledger.gathers),
        attention_gathers=ledger.attention_gathers,
        peak_activation_bytes=meter.peak_bytes,
        predicted_seconds=plan.predicted.seconds if plan.predicted else None,
        predicted_bytes=plan.predicted.peak_bytes if plan.predicted else None,
    )


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


def _live(work: Callable[[Any], Any], carried: Carried | None) -> Callable[[Any], Any]:
    """`work`, continuing a clip if there is one."""
    return work if carried is None else partial(carried.run, work)


def _gathered_note(ledger: Ledger) -> str:
    """That a rank held more than its rows: one gather may leave the rest of the call whole on every rank."""
    if not ledger.gathers:
        return ""
    names = ", ".join(f"{name} ({times})" for name, times in sorted(ledger.gathers.items()))
    return f"; gathered for want of a rule: {names}; what follows from that ran whole on every rank"

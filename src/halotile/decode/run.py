"""One decode or encode over the ranks of a group, from the door to the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from halotile.comm import Call, Deliver, Ranks
from halotile.decode.deferred import Dealt, deal_loop, run_dealt
from halotile.decode.door import (
    ROWS_DIM,
    Undelivered,
    cat_outputs,
    check_input,
    dtype_of,
    map_tensors,
)
from halotile.decode.noise import Noise
from halotile.decode.patch import patched
from halotile.decode.report import DecodeReport
from halotile.errors import PlanError, UnsupportedError
from halotile.families import UNREAD, Half, check_loop, family_of, temporal_loop_runs, temporal_note
from halotile.geometry import Extents
from halotile.planning import SCHEDULERS, Scheduler

Strategy = Literal["auto", "serial", "tile", "shard", "hybrid"]
Progress = Callable[[int, int], None]
_NOT_BUILT = ("shard", "hybrid")


@dataclass(frozen=True)
class Options:
    """How calls are to be run; checked when built."""

    strategy: Strategy = "auto"
    deliver: Deliver = "all"
    driver: int = 0
    scheduler: Scheduler = "balanced"

    def __post_init__(self) -> None:
        if self.strategy in _NOT_BUILT:
            raise UnsupportedError(f"strategy={self.strategy!r} is not in this version; it has auto, serial and tile")
        for name, value, known in (
            ("strategy", self.strategy, [known for known in get_args(Strategy) if known not in _NOT_BUILT]),
            ("deliver", self.deliver, get_args(Deliver)),
            ("scheduler", self.scheduler, SCHEDULERS),
        ):
            if value not in known:
                raise PlanError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")

    def receivers(self, ranks: Ranks) -> Sequence[int]:
        """The ranks that get the result."""
        ranks.check(self.driver, "driver")
        return [self.driver] if self.deliver == "driver" else range(ranks.size)


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
        tile, reason = _choose(vae, half, options, ranks)
        family, shape = family_of(vae), tuple(tensor.shape)
        if tile:
            stack.enter_context(patched(vae, use_tiling=True))
        if getattr(vae, "use_tiling", False) or temporal_loop_runs(vae, half, shape):
            mended = check_loop(vae, half, shape)
            stack.enter_context(patched(vae, **mended))
            reason += "".join(
                f"; {name} set to {value} for this call: the last tile was thinner than the class takes"
                for name, value in mended.items()
            )
        reason += temporal_note(vae, half, shape)
        plain = _plain(vae, half, original, tensor, args, kwargs)
        dealt: Dealt | None = None
        if tile:
            try:
                with call.shared_fate():
                    dealt = deal_loop(vae, half, family, ranks, options.scheduler, (shape[-2], shape[-1]), plain)
            except UnsupportedError as error:
                if options.strategy != "auto":
                    raise
                reason = f"auto: serial, since {error}"
        if dealt is not None and dealt.draws:
            call.note(Noise.note(tensor.device))
        call.meet(_facts(vae, half, tensor, options, dealt))
        if dealt is not None:
            total = len(dealt.recording.calls)
            output = run_dealt(vae, half, family, dealt, call, receivers, tensor.device, plain)
        else:
            with call.together("work"):
                output = plain() if ranks.rank in receivers else None
        extents = None
        if output is None:
            output = (None,) if kwargs.get("return_dict") is False else Undelivered()
        else:
            output = map_tensors(output, lambda result: result.to(tensor.dtype))
            if options.deliver == "sharded":
                output, extents = _own_rows(output, ranks)
    cells = tensor.numel() // tensor.shape[1]
    traffic = ranks.counters.since(before)
    return output, DecodeReport(
        half=half,
        strategy="serial" if dealt is None else "tile",
        reason=reason,
        exactness="bitwise",
        ranks=ranks.size,
        tiles=1 if dealt is None else len(dealt.owners),
        calls=len(receivers) if dealt is None else total,
        loads=tuple(cells * (rank in receivers) for rank in range(ranks.size)) if dealt is None else dealt.loads,
        messages=traffic.messages,
        bytes_sent=traffic.bytes_sent,
        collectives=traffic.collectives,
        seconds=time.perf_counter() - started,
        extents=extents,
    )


def check_class(vae: Any, halves: Sequence[Half], options: Options) -> None:
    """Raise UnsupportedError, with class and reason, if the class of `vae` can never do what `options` ask."""
    name = type(vae).__name__
    for half in halves:
        if not callable(getattr(vae, half, None)):
            hint = "; pass the pipeline's .vae" if hasattr(vae, "vae") else ""
            raise UnsupportedError(f"{name} has no method {half!r}{hint}")
    if options.strategy == "tile":
        reason = _no_tile_loop(vae, halves)
        if reason is not None:
            raise UnsupportedError(f"{name} cannot be run with strategy='tile': {reason}")


def _no_tile_loop(vae: Any, halves: Sequence[Half]) -> str | None:
    if not hasattr(vae, "use_tiling"):
        return "the class has no tile loop of its own (no attribute use_tiling)"
    unread = next((UNREAD[cls.__name__] for cls in type(vae).__mro__ if cls.__name__ in UNREAD), None)
    if unread is not None:
        return f"the class has no tile loop of its own: {unread}"
    for half in halves:
        name = "decoder" if half == "decode" else "encoder"
        if not isinstance(getattr(vae, name, None), torch.nn.Module):
            return f"it has no module named {name!r}, whose calls could be dealt to ranks"
    return None


def _choose(vae: Any, half: Half, options: Options, ranks: Ranks) -> tuple[bool, str]:
    """Whether to deal the VAE's own loop, and why."""
    if options.strategy != "auto":
        return options.strategy == "tile", f"strategy={options.strategy!r} was asked for"
    if ranks.size == 1:
        return False, "auto: serial, since the group has one rank"
    if not getattr(vae, "use_tiling", False):
        return False, "auto: serial, since tiling is off and there is nothing to deal"
    missing = _no_tile_loop(vae, [half])
    if missing is not None:
        return False, f"auto: serial, since {missing}"
    return True, "auto: tile, since tiling is on"


def _plain(
    vae: Any,
    half: Half,
    original: Callable[..., Any],
    tensor: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """The VAE's own call, in its own dtype, once cast."""
    x = tensor.to(dtype_of(vae, half, tensor.dtype))
    family, batch = family_of(vae), x.shape[0]
    if family is None or family.own_slicing or not getattr(vae, "use_slicing", False) or batch == 1:
        return lambda: original(x, *args, **kwargs)

    def sample(value: Any, index: int) -> Any:
        batched = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch
        return value[index : index + 1] if batched else value

    def by_sample() -> Any:
        return cat_outputs(
            [
                original(
                    x[i : i + 1], *(sample(a, i) for a in args), **{name: sample(a, i) for name, a in kwargs.items()}
                )
                for i in range(batch)
            ]
        )

    return by_sample


def _facts(vae: Any, half: Half, x: torch.Tensor, options: Options, dealt: Dealt | None) -> dict[str, str]:
    return {
        "half": half,
        "class": type(vae).__name__,
        "shape": str(tuple(x.shape)),
        "dtype": str(x.dtype),
        "strategy": "serial" if dealt is None else "tile",
        "deliver": f"{options.deliver} (driver {options.driver})",
        "plan": "" if dealt is None else dealt.digest,
    }


def _own_rows(output: Any, ranks: Ranks) -> tuple[Any, tuple[int, ...]]:
    """This rank's rows of a result that it has whole, and the rows of all."""
    extents: list[Extents] = []

    def cut(result: torch.Tensor) -> torch.Tensor:
        extents.append(Extents.even(result.shape[ROWS_DIM], ranks.size))
        rows = extents[-1].interval(ranks.rank)
        return result.narrow(ROWS_DIM, rows.start, len(rows)).clone()

    cut_output = map_tensors(output, cut)
    return cut_output, extents[0].sizes

"""`parallelize`: a VAE object whose `decode` and `encode` run over a group, until the handle is removed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from types import MethodType, TracebackType
from typing import Any

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Deliver, Group, Ranks
from halotile.decode.choose import check_class
from halotile.decode.options import Options, Progress, Strategy
from halotile.decode.report import DecodeReport
from halotile.decode.run import run_call
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Half
from halotile.planning import Scheduler
from halotile.planning.tilings import Tiling

HALVES: tuple[Half, ...] = ("decode", "encode")


def parallelize(
    vae: Any,
    group: Group | None = None,
    strategy: Strategy = "auto",
    deliver: Deliver = "all",
    tiling: Tiling | None = None,
    scheduler: Scheduler = "balanced",
    halves: Sequence[Half] = HALVES,
    *,
    driver: int = 0,
    strict: bool = False,
    dim: int | None = None,
    shards_per_tile: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
) -> Handle:
    """Let `vae.decode` and `vae.encode` run over the ranks of `group`, wherever they are called from.

    Every rank of the group calls it on its own copy of the same VAE, and then calls `vae.decode(latents)` with the
    same latents (`B C H W` or `B C F H W`) as it would alone. All other attributes of the VAE stay as they are; copies
    of it (`copy.deepcopy`, pickles) are plain VAEs.

    group: a process group that this process is a member of, or one axis of a DeviceMesh, such as `mesh["vae"]`; None
        is the default group, or this process alone where torch.distributed is not initialised.
    strategy: `tile` deals the tiles of the VAE's own loop (turned on for the call if it is off), `shard` runs the
        untiled call once over all ranks, each with its rows of every activation (the VAE's tiling is off for the
        call), `hybrid` deals the tiles to subgroups of `shards_per_tile` consecutive ranks (which must divide the
        group's), in which each tile is cut into rows, `serial` runs the VAE as it is, `auto` chooses by what it
        predicts of each, and says why in the report: see `explain`.
    deliver: `all` ranks get the result, or the `driver` alone (the outputs of the others hold None), or each its rows
        (`sharded`: `report.extents` says how many). scheduler: how chains of tiles are dealt. halves: which methods to
        change.
    driver: the group-local rank that `deliver="driver"` means, and that `progress(done, total)` is called on.
    strict: with `shard` and `hybrid`, an operation that has no rule for sharded rows is an UnsupportedError, not a
        whole tensor on every rank (`report.gathers`). dim: the spatial dim that `shard` and `deliver="sharded"` deal;
        None is height (-2), but the first spatial dim (2) for inputs of five dims of models that are not of diffusers:
        those are taken for volumes, `B C D H W`. A video decoder from elsewhere, `B C F H W`, is given -2.
    timeout_s: how long to wait for ranks that do not come, or stop making progress. tiling: a TileCountConfig or
        TileSizeConfig: with `tile`, tiles of that grid, each run by the VAE's untiled call (or by the VAE's own loop,
        where its tiling is on) and blended, in place of the VAE's own tiles. The result is then that of the grid:
        approximate against the untiled call, and the same bits for every number of ranks.

    The result is equal to one rank's, bitwise (`serial`, `tile`: of the tiled call) or to rounding (`hybrid`: of the
    tiled call, with the same bits for every number of subgroups; `shard`: of the untiled one), in the dtype of the
    input; a picture in another dtype than the VAE's is cast to it once. Runs without gradients.

    Raises UnsupportedError (a class or option that cannot be served), PlanError (unknown option), MembershipError. The
    changed methods raise those and GradientError before any traffic, MismatchError, MissingRankError and
    RemoteRankError on every rank. After a RemoteRankError or MissingRankError in the midst of a `shard` or `hybrid`
    call the group is lost: later calls on it raise LostGroupError.
    """
    options = Options(
        strategy=strategy, deliver=deliver, driver=driver, scheduler=scheduler, strict=strict, dim=dim, tiling=tiling,
        shards_per_tile=shards_per_tile,
    )  # fmt: skip
    if isinstance(halves, str):
        raise PlanError(f"halves={halves!r}: give a tuple, such as ({halves!r},)")
    if progress is not None and not callable(progress):
        raise PlanError(f"progress={progress!r} is not callable; give a function of (done, total)")
    unknown = [half for half in halves if half not in HALVES]
    if unknown or not halves:
        raise PlanError(f"halves={tuple(halves)!r}: choose at least one from {', '.join(HALVES)}")
    check_class(vae, halves, options)
    if handle_of(vae) is not None:
        raise UnsupportedError(f"this {type(vae).__name__} is parallelized already; call remove() on its handle first")
    ranks = Ranks.of(group, timeout_s)
    options.check_group(ranks)
    return Handle(vae, tuple(halves), ranks, options, progress)


def handle_of(vae: object) -> Handle | None:
    """The handle of a VAE that is parallelized, else None."""
    methods = (vars(vae).get(half) for half in HALVES) if hasattr(vae, "__dict__") else ()
    return next((method.handle for method in methods if isinstance(method, _Method)), None)


class Handle:
    """A parallelized VAE's handle: the report of its last call, and the way back. Also a context manager."""

    def __init__(
        self, vae: Any, halves: tuple[Half, ...], ranks: Ranks, options: Options, progress: Progress | None
    ) -> None:
        self.vae = vae
        self.ranks = ranks
        self.options = options
        self.progress = progress
        self.report: DecodeReport | None = None
        self._methods = [_Method(self, half) for half in halves]
        for method in self._methods:
            setattr(vae, method.half, method)

    def remove(self) -> None:
        """Give the VAE its own methods back. Does nothing the second time."""
        for method in self._methods:
            method.removed = True
            if vars(self.vae).get(method.half) is method:
                if method.was_set:
                    setattr(self.vae, method.half, method.original)
                else:
                    delattr(self.vae, method.half)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _Method:
    """What stands in for `vae.decode` or `vae.encode`."""

    def __init__(self, handle: Handle, half: Half) -> None:
        self.handle = handle
        self.half = half
        self.was_set = half in vars(handle.vae)
        self.original: Callable[..., Any] = getattr(handle.vae, half)
        self.removed = False
        self.__signature__ = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed:
            # whoever wrapped this method before it was removed still calls it
            return self.original(*args, **kwargs)
        handle = self.handle
        handle.report = None
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            # the other ranks are making this call, and count it
            Call(handle.ranks).fail(error)
            raise
        x = args[0] if args else kwargs.pop(next(iter(self.__signature__.parameters)))
        output, handle.report = run_call(
            handle.vae, self.half, self.original, x, args[1:], kwargs, handle.ranks, handle.options, handle.progress
        )
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.was_set:
            return copy.deepcopy(self.original, memo)
        return _own_method(copy.deepcopy(self.handle.vae, memo), self.half)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self.handle.vae, self.half)


def _own_method(vae: Any, half: Half) -> MethodType:
    """The method of `vae`'s class, bound to it: what a copy of a parallelized VAE has."""
    return MethodType(getattr(type(vae), half), vae)

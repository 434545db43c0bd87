"""One decode or encode whose activations are cut into rows, a band a rank (DESIGN.md, section 3.2)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halotile.comm import Call, Ranks, receiving
from halotile.decode.door import map_tensors
from halotile.decode.options import Options
from halotile.errors import PlanError, UnsupportedError
from halotile.families import Half, family_of
from halotile.geometry import Extents
from halotile.spatial import Ledger, SpatialSpec, SpatialTensor
from halotile.spatial.mode import SpatialMode, Watch
from halotile.spatial.move import fetch
from halotile.spatial.tensor import copied_strides
from halotile.spatial.watching import unwatched

_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}


def rows_dim(vae: Any, shape: tuple[int, ...], dim: int | None) -> int:
    """The dim (counted from the back) whose rows are dealt for an input of `shape`.

    Height (-2), except for an input of five dims of a model that diffusers does not have: those are taken for volumes
    `B C D H W`, and dealt along their first spatial dim (-3). `dim` says otherwise. Raises PlanError for a `dim` that
    is not a spatial one.
    """
    ndim = len(shape)
    if dim is not None:
        if not (2 <= dim < ndim or 2 - ndim <= dim < 0):
            raise PlanError(f"dim={dim} is not a spatial dim of an input of shape {shape}: those are 2 to {ndim - 1}")
        return dim - ndim if dim >= 0 else dim
    classes = [cls for part in (vae, getattr(vae, "decoder", None)) for cls in type(part).__mro__]
    of_diffusers = any(cls.__module__.startswith("diffusers.") for cls in classes)
    return -2 if ndim == 4 or of_diffusers or family_of(vae) is not None else -3


def deal_rows(vae: Any, half: Half, rows: int, ranks: int) -> Extents:
    """The rows of the input that each rank gets: even at the latent's height, for latents and for pixels."""
    ratio = _ratio(vae) if half == "encode" else 1
    if rows % ratio:
        return Extents.even(rows, ranks)
    return Extents.even(rows // ratio, ranks).scaled(ratio)


def run_sharded(
    vae: Any,
    ledger: Ledger,
    x: torch.Tensor,
    spec: SpatialSpec,
    options: Options,
    work: Callable[[Any], Any],
    watch: Watch | None = None,
) -> tuple[Any, tuple[int, ...] | None]:
    """Run `work` (the VAE's own call) on this rank's rows of `x`, which every rank has, and deliver what it returns.

    Returns the output, None on a rank that is to have nothing, and with `deliver="sharded"` the rows of each rank.
    Every rank must call it. Raises UnsupportedError, on every rank, where `options.strict` forbids an operation.
    """
    with nothing_kept(vae), SpatialMode(ledger, watch):
        rows = spec.take(x.detach(), spec.dim, ledger.ranks.rank).clone()
        output = work(SpatialTensor(rows, spec, ledger, None, copied_strides(x)))
        _check_output(vae, output)
        delivered = deliver(output, spec.dim - x.dim(), ledger.ranks, options)
    ledger.closed = True
    return delivered


def wait_for_device(device: torch.device, call: Call) -> None:
    """Wait until this rank's kernels are done, unless another rank fails, for which they would wait."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    while not done.query():  # type: ignore[no-untyped-call]
        call.check()
        time.sleep(0.001)


def _ratio(vae: Any) -> int:
    """Pixels a latent along height; 1 where it is not known."""
    family = family_of(vae)
    if family is not None:
        return family.ratio(vae)
    # of diffusers' classes an attribute may be the config's, which warns when it is asked for elsewhere
    config = getattr(vae, "config", {})
    own = vars(vae).get("spatial_compression_ratio") or (
        hasattr(config, "get") and config.get("spatial_compression_ratio")
    )
    return own if type(own) is int and own > 0 else 1


def _check_output(vae: Any, output: Any) -> None:
    """Raise UnsupportedError, on every rank, for an output in which sharded tensors would stay."""
    with unwatched():
        plain = map_tensors(output, lambda result: torch.empty(tuple(result.shape), dtype=result.dtype, device="meta"))
    if _holds_sharded(plain) or any(_holds_sharded(value) for value in getattr(plain, "__dict__", {}).values()):
        raise UnsupportedError(
            f"{type(vae).__name__} returned a {type(output).__name__}, in which halotile cannot put whole tensors in "
            "place of sharded ones; return a tensor, a tuple, a list, a dict or a dataclass of them"
        )


def deliver(output: Any, dim: int, ranks: Ranks, options: Options) -> tuple[Any, tuple[int, ...] | None]:
    """Plain tensors in place of the sharded ones, where they are to be; with `sharded`, this rank's rows of each."""
    extents: list[tuple[int, ...]] = []
    mine = options.deliver != "driver" or ranks.rank == options.driver

    def plain(result: torch.Tensor) -> torch.Tensor:
        if options.deliver == "sharded":
            local, rows = _own_rows(result, dim, ranks)
            if rows is not None:
                extents.append(rows.sizes)
            return local
        if not isinstance(result, SpatialTensor):
            return result
        return fetch(result, receiving(result.spec.extents, options.deliver, options.driver))

    # ranks that are to have nothing send their rows all the same; what they make of them is no output
    parts: list[torch.Tensor] = []
    map_tensors(output, lambda result: parts.append(plain(result)) or result)  # type: ignore[func-returns-value]
    if not mine:
        return None, None
    delivered = iter(parts)
    return map_tensors(output, lambda _: next(delivered)), extents[0] if extents else None


def _own_rows(result: torch.Tensor, dim: int, ranks: Ranks) -> tuple[torch.Tensor, Extents | None]:
    """This rank's rows of a result along `dim`, and the rows of all."""
    at = result.dim() + dim
    if at < 0:
        # a statistic, a loss: it has no rows, so every rank gets it whole
        return (result.full() if isinstance(result, SpatialTensor) else result), None
    if isinstance(result, SpatialTensor):
        if result.spec.dim == at and result.spec.blocks == 1:
            return result.local, result.spec.extents
        result = result.full()
    rows = Extents.even(result.shape[at], ranks.size)
    own = rows.interval(ranks.rank)
    return result.narrow(at, own.start, len(own)).clone(), rows


@contextmanager
def nothing_kept(vae: Any) -> Iterator[None]:
    """Put back what held no sharded tensor before and does now: caches that a VAE leaves on itself and its modules."""
    parts = (
        [vae] if isinstance(vae, nn.Module) else [part for part in vars(vae).values() if isinstance(part, nn.Module)]
    )
    owners = {id(owner): owner for part in parts for owner in part.modules()} | {id(vae): vae}
    before = [(owner, {name: (value, _copied(value)) for name, value in _own(owner)}) for owner in owners.values()]
    try:
        yield
    finally:
        for owner, values in before:
            for name, now in list(_own(owner)):
                if _holds_sharded(now):
                    _put_back(owner, name, values)


def _own(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that may hold tensors of a call: not those in which torch keeps weights, modules and hooks."""
    return ((name, value) for name, value in vars(owner).items() if name not in _OF_TORCH)


def _copied(value: Any) -> Any:
    """What is in a container, those in it included."""
    if isinstance(value, (list, tuple, deque)):
        return [(part, _copied(part)) for part in value]
    if isinstance(value, dict):
        return {key: (part, _copied(part)) for key, part in value.items()}
    return None


def _put_back(owner: Any, name: str, values: dict[str, tuple[Any, Any]]) -> None:
    if name not in values:
        delattr(owner, name)
        return
    value, contents = values[name]
    setattr(owner, name, _refilled(value, contents))


def _refilled(value: Any, contents: Any) -> Any:
    """A container with what was in it."""
    if isinstance(value, (list, deque)):
        parts = [_refilled(*part) for part in contents]
        value.clear()
        value.extend(parts)
    elif isinstance(value, tuple):
        for part in contents:
            _refilled(*part)
    elif isinstance(value, dict):
        items = {key: _refilled(*part) for key, part in contents.items()}
        value.clear()
        value.update(items)
    return value


def _holds_sharded(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, deque)):
        return any(_holds_sharded(part) for part in value)
    if isinstance(value, dict):
        return any(_holds_sharded(part) for part in value.values())
    return isinstance(value, SpatialTensor)

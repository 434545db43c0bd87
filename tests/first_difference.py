"""Where a sharded decode or encode first differs, by a bit, from one rank's: the module, and whether its input did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sharded
import torch
from ranks import run_ranks
from torch import nn

import halotile
from halotile.spatial import SpatialTensor


@dataclass(frozen=True)
class Difference:
    """module: its path. kind: its class. shape: of its first input, whole. before: its input differs already."""

    module: str
    kind: str
    shape: tuple[int, ...]
    before: bool


def first_difference(name: str, half: str, n: int = 2) -> Difference | None:
    """Of a kind of sharded.KINDS on `n` gloo ranks; None when no module's output differs."""
    found: Difference | None = run_ranks(_compare, n, name, half)[0]
    return found


@dataclass
class _Seen:
    module: str
    kind: str
    inputs: list[torch.Tensor]
    output: torch.Tensor


def _compare(group: Any, name: str, half: str) -> Difference | None:
    x = sharded.make_input(name, half)
    with torch.no_grad():
        vae = sharded.build(name)
        alone = _watch(vae)
        sharded.call(vae, name, half, x)
        vae = sharded.build(name)
        together = _watch(vae)
        with halotile.parallelize(vae, group, strategy="shard", halves=(half,)):
            sharded.call(vae, name, half, x)
    for one, many in zip(alone, together, strict=True):
        before = not all(map(torch.equal, one.inputs, many.inputs))
        if before or not torch.equal(one.output, many.output):
            return Difference(one.module, one.kind, tuple(one.inputs[0].shape), before)
    return None


def _watch(vae: nn.Module) -> list[_Seen]:
    """A list that every call of a module without parts adds to; sharded tensors are made whole, on all ranks alike."""
    seen: list[_Seen] = []

    def whole(value: torch.Tensor) -> torch.Tensor:
        return (value.full() if isinstance(value, SpatialTensor) else value).clone()

    def note(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inputs = [whole(value) for value in args if isinstance(value, torch.Tensor)]
        if inputs and isinstance(output, torch.Tensor):
            seen.append(_Seen(path, type(module).__name__, inputs, whole(output)))

    for path, module in vae.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, args, out, path=path: note(path, module, args, out))
    return seen

"""The work of a decode or encode of any size: found from two small ones, without computing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from halotile.decode.follow import SIDES_LAT, follow
from halotile.decode.known import cache_path, key_of, read, write
from halotile.errors import PlanError
from halotile.families import Half, family_of
from halotile.planning.situation import Term

# what looks across rows: a convolution with a kernel along height, a norm over it, attention
_NORMS = ("aten.native_group_norm", "aten.native_batch_norm")
_ATTENTION = ("aten._scaled_dot_product", "aten._softmax", "aten.softmax")


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# torch counts CUDA's attention, and not the CPU's
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclass(frozen=True)
class Workload:
    """flops: of one call, as a function of the latent cells (height x width). exchanges: operations that look across
    rows. result: bytes of the result a latent cell."""

    flops: Term
    exchanges: int
    result: float

    def __post_init__(self) -> None:
        if not all(0 <= number < math.inf for number in (*self.flops, self.exchanges, self.result)):
            raise PlanError(f"a workload is made of numbers from 0: got {self.flops}, {self.exchanges}, {self.result}")


# where the file cannot be written, for as long as this process lives
_UNKEPT: dict[str, Workload] = {}


def workload_of(vae: Any, half: Half, shape: Sequence[int]) -> Workload:
    """The workload of calls on `shape`, latents or pixels; height and width of it do not matter.

    Measured once for each class, configuration, dtype, batch and number of frames, and kept in `workloads.json`
    (`halotile.decode.known`). Raises UnsupportedError for a class that cannot be followed without data.
    """
    path, key = cache_path("workloads.json"), f"{half} {key_of(vae, shape)}"
    known = read(path)
    try:
        row = known[key]
        fixed, each, pair = (float(number) for number in row["flops"])
        return Workload((fixed, each, pair), int(row["exchanges"]), float(row["result"]))
    except (KeyError, TypeError, ValueError, OverflowError, PlanError):
        pass
    if key not in _UNKEPT:
        measured = measure(vae, half, shape)
        if write(path, read(path) | {key: asdict(measured)}):
            return measured
        _UNKEPT[key] = measured
    return _UNKEPT[key]


def measure(vae: Any, half: Half, shape: Sequence[int]) -> Workload:
    """Count the operations of two small calls: what grows with the cells, and (attention) with their square.

    Example: 1,000 operations for 10 cells and 2,800 for 20 are 60 a cell and 4 a pair of cells.
    """
    family = family_of(vae)
    ratio = family.ratio(vae) if half == "encode" and family is not None else 1
    counted = []
    for side in SIDES_LAT:
        flops, exchanges = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION), _Exchanges()
        with ExitStack() as modes:
            modes.enter_context(flops)
            modes.enter_context(exchanges)
            result = follow(vae, half, (*shape[:-2], side * ratio, side * ratio), modes.pop_all())
        counted.append((side**2, flops.get_total_flops(), exchanges.count, result.numel() * result.element_size()))
    (few, small, _, _), (many, large, exchanges_of, made) = counted
    pair = max(0.0, (large / many - small / few) / (many - few))
    return Workload((0.0, max(0.0, large / many - pair * many), pair), exchanges_of, made / many)


class _Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that look across rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten.convolution"):
            # weights are O I H W or O I T H W
            self.count += args[1].dim() >= 4 and args[1].shape[-2] > 1
        else:
            self.count += name.startswith((*_NORMS, *_ATTENTION))
        return func(*args, **(kwargs or {}))

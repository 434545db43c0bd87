"""How many bytes of activations a call holds at most on this rank: `Meter`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from halotile.spatial import SpatialTensor
from halotile.spatial.watching import Watching


class Meter:
    """Measures, as a context manager, the peak of live bytes that operations inside of it have made.

    What exists before (weights, the input) does not count, nor does what a kernel uses while it runs, except on CUDA.
    Views and in-place operations make nothing. On CPU every operation is watched, by a mode of its own or, where
    another mode is there anyway (`shown`), through `see`; on CUDA the allocator's own statistics are read, and its peak
    is reset. `peak_bytes` is None before the first use.
    """

    def __init__(self, device: torch.device, shown: bool = False) -> None:
        self.peak_bytes: int | None = None
        self._device = device
        self._before = 0
        self._watch = Watch()
        self._shown = shown

    @property
    def see(self) -> Callable[[Any, tuple[Any, ...]], None] | None:
        """What is to be called with the result and the arguments of every operation; None where nothing is needed."""
        return self._watch.see if self._device.type != "cuda" else None

    def __enter__(self) -> Meter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif not self._shown:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            if not self._shown:
                self._watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self.peak_bytes = self._watch.peak


class Watch(Watching):
    """Follows storages: each that an operation makes counts once, until nothing refers to it any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if SpatialTensor in types:
            # a wrapper without memory of its own; the operations on its rows come here one by one
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.see(result, args)
        return result

    def see(self, result: Any, args: tuple[Any, ...]) -> None:
        if isinstance(result, torch.Tensor):
            self._see(result, args)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, torch.Tensor):
                    self._see(part, args)

    def _see(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        if tensor.is_meta:
            # shapes and strides without memory
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or _among(key, args):
            return
        size = storage.nbytes()

        number = self._made
        self._made += 1

        def gone(_: object) -> None:
            self._live -= size
            self._known.pop(key, None)
            self.change(number, -size)

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)
        self.change(number, size)

    def change(self, number: int, size: int) -> None:
        """For a subclass: storage `number` of `size` bytes was made; with minus its bytes, it is gone."""


def _among(key: int, values: Any) -> bool:
    """Whether the memory is that of an argument: of a weight, say, that was there before."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, SpatialTensor) and value.untyped_storage()._cdata == key:
                return True
        elif isinstance(value, (tuple, list)) and _among(key, value):
            return True
    return False

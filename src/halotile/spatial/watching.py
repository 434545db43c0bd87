"""What dispatch modes see of the work on sharded rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks on: compiled code stays compiled, and what torch compiles inside is not traced through it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the mode's method, at a third of its cost
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def unwatched() -> AbstractContextManager[Any]:
    """No dispatch mode sees the operations inside: for many small ones, whose memory is not worth counting."""
    return _disable_current_modes()

"""Change attributes of an object for a while, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(target: Any, **values: Any) -> Iterator[None]:
    """Set instance attributes of `target`; on the way out, also by an exception, restore or remove them.

    What the instance itself did not have (a method of its class, say) is removed again, not written back, so that
    copies and `state_dict` see nothing of it.
    """
    before = {name: vars(target).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(target, name, value)
            elif name in vars(target):
                delattr(target, name)

"""Cached contexts: diffusers' caches keep what a forward left, by name, and each tile needs a name of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from halotile.errors import UnsupportedError


@contextmanager
def tile_context(model: Any, tile: int) -> Iterator[None]:
    """Let the caches on `model` (first block cache and the like) keep apart what they know of this tile.

    A pipeline says `with transformer.cache_context("cond")` around its forward; tile 3 then runs under "cond tile 3".

    Raises UnsupportedError for a cache that has one memory for all forwards.
    """
    managers = [(manager, manager._context) for manager in _managers(model)]
    try:
        for manager, context in managers:
            if context is not None:
                manager.set_context(_named(context, tile))
        yield
    finally:
        for manager, context in managers:
            manager.set_context(context)


def _managers(model: Any) -> Iterator[Any]:
    """The memories of all stateful hooks of the model and its modules."""
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        for hook in registry.hooks.values() if registry is not None else ():
            if not hook._is_stateful:
                continue
            managers = [value for value in vars(hook).values() if hasattr(value, "set_context")]
            if not managers:
                raise UnsupportedError(
                    f"{type(hook).__name__} keeps one memory for all forwards, so that a tile would be given what "
                    "another left; call disable_cache(), or use a cache with contexts, such as FirstBlockCacheConfig"
                )
            yield from managers


def _named(context: Any, tile: int) -> Any:
    # a bare name before diffusers 0.39
    return (
        f"{context} tile {tile}" if isinstance(context, str) else replace(context, name=f"{context.name} tile {tile}")
    )

"""Refuse what is not a whole number: shapes and windows come from users, often as floats by mistake."""

from __future__ import annotations

from halotile.errors import PlanError


def require_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise ``PlanError`` unless ``value`` is an ``int`` (not a ``bool``) of at least ``least``."""
    bound = "" if least is None else f" of at least {least}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r} ({type(value).__name__}); it must be a whole number{bound}")
    if least is not None and value < least:
        raise PlanError(f"{name} is {value}; it must be a whole number{bound}")

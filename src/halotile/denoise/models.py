"""Calls of the diffusers transformers that can be tiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from halotile.denoise.coords import CoordsCall
from halotile.denoise.grids import GridCall
from halotile.denoise.ids import IdsCall
from halotile.denoise.protocol import ModelCall, References
from halotile.denoise.shapes import ShapesCall
from halotile.errors import UnsupportedError
from halotile.families.transformers import transformer_of, uncompiled


def call_for(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    normalize_positions: bool,
    reference_positions: References,
    per_token: Sequence[str] = (),
) -> ModelCall | None:
    """The call `model(*args, **kwargs)` taken apart; None for a class that is not known.

    per_token: arguments with one entry a token that a class has besides those of its row.
    Raises UnsupportedError for a model, or arguments, that are known not to fit, PlanError for shapes that do not.
    """
    known = transformer_of(model)
    if known is None:
        return None
    row, cls = known
    if reason := row.refuse(uncompiled(model)):
        raise UnsupportedError(f"this {row.name} cannot be tiled: {reason}")
    if per_token:
        row = replace(row, per_token=(*row.per_token, *per_token))
    common = (row, cls, model, args, kwargs)
    if row.places == "grid":
        return GridCall(*common, normalize_positions)
    if row.places == "coords":
        return CoordsCall(*common, normalize_positions)
    if row.places == "ids":
        return IdsCall(*common)
    return ShapesCall(*common, normalize_positions, reference_positions)

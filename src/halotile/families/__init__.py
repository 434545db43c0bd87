"""What halotile knows of autoencoder classes, as data, and what follows from it for an input."""

from halotile.families.axis_loop import AXES, Axis, AxisLoop, Half
from halotile.families.check import (
    check_frames,
    check_loop,
    drop_added,
    set_window,
    sync_window,
    takes_timestep,
    temporal_loop_runs,
    temporal_note,
)
from halotile.families.exact import Overlaid
from halotile.families.family import Causal, Family, Frames, Rectangles, Temporal, Windows
from halotile.families.request import (
    apply_tile_plan,
    check_request,
    loop_tilings,
    possible,
    tile_overlap_plan,
    tile_shape_plan,
)
from halotile.families.rows import FAMILIES, UNREAD, family_of
from halotile.families.transformers import TRANSFORMERS, Transformer, transformer_of

__all__ = [
    "AXES",
    "FAMILIES",
    "TRANSFORMERS",
    "UNREAD",
    "Axis",
    "AxisLoop",
    "Causal",
    "Family",
    "Frames",
    "Half",
    "Overlaid",
    "Rectangles",
    "Temporal",
    "Transformer",
    "Windows",
    "apply_tile_plan",
    "check_frames",
    "check_loop",
    "check_request",
    "drop_added",
    "family_of",
    "loop_tilings",
    "possible",
    "set_window",
    "sync_window",
    "takes_timestep",
    "temporal_loop_runs",
    "temporal_note",
    "tile_overlap_plan",
    "tile_shape_plan",
    "transformer_of",
]

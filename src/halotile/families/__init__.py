"""What halotile knows of autoencoder classes, as data, and what follows from it for an input."""

from halotile.families.check import (
    check_frames,
    check_loop,
    family_of,
    set_window,
    sync_window,
    temporal_loop_runs,
    temporal_note,
)
from halotile.families.loops import AXES, Axis, AxisLoop, Half
from halotile.families.rows import FAMILIES, UNREAD, Family, Temporal

__all__ = [
    "AXES",
    "FAMILIES",
    "UNREAD",
    "Axis",
    "AxisLoop",
    "Family",
    "Half",
    "Temporal",
    "check_frames",
    "check_loop",
    "family_of",
    "set_window",
    "sync_window",
    "temporal_loop_runs",
    "temporal_note",
]

"""Ranks for programs that are one process."""

from halotile.fleet.fleet import Fleet
from halotile.fleet.running import FleetStream

__all__ = ["Fleet", "FleetStream"]

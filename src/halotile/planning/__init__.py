"""Decisions made of integers alone: who does what."""

from halotile.planning.deal import SCHEDULERS, Scheduler, deal, loads_of

__all__ = ["SCHEDULERS", "Scheduler", "deal", "loads_of"]

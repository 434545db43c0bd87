"""Decisions made of integers alone: which tiles, what they cost, and who does what."""

from halotile.planning.candidates import candidates
from halotile.planning.cost import PlanName, TilePlan, price
from halotile.planning.deal import SCHEDULERS, Scheduler, deal, loads_of

__all__ = ["SCHEDULERS", "PlanName", "Scheduler", "TilePlan", "candidates", "deal", "loads_of", "price"]

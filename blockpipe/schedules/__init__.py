"""Schedules as data, made and played out; public, and without torch.

In: for each hop its lane, and a number of micro-batches. Out: a :class:`Schedule`, the order of
forwards and backwards on each lane, and a simulation of it. Read first: ``schedule``; a new kind of
schedule is a function in ``builders``.
"""

from .builders import SCHEDULES, make_schedule
from .schedule import Action, Schedule
from .simulation import Costs, Simulation, simulate, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Schedule",
    "Simulation",
    "make_schedule",
    "simulate",
    "validate",
]

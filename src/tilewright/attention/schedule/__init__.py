"""Schedules: which tile covers each region, in which round, and in what order (stage T4).

`solve` makes a `Schedule`. The executors run its work list in that order.

The way of a schedule: ``problem`` (what regions need and what a choice costs) → a heuristic, ``greedy`` or ``descent``,
or the integer program of ``_program`` for a solver of `milp` → ``search`` (the work list) → ``record`` (the file, and
`choose`: whether the work list runs, or torch's own attention in its place).
"""

from tilewright.attention.schedule.record import (
    COLUMNS,
    KIND,
    VERSION,
    Schedule,
    choose,
    load,
    save,
    verify_inputs,
    verify_work,
)
from tilewright.attention.schedule.search import compares, solve

__all__ = [
    "COLUMNS",
    "KIND",
    "VERSION",
    "Schedule",
    "choose",
    "compares",
    "load",
    "save",
    "solve",
    "verify_inputs",
    "verify_work",
]

"""Schedules: which tile covers each region, in which round, and in what order (stage T4).

`Schedule` is the contract between the solvers, the checker and the executors: an executor runs its work list as it
stands. `solve` makes one, `check.violations` judges it without knowing how it was made.
"""

from tilewright.schedule.record import (
    COLUMNS,
    KIND,
    VERSION,
    Schedule,
    Skipped,
    load,
    read,
    save,
    verify_inputs,
    verify_work,
)
from tilewright.schedule.search import solve

__all__ = [
    "COLUMNS",
    "KIND",
    "VERSION",
    "Schedule",
    "Skipped",
    "load",
    "read",
    "save",
    "solve",
    "verify_inputs",
    "verify_work",
]

"""Timing of calls in turns (stages T4 and T5): what is compared is measured again and again, one after the other.

A call that is timed once is known to far less than its standard error says: timed again by the same process, in a CUDA
graph that was captured anew, a call of 3 microseconds took 7 % more or less, one of 10 microseconds 1 %, where the
repetitions of each had a standard error of 0.4 %. So the error is that between turns (docs/decisions/timing.md).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tilewright.core.timing import FEWEST, Timing, time_call, time_gpu

# How often each call is measured.
TURNS = 5


def time_in_turns(
    calls: Sequence[Callable], *, gpu: bool, min_reps: int, max_seconds: float, rse_target: float, turns: int = TURNS
) -> list[Timing]:
    """A list with the `Timing` of each of `calls`: medians over `turns`, each of which measures all calls one by one.

    gpu: with `time_gpu`, each time anew, else with `time_call`. min_reps, max_seconds: of a call in all turns together;
    rse_target: within a turn. The `Timing.rse` is the standard error of the mean of the turns' medians, over that mean.
    """
    measure = time_gpu if gpu else time_call
    effort = {"min_reps": max(FEWEST, math.ceil(min_reps / turns)), "rse_target": rse_target}
    effort["max_seconds"] = max_seconds / turns
    found = [[measure(call, **effort) for call in calls] for _ in range(turns)]
    return [_joined(each) for each in zip(*found, strict=True)]


def _joined(found):
    """One `Timing` of several of the same call."""
    medians = np.array([timing.p50_us for timing in found])
    error = np.std(medians, ddof=1) / np.mean(medians) / len(medians) ** 0.5
    p20, p50, p80 = (float(np.median([getattr(t, name) for t in found])) for name in ("p20_us", "p50_us", "p80_us"))
    return Timing(p20, p50, p80, sum(timing.repetitions for timing in found), float(error), found[0].method)

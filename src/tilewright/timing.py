"""Timing of calls on the device that runs them (stages T3 and T5)."""

import time
from dataclasses import dataclass

import numpy as np

# Fewest repetitions of any timing: with fewer, there is no spread to speak of.
FEWEST = 3


@dataclass(frozen=True)
class Timing:
    """What repeated calls took. p20_us, p50_us, p80_us: microseconds; rse: standard error over the mean."""

    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    rse: float


def time_call(call, *, min_reps, max_seconds, rse_target, warmups=2):
    """Call `call` until the mean is known to `rse_target` (and `min_reps` calls were timed) or `max_seconds` are over.

    Up to `warmups` calls before that are not timed, as many as fit into `max_seconds`, at least one. `FEWEST`
    repetitions are made however long they take. ASSUME: caches stay as the call before left them, as they do between
    the layers of a network.
    """
    begin = time.perf_counter_ns()
    for _ in range(warmups):
        call()
        if time.perf_counter_ns() - begin >= max_seconds * 1e9:
            break
    taken, begin = [], time.perf_counter_ns()
    while True:
        start = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        taken.append((end - start) / 1e3)
        if len(taken) < FEWEST:
            continue
        rse = float(np.std(taken, ddof=1) / np.mean(taken) / len(taken) ** 0.5)
        if (len(taken) >= min_reps and rse <= rse_target) or end - begin >= max_seconds * 1e9:
            break
    return Timing(*map(float, np.percentile(taken, (20, 50, 80))), len(taken), rse)

import math
import time

import torch

from tilewright.core.timing import FEWEST, time_call, time_together


def test_timing_stops_at_the_error_or_the_time():
    ticks = iter(range(10**6))
    steady = time_call(lambda: torch.zeros(1 << 16).sum(), min_reps=5, max_seconds=5, rse_target=0.5)
    assert 5 <= steady.repetitions < 1000 and steady.rse <= 0.5
    assert 0 < steady.p20_us <= steady.p50_us <= steady.p80_us
    slow, fast = time_together([lambda: time.sleep(2e-3), lambda: None], min_reps=4, max_seconds=5, rse_target=math.inf)
    assert slow.repetitions == fast.repetitions == 4 and fast.p50_us < 1000 < 2000 <= slow.p20_us
    assert time_together([], min_reps=4, max_seconds=5, rse_target=0.5) == []
    hurried = time_call(lambda: next(ticks), min_reps=10**9, max_seconds=0, rse_target=0)
    assert hurried.repetitions == FEWEST and next(ticks) == FEWEST + 1

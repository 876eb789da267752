import math
import time
from types import SimpleNamespace

import torch

from tilewright.core import timing
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


def test_a_cold_call_is_timed_without_what_empties_the_cache(monkeypatch):
    clock, asked = [0.0], []

    def timed(call, **effort):
        asked.append(effort)
        before = clock[0]
        call()
        return SimpleNamespace(p50_us=clock[0] - before)

    def buffer(size, **_):
        asked.append(size)
        return SimpleNamespace(zero_=lambda: clock.__setitem__(0, clock[0] + 20))

    monkeypatch.setattr(timing, "time_gpu", timed)
    monkeypatch.setattr(torch, "empty", buffer)
    assert timing.time_cold(lambda: clock.__setitem__(0, clock[0] + 7), 1000, min_reps=3) == 7
    size, *efforts = asked
    assert size > 1000 and efforts == [{"min_reps": 3}] * 2

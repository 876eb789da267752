import math
import time

import torch

from tilewright.core.timing import FEWEST, TURNS, time_call, time_in_turns, time_together


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


def test_a_call_that_takes_longer_than_its_share_is_measured_once_a_turn(monkeypatch):
    clock = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    made = {"long": 0, "short": 0}

    def call(name, ns):
        made[name] += 1
        clock[0] += ns + made[name]

    calls = [lambda: call("long", 20_000_000), lambda: call("short", 1000)]
    long, short = time_in_turns(calls, gpu=False, min_reps=10, max_seconds=0.05, rse_target=math.inf)
    # A warm-up comes before each.
    assert long.repetitions == TURNS and made["long"] == 2 * TURNS
    assert 20_000 < long.p20_us < long.p50_us < long.p80_us and 0 < long.rse < 1e-6
    # Here two.
    assert short.repetitions == TURNS * FEWEST and made["short"] == TURNS * (2 + FEWEST)

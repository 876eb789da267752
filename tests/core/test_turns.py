"""Calls timed in turns: each again and again, one after the other, and the error between timing."""

import itertools
import math

import numpy as np
import pytest
import torch

from tilewright.core import timing
from tilewright.core.timing import FEWEST, Checked, Timing

EFFORT = {"min_reps": 10, "max_seconds": 0.5, "rse_target": math.inf}


def test_calls_take_turns(monkeypatch):
    said = []

    def measure(call, *, min_reps, max_seconds, rse_target):
        call()
        assert (min_reps, max_seconds, rse_target) == (FEWEST, 0.1, math.inf)
        return Timing(1.0, 2.0, 3.0, min_reps, 0.0, "graph")

    monkeypatch.setattr(timing, "time_gpu", measure)
    calls = [lambda name=name: said.append(name) for name in "abc"]
    found = timing.time_in_turns(calls, gpu=True, **EFFORT)
    assert "".join(said) == "abc" * timing.TURNS
    assert found == [Timing(1.0, 2.0, 3.0, FEWEST * timing.TURNS, 0.0, "graph")] * 3
    assert timing.time_in_turns([], gpu=True, **EFFORT) == []


def test_the_error_is_that_between_turns(monkeypatch):
    """Repetitions of one turn agree, and say nothing of the next."""
    medians = iter([10.0, 12.0, 11.0, 9.0, 13.0])
    monkeypatch.setattr(timing, "time_call", lambda *_, **__: Timing(8.0, next(medians), 14.0, 4, 1e-6))
    (found,) = timing.time_in_turns([None], gpu=False, **EFFORT)
    assert (found.p20_us, found.p50_us, found.p80_us, found.repetitions) == (8.0, 11.0, 14.0, 20)
    assert found.rse == pytest.approx(np.std([10, 12, 11, 9, 13], ddof=1) / 11 / 5**0.5)


def test_what_a_cpu_runs_is_timed_by_the_clock():
    (found,) = timing.time_in_turns([lambda: sum(range(1000))], gpu=False, **EFFORT)
    assert found.repetitions == FEWEST * timing.TURNS and found.method == "wall"
    assert 0 < found.p20_us <= found.p50_us <= found.p80_us and found.rse > 0


def test_a_result_is_judged_in_every_turn_and_written_by_the_call():
    """One call keeps its result and writes nothing; another gives another result in the second turn alone."""
    kept, count = torch.ones(2), itertools.count(1)
    calls = [lambda: torch.ones(2), lambda: kept, lambda: torch.full((2,), 2.0 if next(count) == 4 else 1.0)]
    checked = [Checked(call, lambda found: "" if bool((found == 1).all()) else "not ones") for call in calls]
    # A turn is a call that is not timed, and one that is.
    timing.time_in_turns(checked, gpu=False, min_reps=1, max_seconds=0, rse_target=math.inf)
    assert [call.wrong for call in checked] == ["", "not ones", "not ones"]

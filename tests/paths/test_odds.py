"""Which path pays at a price of late calls."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.paths.lateness import BETWEEN, BUDGETS, POWER, Odds
from tilewright.paths.table import SAMPLES, Entry


def entries(scores):
    known = {"network": "n", "checkpoint": "c", "rung": "trained", "batch": 1, "device": "x", "dtype": "float32"}
    return [
        Entry(path=str(at), choice=score, macs=1, p50_us=1.0, promise_us=1.0, **known)
        for at, score in enumerate(scores)
    ]


def made(scores, seed=0, spread=0.1):
    drawn = np.random.default_rng(seed)
    times = {str(at): 100.0 * (1 + at) * np.exp(spread * drawn.standard_normal(SAMPLES)) for at in range(len(scores))}
    return Odds(entries(scores), times), times


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 0.99), min_size=2, max_size=6),
    st.integers(0, BUDGETS - 1),
    st.integers(-POWER * BETWEEN, POWER * BETWEEN),
    st.integers(0, 9),
)
def test_a_choice_is_the_best_of_all_paths(scores, at, power, seed):
    """Against the definition, at budgets and prices that a choice is made for."""
    odds, times = made(scores, seed)
    budget, price = odds.budgets_us[at], 2.0 ** (power / BETWEEN)
    worth = [score - price * (times[str(path)] > budget).mean() for path, score in enumerate(scores)]
    # What rounding takes from a budget of the grid.
    chosen = int(odds.pick(np.nextafter(budget, np.inf) * (1 + 1e-12), price).path)
    assert worth[chosen] == pytest.approx(max(worth), abs=1e-9)


def test_the_largest_budget_holds_the_slowest_call():
    """Also where its place among the budgets is no whole number by rounding."""
    for seed in range(200):
        odds, times = made([0.3, 0.301], seed)
        assert odds.pick(max(each.max() for each in times.values()), 2.0**POWER).path == "1"
        assert odds.pick(1e9, 2.0**POWER).path == "1"


def test_a_high_price_keeps_promises_and_a_low_one_takes_the_best():
    odds, times = made([0.3, 0.5, 0.6])
    for budget in np.linspace(times["0"].max(), 400, 50):
        sure = max(at for at in range(3) if times[str(at)].max() <= budget)
        assert int(odds.pick(budget, 2.0**POWER).path) <= sure + 1
        likely = max(at for at in range(3) if np.median(times[str(at)]) <= budget)
        assert int(odds.pick(budget, 2.0**-POWER).path) >= likely


def test_prices_and_budgets_beyond_the_grid_are_those_of_its_ends():
    odds, _ = made([0.3, 0.6])
    assert odds.pick(1e9, 1.0).path == "1" and odds.pick(float("inf"), 1.0).path == "1"
    assert odds.pick(1.0, 1.0) is None and odds.pick(float("nan"), 1.0) is None
    for budget in np.linspace(100, 300, 20):
        assert odds.pick(budget, 1e9) == odds.pick(budget, 2.0**POWER)
        assert odds.pick(budget, 1e-9) == odds.pick(budget, 2.0**-POWER)


def test_few_samples_are_pooled():
    """Of two samples each: the slow call of one path says how late the other may be, too."""
    few = Odds(entries([0.3, 0.6]), {"0": [100.0, 100.0, 100.0], "1": [200.0, 200.0, 300.0]})
    at = int(np.searchsorted(few.budgets_us, 149))
    assert few.late[0, at] == pytest.approx(1 / 6) and few.late[1, at] == 1
    assert few.pick(149, 1.0).path == "0"


def test_paths_of_one_time():
    odds = Odds(entries([0.3]), {"0": [5.0] * SAMPLES})
    assert odds.pick(5.0, 1.0).path == "0" and odds.pick(4.9, 1.0) is None
    assert msgspec.structs.asdict(odds.pick(9.0, 1.0))["choice"] == 0.3

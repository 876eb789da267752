"""Which path pays at a price of late calls, and what a stream of frames learns of times."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.paths import table
from tilewright.paths.lateness import (
    ALIKE,
    CALM,
    DEARER,
    GAINS,
    JUMP,
    KEPT,
    PRICE,
    PRICES,
    Closed,
    Controller,
    Odds,
    Priced,
    Runs,
)
from tilewright.paths.table import SAMPLES, Entry, Table

# Frames that controllers learn from before they are judged, and frames that are judged.
WARM_UP, JUDGED = 1000, 5000


def entry(path, score, us, promise_us=None):
    known = {"network": "n", "checkpoint": "c", "rung": "trained", "batch": 1, "device": "x", "dtype": "float32"}
    promise_us = us if promise_us is None else promise_us
    return Entry(path=str(path), choice=score, macs=1, p50_us=us, promise_us=promise_us, **known)


def made(scores, seed=0, spread=0.1):
    drawn = np.random.default_rng(seed)
    times = {str(at): 100.0 * (1 + at) * np.exp(spread * drawn.standard_normal(SAMPLES)) for at in range(len(scores))}
    return Odds([entry(at, score, 100.0 * (1 + at)) for at, score in enumerate(scores)], times), times


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=6), st.floats(80, 800), st.floats(-6, 6), st.integers(0, 9))
def test_a_choice_is_the_best_of_all_paths(scores, budget, power, seed):
    """Against the definition: of paths whose median the budget holds, by shares of what all calls take beyond it."""
    odds, times = made(scores, seed)
    price, medians = 2.0**power, [float(np.median(times[str(path)])) for path in range(len(scores))]
    ratios = np.concatenate([times[str(path)] / median for path, median in enumerate(medians)])
    worth = {
        path: score - price * (ratios > budget / medians[path]).mean()
        for path, score in enumerate(scores)
        if medians[path] <= budget
    }
    chosen = odds.pick(budget, price)
    if not worth:
        assert chosen is None
    else:
        assert worth[int(chosen.path)] >= max(worth.values()) - 2 * price / KEPT - 1e-9


def test_a_high_price_keeps_promises_and_a_low_one_takes_the_best():
    odds, times = made([0.3, 0.5, 0.6])
    slowest = max((each / np.median(each)).max() for each in times.values())
    for budget in np.linspace(slowest * np.median(times["0"]), 400, 50):
        sure = max(at for at in range(3) if slowest * np.median(times[str(at)]) <= budget)
        assert int(odds.pick(budget, PRICES[1]).path) <= sure + 1
        likely = max(at for at in range(3) if np.median(times[str(at)]) <= budget)
        assert int(odds.pick(budget, PRICES[0]).path) >= likely
    assert odds.pick(float("inf"), 1.0).path == "2" and odds.pick(1.0, 1.0) is None


def test_few_samples_are_pooled():
    """Of three samples each: the slow call of one path says how late the other may be, too."""
    few = Odds([entry(0, 0.3, 100.0), entry(1, 0.6, 200.0)], {"0": [100.0] * 3, "1": [200.0, 200.0, 300.0]})
    # One in six calls takes half as long again.
    assert few.pick(249, 0.3 / (1 / 6 + 0.01)).path == "1" and few.pick(249, 0.3 / (1 / 6 - 0.01)).path == "0"


@pytest.mark.parametrize("by_share", [False, True])
def test_deviations_are_of_a_kind(by_share):
    """Of a host that all calls wait for, or of one that makes all of them longer by a share."""
    drawn, medians = np.random.default_rng(0), {"a": 300.0, "b": 500.0, "c": 1000.0}
    over = {name: 15 * np.abs(drawn.standard_normal(200)) - 10 for name in medians}
    times = {name: us + over[name] * (us / 600 if by_share else 1) for name, us in medians.items()}
    assert (table.scales(times)["c"] > 1) == by_share
    promised = table.promises(times)
    beyond = {name: promised[name] - float(np.median(times[name])) for name in medians}
    assert beyond["c"] == pytest.approx(beyond["a"] * (10 / 3 if by_share else 1), rel=0.01)


def test_what_was_measured_lately_counts():
    odds, _ = made([0.3, 0.6], spread=0.01)
    row = entry(1, 0.6, 200.0)
    assert odds.pick(220, 1.0).path == "1"
    for _ in range(KEPT):
        odds.learn(50.0, row)
    assert odds.pick(220, 1.0).path == "0" and odds.pick(260, 1.0).path == "1"
    # In a delay, that is foreseen, jumps do not count.
    odds.learn(0.0, row)
    odds.most_us = 10.0
    assert odds.pick(220, 1.0).path == "1"


def saw(controller, *times, of=None, late=None):
    for us in times:
        of = of or entry("a", 0.5, 100.0, 106.0)
        controller.saw(us, of, late=us > 106 if late is None else late)
    return controller


def test_an_open_controller_learns_nothing():
    opened = saw(Controller(), 300)
    assert opened.room(120) == 120 and opened.price is None


def test_a_delay_counts_until_some_frames_in_a_row_have_none():
    controller = saw(Closed(0.01), 100, 160)
    assert controller.delay_us == pytest.approx(60) and controller.room(500) < 440 + 1
    assert controller.promised(entry("b", 0.5, 300.0, 320.0)) == pytest.approx(380, abs=1)
    assert saw(controller, *[100] * (CALM - 1)).delay_us == pytest.approx(60)
    # The latest one counts.
    assert saw(controller, 130).delay_us == pytest.approx(30, abs=1)
    assert saw(controller, *[100] * CALM).delay_us == 0
    assert saw(Closed(1.0), 100, 300).room(150) > 0, "a budget is a number above 0"


def test_single_slow_frames_cost_few_good_paths():
    """A quiet device, one of whose frames in a hundred takes twice its time, against one that always goes on slowly."""
    rows, drawn = [entry(0, 0.3, 95.0, 100.0), entry(1, 0.6, 855.0, 900.0)], np.random.default_rng(0)
    slow = drawn.random((1, 2000)) < 0.01
    took = np.array([[row.p50_us] for row in rows]) * (1 + slow)
    _, seen = met(Closed(0.05), Table(rows), None, np.full(2000, 950.0), took)
    assert seen.mean() > 0.95 * 0.6


def test_gain_and_level_are_told_apart():
    rows, drawn = [entry("a", 0.3, 300.0), entry("b", 0.5, 1000.0)], np.random.default_rng(0)
    controller = Closed(0.01)
    for _ in range(4000):
        of = rows[drawn.integers(2)]
        controller.saw(1.08 * of.p50_us + 20 + 5 * drawn.standard_normal(), of)
    assert controller.gain == pytest.approx(1.08, abs=0.02) and controller.level_us == pytest.approx(20, abs=12)
    for of in rows:
        assert controller.gain * of.p50_us + controller.level_us == pytest.approx(1.08 * of.p50_us + 20, abs=8)
    for _ in range(20_000):
        of = rows[drawn.integers(2)]
        controller.saw(4.0 * of.p50_us, of)
    assert controller.gain <= GAINS[1]
    controller.restart()
    assert repr(controller) == repr(Closed(0.01))


def test_promises_of_a_table_are_kept_where_few_are_broken():
    """Those that all frames keep are not lowered, but for a device that became faster."""
    controller = saw(Closed(0.1), *[100, 101, 99, 100] * 50)
    assert controller.tail_us == 0 and controller.promised(entry("a", 0.5, 100.0, 106.0)) == pytest.approx(106, abs=1)


def test_a_price_rises_with_late_frames_and_falls_with_others():
    controller = saw(Priced(0.01), *[100] * 50)
    assert controller.price == pytest.approx(PRICE * math.exp(-50 * DEARER * 0.01))
    assert saw(controller, 107, *[100] * 99).price == pytest.approx(PRICE * math.exp(-50 * DEARER * 0.01))
    assert saw(Priced(0.5), *[100] * 500, late=True).price == PRICES[1]
    assert saw(Priced(0.5), *[100] * 500, late=False).price == PRICES[0]


def met(controller, rows, odds, budgets, took):
    """``(late, seen)`` of frames, and the share of broken promises in `broken`. took: microseconds [paths, frames]."""
    late, seen, broken = np.zeros(len(budgets), bool), np.zeros(len(budgets)), np.zeros(len(budgets), bool)
    place = {row.path: at for at, row in enumerate(rows.rows)}
    for frame, budget in enumerate(budgets.tolist()):
        room = controller.room(budget)
        row = None if controller.price is None else odds.pick(room, controller.price)
        row = row or rows.select(room, late="fastest")
        us = float(took[place[row.path], frame])
        late[frame], seen[frame] = us > budget, row.choice
        broken[frame] = hasattr(controller, "promised") and us > controller.promised(row)
        controller.saw(us, row, late=us > budget)
    met.broken = broken
    return late, seen


# A joint table as an H200 has it: medians, mean IoU.
PATHS = [(290, 0.466), (350, 0.625), (411, 0.719), (579, 0.739), (689, 0.762), (729, 0.768), (900, 0.793), (996, 0.797)]


def replayed(kind, seed, frames=WARM_UP + JUDGED):
    """``(table, samples, took [paths, frames], budgets)``: a quiet rehearsal, and frames of another device's state."""
    drawn, medians = np.random.default_rng(seed), np.array([us for us, _ in PATHS], dtype=np.float64)[:, None]
    rehearsed = medians + host(drawn, SAMPLES)
    samples = {str(at): drawn.permutation(times) for at, times in enumerate(rehearsed)}
    promised = table.promises(samples)
    rows = Table([entry(at, score, float(us), promised[str(at)]) for at, (us, score) in enumerate(PATHS)])
    frame, gain, over = np.arange(frames), np.ones(frames), host(drawn, frames)
    if kind == "clocks":
        gain = 1 + 0.1 * (frame // drawn.integers(200, 2000) % 2)
    if kind == "drift":
        gain = 1 + 0.15 * frame / frames
    if kind == "tails":
        over = over + np.where(drawn.random(frames) < 0.04, drawn.exponential(60, frames), 0)
    if kind == "bursts":
        over = over + 250 * (frame % 64 >= 40)
    if kind == "unsteady":
        ends = np.cumsum(drawn.integers(38, 43, frames) + 24)
        over = over + 250 * (ends[np.searchsorted(ends, frame, "right")] - frame <= 24)
    if kind in ("bursts", "unsteady"):
        # Others are between.
        over = over + np.where(drawn.random(frames) < 0.004, drawn.uniform(60, 350, frames), 0)
    if kind == "chance":
        over = over + 250 * (np.cumsum(drawn.random(frames) < 1 / 32) % 2)
    took = medians * gain + over + 3 * drawn.standard_normal((len(PATHS), frames))
    # Such that there is always a path in time.
    return rows, samples, took, drawn.uniform(took[0].max(), 1.2 * max(promised.values()), frames)


def host(drawn, count):
    """Microseconds that a host adds: slow and quick changes, and a tail."""
    slow = np.convolve(drawn.standard_normal(count + 29), np.full(30, 30**-0.5), "valid")
    return (
        7 * slow
        + 6 * drawn.standard_normal(count)
        + np.where(drawn.random(count) < 0.03, drawn.exponential(25, count), 0)
    )


def bound(share):
    return share + 3 * math.sqrt(share * (1 - share) / JUDGED)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["quiet", "clocks", "drift", "tails", "bursts", "unsteady", "chance"]),
    st.integers(0, 99),
    st.sampled_from([0.01, 0.03]),
)
def test_no_more_frames_are_late_than_asked(kind, seed, share):
    """Whatever becomes of the device after the rehearsal, once `WARM_UP` frames were seen."""
    rows, samples, took, budgets = replayed(kind, seed)
    odds = Odds(rows.rows, samples)
    late, _ = met(Priced(share, odds=odds), rows, odds, budgets, took)
    assert late[WARM_UP:].mean() <= bound(share)
    late, _ = met(Closed(0.01), rows, None, budgets, took)
    assert late[WARM_UP:].mean() <= bound(0.01) and met.broken[WARM_UP:].mean() <= bound(0.01)


@pytest.mark.parametrize("kind", ["quiet", "clocks", "drift", "tails"])
def test_a_share_of_late_frames_gives_nearly_what_one_who_knows_all_times_sees(kind):
    rows, samples, took, budgets = replayed(kind, 0)
    scores = np.array([row.choice for row in rows.rows])[:, None]
    took = took[[int(row.path) for row in rows.rows]]
    best = np.where(took <= budgets, scores, 0).max(0)
    seen = {}
    for name, controller in {"promises": Closed(0.01), 0.003: Priced(0.003), 0.01: Priced(0.01)}.items():
        odds = Odds(rows.rows, samples)
        if isinstance(controller, Priced):
            controller.odds = odds
        _, found = met(controller, rows, odds, budgets, took)
        seen[name] = found[WARM_UP:].mean() / best[WARM_UP:].mean()
    assert seen[0.01] > 0.98 and seen["promises"] < seen[0.003] < seen[0.01]


def test_delays_at_a_rhythm_are_foreseen():
    """From the fourth on, its begin a few frames early where it varies, its end never."""
    runs, told = Runs(), []
    for length in (40, 38, 41, 39, 40):
        told.append([*(runs.end(0.0) for _ in range(length)), *(runs.end(250.0) for _ in range(24))])
    assert not any(map(any, told[:ALIKE]))
    assert [at + 1 for at, ends in enumerate(told[ALIKE]) if ends] == [38, 39, 39 + 24]
    assert [at + 1 for at, ends in enumerate(told[ALIKE + 1]) if ends] == [38, 39, 40, 40 + 24]
    assert runs.jump_us == 250 and runs.delayed
    # The next one, among delays of other sizes and one alone.
    begin = [0.0, 80.0, 80.0, 900.0, *[0.0] * 16, 260.0, *[0.0] * 18]
    assert [at + 1 for at, us in enumerate(begin) if runs.end(us)] == [38, 39] and not runs.delayed
    assert runs.jump_us == 250


def test_single_delays_end_at_once():
    runs = Runs()
    ends = [runs.end(250.0 * (at in (9, 100, 122, 170))) for at in range(200)]
    assert [at for at, end in enumerate(ends) if end] == [170]


@pytest.mark.parametrize("kind", ["bursts", "unsteady", "chance"])
def test_delays_at_a_rhythm_cost_little(kind):
    """A constant budget that other work leaves too little of. Delays by chance cannot be foreseen."""
    rows, samples, took, budgets = replayed(kind, 0)
    budgets = np.full(len(budgets), 1.1 * rows.rows[-1].promise_us)
    scores = np.array([row.choice for row in rows.rows])[:, None]
    best = np.where(took[[int(row.path) for row in rows.rows]] <= budgets, scores, 0).max(0)[WARM_UP:].mean()
    odds = Odds(rows.rows, samples)
    for controller in (Closed(0.01), Priced(0.01, odds=odds)):
        late, seen = met(controller, rows, odds, budgets, took)
        assert late[WARM_UP:].mean() <= bound(0.01)
        assert seen[WARM_UP:].mean() / best > (0.9 if kind == "chance" else 0.985)


def test_a_jump_that_stays_becomes_the_level():
    """Clocks that fall at once: promises grow at once, and the delay becomes a part of them."""
    of, drawn = entry("a", 0.5, 1000.0, 1040.0), np.random.default_rng(0)
    controller, broken = Closed(0.01), []
    for at in range(4000):
        us = 1000 + 150 * (at >= 500) + 10 * drawn.standard_normal()
        broken.append(us > controller.promised(of))
        controller.saw(us, of)
    assert sum(broken[500:510]) <= 2 and np.mean(broken[1000:]) <= 0.015
    assert controller.delay_us == 0 and controller.level_us == pytest.approx(150, abs=20)
    assert JUMP * 10 < 150, "the jump is one"


def test_paths_of_one_time():
    odds = Odds([entry(0, 0.3, 5.0)], {"0": [5.0] * SAMPLES})
    assert odds.pick(5.0, 1.0).path == "0" and odds.pick(4.9, 1.0) is None
    assert msgspec.structs.asdict(odds.pick(9.0, 1.0))["choice"] == 0.3

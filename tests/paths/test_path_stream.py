"""A runner of paths on a CPU, and streams of frames with budgets."""

import threading
import time

import numpy as np
import pytest
import torch

from tilewright import models
from tilewright.core.errors import BudgetError, ConfigError, PatternError
from tilewright.paths import stream
from tilewright.paths.runner import Runner
from tilewright.paths.table import Entry, Table

FULL, SHORT, EXIT = "11.11.11.11", "10.10.01.11 scale=0.5", "11.11.11.11 levels=123"


def entry(path, promise, score, **more):
    facts = {"network": "segformer-b0-64", "checkpoint": "ab12", "rung": "trained", "batch": 1, "device": "x"}
    facts |= {"dtype": "float32", "macs": 1, "p50_us": promise, "p99_us": promise, "promise_us": promise}
    return Entry(path=path, choice=score, test=score - 0.01, **(facts | more))


def look_up(**more):
    return Table([entry(SHORT, 100.0, 0.3, **more), entry(EXIT, 300.0, 0.5, **more), entry(FULL, 900.0, 0.6, **more)])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return models.create("segformer", variant="b0", image_size=64, num_classes=5).eval()


def test_a_runner_gives_what_the_network_gives(network):
    runner, images = Runner(network, look_up()), torch.randn(1, 3, 64, 64)
    for budget, path in ((120, SHORT), (899.9, EXIT), (1e9, FULL)):
        maps, told = runner(images, budget_us=budget)
        assert told.path == path and told.promised_us <= budget
        torch.testing.assert_close(maps, network(images, path=path).detach())
    assert told.accuracy == pytest.approx(0.59)


def test_statistics_of_a_path_are_its_own(network):
    folded = network.fold(FULL)
    other = folded._replace(bias=folded.bias + 3)
    images = torch.randn(1, 3, 64, 64)
    maps, _ = Runner(network, look_up(), folded={FULL: other})(images, budget_us=1e6)
    torch.testing.assert_close(maps, network(images, network.path(FULL), other).detach())
    assert not torch.allclose(maps, network(images).detach())


def test_margins_and_slow_devices(network):
    runner = Runner(network, look_up(), margin=0.25)
    assert runner.pick(1000).path == EXIT
    assert runner.pick(1125).path == FULL
    assert runner.pick(1125, slowdown=1.01).path == EXIT
    with pytest.raises(BudgetError, match="at least 100 us"):
        runner.pick(124)
    assert Runner(network, look_up(), late="fastest").pick(1).path == SHORT


def test_what_a_runner_refuses(network):
    with pytest.raises(PatternError, match="expected 1x3x64x64 of the runner, found 2x3x64x64"):
        Runner(network, look_up())(torch.randn(2, 3, 64, 64), budget_us=1e6)
    with pytest.raises(ConfigError, match="expected one of batch 2, found 1"):
        Runner(network, look_up(), batch=2)
    with pytest.raises(ConfigError, match="expected one of dtype float32, found bfloat16"):
        Runner(network, look_up(dtype="bfloat16"))
    with pytest.raises(ConfigError, match="margin: expected a share of at least 0"):
        Runner(network, look_up(), margin=float("nan"))
    with pytest.raises(ConfigError, match=r"expected 2 0s and 1s"):
        Runner(network, Table([entry("111.11.11.11", 1.0, 0.1)]))


def test_two_callers_at_once(network):
    runner, inside, go = Runner(network, look_up()), threading.Event(), threading.Event()
    called = runner.calls._called

    def slow(*words):
        inside.set()
        go.wait(10)
        return called(*words)

    runner.calls._called = slow
    thread = threading.Thread(target=runner, args=(torch.randn(1, 3, 64, 64), 1e6))
    thread.start()
    inside.wait(10)
    with pytest.raises(PatternError, match="expected one caller at a time"):
        runner(torch.randn(1, 3, 64, 64), 1e6)
    go.set()
    thread.join()


def test_frames_that_are_told_are_of_each_rate():
    assert stream.told(stream.trace("uniform", look_up(), 50), 4).tolist() == [0, 1, 2, 3]
    assert stream.told(stream.trace("steps", look_up(), 90), 7).tolist() == [0, 1, 30, 31, 60, 61]
    assert stream.told(stream.trace("steps", look_up(), 4), 99).tolist() == [0, 1, 2, 3]
    assert stream.told(stream.trace("contended", look_up(), 5), 0).tolist() == []


def test_traces():
    table = look_up()
    uniform = stream.trace("uniform", table, 500)
    assert uniform.budgets_us.min() >= 100 and uniform.budgets_us.max() <= 1080
    assert np.array_equal(uniform.budgets_us, stream.trace("uniform", table, 500).budgets_us)
    steps = stream.trace("steps", table, 10)
    assert np.array_equal(steps.budgets_us, steps.period_us) and len(np.unique(steps.budgets_us)) == 3
    assert steps.budgets_us.min() > 100, "the fastest path meets every budget"
    # Paths that are within a factor of two of each other, on a device that is much faster than any camera.
    narrow = Table([entry(SHORT, 554.0, 0.4), entry(FULL, 913.0, 0.6)])
    assert np.unique(stream.trace("steps", narrow, 9).budgets_us) == pytest.approx([554 / 0.8, 913, 2 * 913])
    loaded = stream.trace("contended", table, 300).loaded
    assert loaded.any() and not loaded.all()
    with pytest.raises(ConfigError, match="unknown 'waves'; known: uniform, steps, contended"):
        stream.trace("waves", table, 10)
    with pytest.raises(ConfigError, match="at least one frame"):
        stream.trace("steps", table, 0)


def test_a_closed_loop_meets_budgets_that_an_open_one_misses():
    """A device that takes three times as long for a while, as the clock would show it."""
    table, took = look_up(), {SHORT: 900.0, EXIT: 2700.0, FULL: 8100.0}
    trace = stream.Trace("x", np.full(120, 10_000.0), np.zeros(120), np.arange(120) >= 20)
    slow = []

    def contender(frame, budget, slowdown):
        picked = table.select(budget / 9 / slowdown, late="fastest")
        factor = 3.0 if trace.loaded[frame] else 1.0
        slow.append(factor)
        return picked.path, 9 * picked.promise_us, lambda: time.sleep(took[picked.path] * factor / 1e6)

    missed = {}
    for closed in (True, False):
        frames = stream.run(trace, contender, controller=stream.Controller(closed))
        missed[closed] = frames.missed(trace)
        assert len(frames.path) == len(trace)
    assert missed[False][20:].mean() > 0.9
    assert missed[True][20:].mean() < 0.3


def test_the_controller_forgets():
    controller = stream.Controller()
    controller.saw(300, 100)
    assert controller.slowdown == 3
    for _ in range(400):
        controller.saw(90, 100)
    assert 1 <= controller.slowdown < 1.01
    opened = stream.Controller(closed=False)
    opened.saw(300, 100)
    assert opened.slowdown == 1


def after(times, frames=20):
    """The slowdown that is left so many quiet frames after frames took these times, of a promise of 100."""
    controller = stream.Controller()
    for us in (*times, *([90] * frames)):
        controller.saw(us, 100)
    return controller.slowdown


def test_one_slow_frame_is_forgotten_and_several_are_not():
    assert after([300]) == pytest.approx(1 + 2 * stream.FORGET**20)
    assert after([300, 250]) == pytest.approx(1 + 2 * stream.DECAY**21)
    assert after([300, 90, 90, 110]) == pytest.approx(1 + 2 * stream.FORGET**2 * stream.DECAY**21)
    assert after([300, *[90] * (stream.CONFIRM + 1), 110]) < 1.1
    # A small one on its own does not end what was confirmed.
    assert after([300, 250, *[90] * 10, 101]) > 2


def test_single_slow_frames_cost_few_good_paths():
    """A quiet device, one of whose frames in a hundred takes twice its time, against one that always goes on slowly."""
    table, controller, drawn = look_up(), stream.Controller(), np.random.default_rng(0)
    full = 0
    for _ in range(2000):
        picked = table.select(950 / controller.slowdown, late="fastest")
        full += picked.path == FULL
        controller.saw(picked.promise_us * (2.0 if drawn.random() < 0.01 else 0.95), picked.promise_us)
    assert full > 0.85 * 2000


def test_a_share_of_late_frames_is_aimed_at():
    """Times that scatter well below their promises, and budgets that only just do not reach the next path."""
    table, drawn = look_up(), np.random.default_rng(0)
    budgets = drawn.uniform(100, 1080, 20_000)
    scatter = 0.9 * np.exp(0.03 * drawn.standard_normal(len(budgets)))
    late, score = {}, {}
    for target in (0.0, 0.005):
        controller, missed, seen = stream.Controller(target=target, floor=stream.FLOOR if target else 1.0), 0, 0.0
        for budget, share in zip(budgets, scatter, strict=True):
            picked = table.select(budget / controller.factor, late="fastest")
            us = share * picked.promise_us
            controller.saw(us, picked.promise_us, late=us > budget)
            missed, seen = missed + (us > budget), seen + picked.choice
        late[target], score[target] = missed / len(budgets), seen / len(budgets)
    assert late[0.0] < 0.001 and late[0.005] == pytest.approx(0.005, rel=0.2)
    assert score[0.005] > score[0.0]


def test_a_controller_without_a_target_keeps_promises():
    controller = stream.Controller()
    for _ in range(100):
        controller.saw(50, 100)
    assert controller.factor == 1
    aiming = stream.Controller(target=0.1, floor=stream.FLOOR)
    for _ in range(10_000):
        aiming.saw(50, 100)
    assert aiming.factor == stream.FLOOR
    aiming.saw(150, 100, late=True)
    assert aiming.factor == 1.5


def test_a_controller_makes_haste_until_the_first_late_frame():
    """A target of 1 % lowers the share by a hundredth of a step for each frame."""
    controller, small = stream.Controller(target=0.01, floor=stream.FLOOR), 0.01 * stream.STEP
    for _ in range(50):
        controller.saw(50, 100)
    assert controller.factor == pytest.approx(1 - 50 * stream.HASTE * small)
    controller.saw(99, 100, late=True)
    for _ in range(50):
        controller.saw(50, 100)
    assert controller.factor == pytest.approx(1 - 50 * stream.HASTE * small + stream.STEP - small - 50 * small)


def test_more_slow_calls_than_promised_are_kept_to_the_share_of_late_frames():
    """Three calls in a hundred, one by one, take a tenth more than promised; half of the budgets hold little more."""
    table, drawn = look_up(), np.random.default_rng(0)
    promises = [entry.promise_us for entry in table.rows[1:]]
    budgets = drawn.choice(promises, 20_000) * drawn.choice([1.02, 1.5], 20_000)
    times, late = np.where(drawn.random(20_000) < 0.03, 1.1, 0.9), {}
    for target in (0.0, 0.008):
        controller, late[target] = stream.Controller(target=target), 0
        for budget, share in zip(budgets, times, strict=True):
            assert controller.factor >= 1
            picked = table.select(budget / controller.factor, late="fastest")
            missed = share * picked.promise_us > budget
            controller.saw(share * picked.promise_us, picked.promise_us, late=missed)
            late[target] += missed / 20_000
    assert late[0.0] > 0.011 and 0.005 < late[0.008] < 0.0085


def test_an_oracle_knows_each_time():
    trace = stream.Trace("x", np.array([10.0, 3.0, 1.0]), np.zeros(3), np.zeros(3, dtype=bool))
    times = {"slow": np.array([9.0, 9.0, 9.0]), "fast": np.array([2.0, 2.0, 2.0])}
    found = stream.oracle(trace, times, {"slow": 0.9, "fast": 0.5})
    assert found.path == ["slow", "fast", "fast"] and found.measured_us == [9, 2, 2]
    assert found.missed(trace).tolist() == [False, False, True]


def test_promises_are_made_anew_by_a_rehearsal(network):
    runner = Runner(network, look_up())
    before, images = runner.table.rows, torch.randn(3, 3, 64, 64)
    took = runner.times(images, 7, beside=lambda: time.sleep(0.01))
    assert runner.table.rows is before
    assert {len(times) for times in took.values()} == {7} and min(times.min() for times in took.values()) > 10_000
    took = runner.rehearse(images, 7)
    tail = max((times / np.median(times)).max() for times in took.values())
    for entry in runner.table.rows:
        assert entry.promise_us == pytest.approx(np.median(took[entry.path]) * tail)


def test_a_path_that_hardly_sees_anything_is_not_picked():
    whole = Table([entry("11.11.11.11", 100.0, 0.5), entry("10.11.11.11", 90.0, 0.3), entry("00.11.11.11", 10.0, 0.01)])
    assert len(whole.rows) == 3
    assert len(Table(whole.rows, least=0.5).rows) == 2


def test_spans():
    assert list(stream.spans([True, False, True, True])) == [(0, 1), (2, 4)]
    assert list(stream.spans([False])) == []

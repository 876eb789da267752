"""A runner of paths on a CPU, and streams of frames with budgets."""

import json
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tilewright import devices, networks
from tilewright.core import provenance, weight_files
from tilewright.core.errors import BudgetError, ConfigError, PatternError
from tilewright.paths import lateness
from tilewright.paths.runner import Runner
from tilewright.paths.table import Entry, Table, promises
from tilewright_study.experiments.stream import traces

DEVICE = devices.describe("cpu")["name"]
FULL, SHORT, EXIT = "11.11.11.11", "10.10.01.11 scale=0.5", "11.11.11.11 levels=123"


def entry(path, promise, score, **more):
    facts = {"network": "segformer-b0-64", "checkpoint": "", "rung": "trained", "batch": 1, "device": DEVICE}
    facts |= {"dtype": "float32", "macs": 1, "p50_us": promise, "p99_us": promise, "promise_us": promise}
    return Entry(path=path, choice=score, test=score - 0.01, **(facts | more))


def look_up(**more):
    return Table([entry(SHORT, 100.0, 0.3, **more), entry(EXIT, 300.0, 0.5, **more), entry(FULL, 900.0, 0.6, **more)])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return networks.create("segformer", variant="b0", image_size=64, num_classes=5).eval()


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


def test_statistics_of_a_table_are_asked_for(network):
    rows, folded = look_up(rung="statistics"), {path: network.fold(path) for path in (SHORT, EXIT, FULL)}
    assert Runner(network, rows, folded=folded).pick(1e6).path == FULL
    del folded[EXIT]
    for some in (folded, None):
        with pytest.raises(ConfigError, match="folded: expected batch-norm statistics of each path"):
            Runner(network, rows, folded=some)


def test_margins(network):
    runner = Runner(network, look_up(), margin=0.25)
    assert runner.pick(1000).path == EXIT
    assert runner.pick(1125).path == FULL
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
    for field, other in (
        ("network", "segformer-b1-64"),
        ("network", "segformer-b0-128"),
        ("device", "another"),
        ("checkpoint", "ab12"),
    ):
        with pytest.raises(ConfigError, match=f"path table: expected one of {field} .*, found {other}"):
            Runner(network, look_up(**{field: other}))
    with pytest.raises(ConfigError, match="margin: expected a share of at least 0"):
        Runner(network, look_up(), margin=float("nan"))
    with pytest.raises(ConfigError, match=r"expected 2 0s and 1s"):
        Runner(network, Table([entry("111.11.11.11", 1.0, 0.1)]))


def test_a_table_is_of_the_weights_of_a_file(network, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    loaded = networks.create("segformer", variant="b0", image_size=64, num_classes=5, checkpoint=path)
    of_file = provenance.sha256_file(path)[:12]
    assert Runner(loaded, look_up(checkpoint=of_file)).pick(1e6).path == FULL
    with pytest.raises(ConfigError, match=f"expected one of checkpoint {of_file}, found ab12"):
        Runner(loaded, look_up(checkpoint="ab12"))
    index = tmp_path / "weights.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(network.state_dict(), path.name)}))
    of_parts = weight_files.digest(index)
    loaded.weights = str(index)
    assert Runner(loaded, look_up(checkpoint=of_parts)).pick(1e6).path == FULL
    save_file({name: 2 * x for name, x in network.state_dict().items()}, path)
    with pytest.raises(ConfigError, match=f"expected one of checkpoint .*, found {of_parts}"):
        Runner(loaded, look_up(checkpoint=of_parts))
    path.unlink()
    with pytest.raises(ConfigError, match="expected the file of the network's weights, found none"):
        Runner(loaded, look_up(checkpoint=of_file))


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
    assert traces.told(traces.trace("uniform", look_up(), 50), 4).tolist() == [0, 1, 2, 3]
    assert traces.told(traces.trace("steps", look_up(), 90), 7).tolist() == [0, 1, 30, 31, 60, 61]
    assert traces.told(traces.trace("steps", look_up(), 4), 99).tolist() == [0, 1, 2, 3]
    assert traces.told(traces.trace("contended", look_up(), 5), 0).tolist() == []


def test_traces():
    table = look_up()
    uniform = traces.trace("uniform", table, 500)
    assert uniform.budgets_us.min() >= 100 and uniform.budgets_us.max() <= 1080
    assert np.array_equal(uniform.budgets_us, traces.trace("uniform", table, 500).budgets_us)
    steps = traces.trace("steps", table, 10)
    assert np.array_equal(steps.budgets_us, steps.period_us) and len(np.unique(steps.budgets_us)) == 3
    assert steps.budgets_us.min() > 100, "the fastest path meets every budget"
    # Paths that are within a factor of two of each other, on a device that is much faster than any camera.
    narrow = Table([entry(SHORT, 554.0, 0.4), entry(FULL, 913.0, 0.6)])
    assert np.unique(traces.trace("steps", narrow, 9).budgets_us) == pytest.approx([554 / 0.8, 913, 2 * 913])
    loaded = traces.trace("contended", table, 300).loaded
    assert loaded.any() and not loaded.all()
    with pytest.raises(ConfigError, match="unknown 'waves'; known: uniform, steps, contended"):
        traces.trace("waves", table, 10)
    with pytest.raises(ConfigError, match="at least one frame"):
        traces.trace("steps", table, 0)


def test_a_closed_loop_meets_budgets_that_an_open_one_misses():
    """A device that delays each frame by 5 ms for a while, as the clock would show it."""
    table, took = look_up(), {SHORT: 0.9e3, EXIT: 2.7e3, FULL: 8.1e3}
    trace = traces.Trace("x", np.full(120, 10_000.0), np.zeros(120), np.arange(120) >= 20)

    def contender(frame, room, price):
        picked = table.select(room / 10, late="fastest")
        picked = msgspec.structs.replace(picked, promise_us=10 * picked.promise_us)
        return picked, lambda: time.sleep((took[picked.path] + 5e3 * trace.loaded[frame]) / 1e6)

    missed = {}
    for controller in (lateness.Controller(), lateness.Closed(0.01)):
        frames = traces.run(trace, contender, controller=controller)
        missed[type(controller)] = frames.missed(trace)
        assert len(frames.path) == len(trace)
        assert frames.slowdown[0] == 1
    assert missed[lateness.Controller][20:].mean() > 0.9
    assert missed[lateness.Closed][20:].mean() < 0.1
    assert frames.slowdown[-1] > 1.8


def test_an_oracle_knows_each_time():
    trace = traces.Trace("x", np.array([10.0, 3.0, 1.0]), np.zeros(3), np.zeros(3, dtype=bool))
    times = {"slow": np.array([9.0, 9.0, 9.0]), "fast": np.array([2.0, 2.0, 2.0])}
    found = traces.oracle(trace, times, {"slow": 0.9, "fast": 0.5})
    assert found.path == ["slow", "fast", "fast"] and found.measured_us == [9, 2, 2]
    assert found.missed(trace).tolist() == [False, False, True]


def test_no_choice_of_paths_sees_more_in_time_than_the_oracle_that_knows_frames():
    rng = np.random.default_rng(0)
    trace = traces.Trace("x", rng.uniform(1, 3, 60), np.zeros(60), np.zeros(60, dtype=bool))
    times, sees = rng.uniform(0.5, 4, (4, 60)), rng.uniform(0, 1, (4, 60))
    found = traces.oracle(trace, dict(zip("abcd", times, strict=True)), dict(zip("abcd", sees, strict=True)))
    chosen = ["abcd".index(path) for path in found.path]
    frames, timely = np.arange(60), sees * (times <= trace.budgets_us)
    np.testing.assert_array_equal(timely[chosen, frames], timely.max(0))


def test_promises_are_made_anew_by_a_rehearsal(network):
    runner = Runner(network, look_up())
    before, images = runner.table.rows, torch.randn(3, 3, 64, 64)
    took = runner.times(images, 7, beside=lambda: time.sleep(0.01))
    assert runner.table.rows is before
    assert {len(times) for times in took.values()} == {7} and min(times.min() for times in took.values()) > 10_000
    took = runner.rehearse(images, 7)
    promised = promises(took)
    for entry in runner.table.rows:
        assert entry.promise_us == promised[entry.path] >= took[entry.path].max() * 0.9
        assert entry.p50_us == np.median(took[entry.path])


def test_a_price_asks_for_a_rehearsal_and_for_what_paths_see(network):
    runner, images = Runner(network, look_up()), torch.randn(1, 3, 64, 64)
    with pytest.raises(ConfigError, match=r"price: call .*rehearse.* first, with a table that states mean IoU"):
        runner(images, 1e6, price=1.0)
    runner.rehearse(images, 3)
    best = runner.table.rows[-1]
    assert runner(images, 1e9, price=1.0)[1].path == best.path
    with pytest.raises(BudgetError, match="expected at least"):
        runner(images, 1e-3, price=1.0)
    with pytest.raises(BudgetError, match="microseconds above 0, found nan"):
        runner(images, float("nan"), price=1.0)
    for price in (None, 1.0):
        with pytest.raises(BudgetError, match="microseconds above 0, found '900'"):
            runner(images, "900", price=price)
    unknown = Runner(network, Table([msgspec.structs.replace(entry(FULL, 900.0, 0.6), choice=None)]))
    unknown.rehearse(images, 3)
    with pytest.raises(ConfigError, match=r"price: .* a table that states mean IoU"):
        unknown(images, 1e6, price=1.0)


def test_a_path_that_hardly_sees_anything_is_not_picked():
    whole = Table([entry("11.11.11.11", 100.0, 0.5), entry("10.11.11.11", 90.0, 0.3), entry("00.11.11.11", 10.0, 0.01)])
    assert len(whole.rows) == 3
    assert len(Table(whole.rows, least=0.5).rows) == 2


def test_spans():
    assert list(traces.spans([True, False, True, True])) == [(0, 1), (2, 4)]
    assert list(traces.spans([False])) == []

"""The contender `static` of streams: networks of their own, of which a budget picks one."""

from time import perf_counter_ns

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from helpers.checkout import ALL, merged
from helpers.gpu import TRITON_DEVICE
from tilewright import devices, networks
from tilewright.core import provenance
from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright.paths import runner
from tilewright.paths import table as look_up
from tilewright_study import config, experiments, scenes
from tilewright_study.experiments.paths import measure
from tilewright_study.experiments.stream import run, traces
from tilewright_study.measure import effort
from tilewright_study.training import evaluation

HOW = effort.Run("cpu", "float32", 0, 0.5, 3)
SMALL, LARGE = "segformer-b0-64.plain", "segformer-b1-64.plain"
# Mean IoU of networks, of which the larger one is the better.
BETTER = {"b0": 0.3, "b1": 0.5}


def configured(static, contenders=("closed", "static"), **others):
    mapping = merged(ALL)
    mapping["experiments"] = ["paths", "stream"]
    named = {name: {"network": name.removesuffix(".plain"), "checkpoint": None} for name in (SMALL, LARGE)}
    mapping["paths"]["networks"] = named | others
    listed = {"static": list(static), "contenders": list(contenders), "networks": list(mapping["paths"]["networks"])}
    mapping["stream"] |= listed
    return config.load(mapping)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The network B0 with two paths, beside B0 and B1; random weights."""
    folder = tmp_path_factory.mktemp("static")
    classes, static = len(scenes.create("stream").classes), {}
    for seed, name in enumerate((SMALL, LARGE)):
        network = name.removesuffix(".plain")
        family, options = networks.parse(network)
        made = networks.create(family, seed=seed, num_classes=classes, **options)
        safetensors.torch.save_file(made.state_dict(), folder / f"{name}.safetensors")
        static[name] = {"network": network, "checkpoint": str(folder / f"{name}.safetensors")}
    facts = {
        "network": "segformer-b0-64",
        "checkpoint": provenance.sha256_file(static[SMALL]["checkpoint"])[:12],
        "batch": 1,
    }
    facts |= {"rung": "trained", "device": devices.describe("cpu")["name"], "dtype": "float32", "macs": 1}
    entries = [
        look_up.Entry(path=path, p50_us=us, promise_us=us, choice=score, **facts)
        for path, us, score in (("11.11.11.11 scale=0.5", 1e3, 0.4), ("11.11.11.11", 2e3, 0.5))
    ]
    look_up.write(folder / "table.csv", entries)
    stated = {"network": static[SMALL], "table": str(folder / "table.csv"), "traces": ["uniform"], "frames": 12}
    stated |= {"shown": 2, "contenders": ["closed", "static", "oracle"], "static": static, "rung": "trained"}
    stated |= {"margin": 0.0, "late": 0.005, "least": 0.0, "samples": 20, "scenes": 3, "shots": 3, "switches": 2}
    return experiments.parse("stream", stated)


def contenders(settings, patch, scores):
    """`_stream.Contenders` whose networks take 1 and 2 ns at first and have these mean IoUs on scenes of ``choice``."""
    took = {"b0": 1e-3, "b1": 2e-3}
    patch.setattr(measure, "times", lambda network, paths, **_: dict.fromkeys(paths, took[network.options.variant]))

    def seen(self, network, split, wanted, own=None):
        return {path: scores[network.options.variant] * path.scale for path in wanted}

    patch.setattr(measure.Scenes, "image_ious", seen)
    return run.Contenders(settings, HOW)


@pytest.fixture(scope="module")
def bench(settings):
    """Contenders that promise 1,000 us for the first network, or path, and 2,000 us for the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "promises", lambda found: dict(zip(found, (1e3, 2e3), strict=True)))
        return contenders(settings, patch, BETTER)


def test_what_a_table_leaves_out_is_picked_where_single_scenes_see_more_by_it(settings, monkeypatch, tmp_path):
    entries = look_up.read(settings.table)
    fast, slow = (entry.path for entry in entries)
    look_up.write(
        tmp_path / "table.csv",
        [msgspec.structs.replace(entry, choice={fast: 0.5, slow: 0.4}[entry.path]) for entry in entries],
    )
    assert [entry.path for entry in look_up.load(tmp_path / "table.csv").rows] == [fast]
    monkeypatch.setattr(
        runner,
        "promises",
        lambda found: {fast: 1e3, slow: 2e3} if fast in found else dict(zip(found, (1e3, 2e3), strict=True)),
    )
    found = contenders(msgspec.structs.replace(settings, table=str(tmp_path / "table.csv")), monkeypatch, BETTER)
    assert {entry.path: entry.choice for entry in found.table.rows} == {fast: 0.15, slow: 0.3}
    assert set(found.sees) == {fast, slow, *settings.static}


def test_a_budget_picks_the_best_network_that_it_allows(bench):
    trace = traces.Trace("x", np.array([1e3]), np.zeros(1), np.zeros(1, dtype=bool))
    asked = bench.contender("static", trace)
    for room, name in ((500, SMALL), (1999, SMALL), (2000, LARGE)):
        entry, call = asked(0, room, None)
        assert (entry.path, entry.promise_us) == (name, 1e3 if name == SMALL else 2e3)
        call()


def test_a_network_that_was_picked_gives_its_own_maps(bench, settings):
    images = bench.images[:1]
    for name, stated in settings.static.items():
        network = bench._network(stated, scenes.create("stream"))
        found = bench.static.calls(name, images)
        np.testing.assert_allclose(found, network(images).detach(), rtol=1e-4, atol=1e-4)


def test_a_frame_is_seen_as_the_network_that_ran_sees_it(bench, settings):
    shown = measure.Scenes(scenes.create("stream", frames=3, shots=3), {"test": 3}, (64, 64), "cpu")
    seen = {}
    for name, stated in settings.static.items():
        network = bench._network(stated, shown.source)
        (confusions,) = shown.confusions(network, "test", [Path.full(network.options)], apart=True).values()
        seen[name] = [evaluation.mean_iou(one) for one in confusions]
    assert seen[SMALL] != pytest.approx(seen[LARGE])
    texts = [SMALL, LARGE, LARGE, LARGE]
    expected = [seen[SMALL][0], seen[LARGE][1], seen[LARGE][2], seen[LARGE][0]]
    assert bench.frame_mious(texts) == pytest.approx(expected)


def test_the_controller_of_static_networks_is_closed(bench):
    """A budget that the larger network's promise meets. Its first frame takes longer."""
    promised = bench.static.table
    bench.static.table = look_up.Table(
        [msgspec.structs.replace(entry, promise_us=entry.promise_us / 1e3) for entry in promised.rows]
    )
    trace = traces.Trace("x", np.full(4, 3.0), np.zeros(4), np.zeros(4, dtype=bool))
    found = bench.met("static", trace, 0)
    bench.static.table = promised
    assert found.path == [LARGE, SMALL, SMALL, SMALL] and found.slowdown[1] > 2


def test_a_controller_of_late_frames_learns_what_its_runner_picks_by(bench):
    controller = bench.controller("target")
    assert controller.odds is bench.runner.odds is not None and controller.target == bench.settings.late
    assert bench.controller("open").price is None


def test_a_network_that_is_slower_and_no_better_is_left_out(settings, monkeypatch):
    kept = contenders(settings, monkeypatch, {"b0": 0.4, "b1": 0.4}).static.table.rows
    assert [entry.path for entry in kept] == [SMALL]


def test_a_network_that_sees_too_little_is_left_out(settings, monkeypatch):
    least = msgspec.structs.replace(settings, least=0.7)
    kept = contenders(least, monkeypatch, BETTER).static.table.rows
    assert [entry.path for entry in kept] == [LARGE]


def test_promises_of_static_networks_are_rehearsed(settings, monkeypatch):
    rows = contenders(settings, monkeypatch, BETTER).static.table.rows
    assert min(entry.promise_us for entry in rows) > 100


def test_rows_of_static_networks_name_the_network_that_ran(settings):
    rows = list(experiments.runner("stream").run("mine", settings, HOW))
    static = [row for row in rows if row.get("contender") == "static"]
    assert len(static) == settings.shown + 1
    assert {row["path"] for row in static if "frame" in row} <= {SMALL, LARGE}
    assert all(0 <= row["miou"] <= 1 for row in static)


@pytest.mark.parametrize(
    ("static", "message"),
    [
        (["segformer-b2-64.plain"], "stream.static: unknown network 'segformer-b2-64.plain'; known: " + SMALL),
        ([], "stream.static: expected networks for the contender static, found none"),
        ([SMALL, SMALL], f"stream.static: '{SMALL}' appears twice"),
        (
            [SMALL, "segformer-b0-96.plain"],
            f"expected images of 64x64, as {SMALL} has them, found 96x96 of segformer-b0-96",
        ),
    ],
)
def test_what_static_refuses(static, message):
    other = {"segformer-b0-96.plain": {"network": "segformer-b0-96", "checkpoint": None}}
    with pytest.raises(ConfigError, match=message):
        configured(static, **(other if "segformer-b0-96.plain" in static else {}))


def test_no_static_networks_where_the_contender_is_not_asked_for():
    assert configured([], contenders=["closed"]).stream.static == ()


def test_a_case_of_its_own_without_static_networks_is_refused(settings):
    with pytest.raises(ConfigError, match="static: expected networks for the contender static, found none"):
        list(experiments.runner("stream").run("mine", msgspec.structs.replace(settings, static={}), HOW))


def test_a_case_waits_for_the_weights_of_static_networks():
    study = configured([SMALL, LARGE])
    weights = [f"results/checkpoints/{name}.safetensors" for name in (SMALL, LARGE)]
    assert experiments.sources("stream", study, SMALL) == [*weights, f"results/logs/paths/{SMALL}.csv"]
    words = experiments.arguments("stream", study, SMALL)
    (stated,) = (word for word in words if word.startswith("'static="))
    assert all(name in stated and path in stated for name, path in zip((SMALL, LARGE), weights, strict=True))
    module = experiments.member("stream")
    planned = module.planned(SMALL, module.settings(study, SMALL))
    assert {row["network"] for row in planned} == {"segformer-b0-64", "segformer-b1-64"}


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_a_load_adds_what_is_wanted_though_frames_wait_for_a_part_of_it(share):
    started = []
    load = run.load_of(300.0, lambda us: started.append(us) or us, lambda us: share * us)
    assert share * load == pytest.approx(300.0, rel=0.2) and load == started[-1] and len(started) == run.TRIES


def test_of_the_loads_that_were_tried_the_closest_is_taken():
    adds = iter([270.0, 900.0, 100.0])
    assert run.load_of(300.0, lambda us: us, lambda _: next(adds)) == 300.0


@pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="expected a GPU, found none")
def test_a_load_on_a_gpu_is_one_launch_of_as_long_as_asked():
    load = run.Contenders._load(None, 300.0)
    beside, host = [], []
    for _ in range(20):
        begin = perf_counter_ns()
        load()
        host.append(perf_counter_ns() - begin)
        torch.cuda.synchronize()
        beside.append(perf_counter_ns() - begin)
    assert np.median(beside) / 1e3 == pytest.approx(300, rel=0.2)
    assert np.median(host) / 1e3 < 50


def test_a_load_keeps_the_slowest_path_from_its_budget(settings, monkeypatch):
    """By what it is to add, since what it adds is a matter of what else the machine does."""
    asked = []
    monkeypatch.setattr(run, "load_of", lambda wanted_us, *_: asked.append(wanted_us) or (lambda: None))
    bench = contenders(msgspec.structs.replace(settings, traces=("uniform", "contended")), monkeypatch, BETTER)
    (budget,) = set(traces.trace("contended", bench.table, 64).budgets_us)
    took = [np.median(bench.took[False][entry.path]) for entry in bench.table.rows]
    # The fastest keeps the budget by as much as the slowest misses it.
    assert [budget - took[0] - load for load in asked] == [pytest.approx(took[-1] + asked[0] - budget, abs=1e-6)]


def test_an_oracle_knows_a_host_that_has_become_slower(settings, monkeypatch):
    bench = contenders(msgspec.structs.replace(settings, traces=("uniform", "contended")), monkeypatch, BETTER)
    rows = bench.table.rows
    bench.took = {loaded: {entry.path: np.array([1.0 + loaded]) for entry in rows} for loaded in (False, True)}
    asked = []

    def times(images, count, *, seed, beside):
        asked.append((count, beside is not None))
        assert beside is (bench.loaded if asked[-1][1] else None)
        return {entry.path: np.array([3.0 + asked[-1][1]]) for entry in rows}

    bench.runner.times = times
    trace = traces.trace("contended", bench.table, 4000)
    found = bench._times(trace, 0)
    half = -(-settings.samples // 2)
    assert asked == [(half, False), (half, True)] and bench.table.rows is rows
    for met in found.values():
        for loaded in (False, True):
            drawn = met[trace.loaded == loaded]
            assert set(drawn) == {1.0 + loaded, 3.0 + loaded} and 0.45 < (drawn == 3.0 + loaded).mean() < 0.55


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([3.0, 4.0, 5.0], 4.0),
        ([-0.2, 0.1, -0.3], 0.0),
        ([-9934.0, 50.0, 5000.0], 50.0),
        ([-300.0, 200.0, -100.0], 0.0),
        ([-9934.0, -9930.0, -9940.0], None),
        ([float("nan")] * 3, None),
    ],
)
def test_a_switch_takes_no_less_than_nothing_or_was_not_measured(added, expected):
    found = run.switch_us(added)
    assert found.get("measured_us") == expected
    assert (found.get("status") == "failed") == (expected is None) and ("reason" in found) == (expected is None)

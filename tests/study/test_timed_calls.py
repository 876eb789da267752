"""What is timed is what is checked, in every experiment: a call that is another where it is timed has no time."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

from helpers import plans
from helpers.rows import run_baselines, run_schedule, whole
from tilewright import devices, networks
from tilewright.core import provenance, timing
from tilewright.integrations import tuning
from tilewright.masks import deit, dynamicvit, wan
from tilewright.paths import calls, runner
from tilewright.paths import table as look_up
from tilewright_study import experiments, scenes
from tilewright_study.experiments import budgets, gains, heatmap, neighborhood, recall, slices, video, worth
from tilewright_study.experiments.attention import run as _attention
from tilewright_study.experiments.budgets import run as _budgets
from tilewright_study.experiments.gains import run as _gains
from tilewright_study.experiments.neighborhood import run as _neighborhood
from tilewright_study.experiments.networks import run as _networks
from tilewright_study.experiments.pruned import run as _pruned
from tilewright_study.experiments.ragged import run as _ragged
from tilewright_study.experiments.recall import run as _recall
from tilewright_study.experiments.slices import run as _slices
from tilewright_study.experiments.stream import run as _stream
from tilewright_study.experiments.video import run as _video
from tilewright_study.experiments.worth import run as _worth
from tilewright_study.measure import effort

QUICK = effort.Effort(rse=1.0, min_repetitions=3, max_seconds=0.001)
HOW = effort.Run(rse=1.0, min_repetitions=3)


# Faults: of a call, what it is replaced with.


def nothing(call):
    return lambda: torch.zeros(1)


def changed(result):
    """A result of the same shape with other values."""
    if isinstance(result, tuple):
        return changed(result[0]), *result[1:]
    return result.flip(-1) + 1


def others(call):
    return lambda: changed(call())


def elsewhere(call):
    """As a graph that writes to other memory than the result is read from, which holds a right one."""
    kept = []

    def run():
        found = call()
        kept.append(found)
        return kept[0]

    return run


def later(call):
    """Right in the first repetitions."""
    turns = itertools.count()
    return lambda: call() if next(turns) < 2 else changed(call())


FAULTS = (nothing, others, elsewhere, later)


@pytest.fixture
def faulty(monkeypatch):
    """Each call that is timed has one of `FAULTS`, in turns: nothing was wrong when it was checked first."""
    faults, measured = itertools.cycle(FAULTS), {}
    right = timing._wall_us

    def wall_us(call):
        # Profiles of tiles are stage T3's, and their schedules are checked where they run.
        if not getattr(call, "__module__", "").endswith(".probe") and id(call) not in measured:
            measured[id(call)] = call
            if isinstance(call, timing.Checked):
                call.call = next(faults)(call.call)
        return right(call)

    monkeypatch.setattr(timing, "_wall_us", wall_us)
    return measured


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setitem(dynamicvit.VARIANTS, "deit-256", (64, 2, (1, 2, 3)))
    monkeypatch.setitem(deit.VARIANTS, "tiny", (32, 2))
    monkeypatch.setitem(wan.VARIANTS, "tiny", wan.Size(128, 128, 1, 2))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))


def attention():
    ordered = plans.reordered(plans.pattern(40, 30), model="toy", family="toys", resolution=8, heads=2, head_dim=16)
    cover, tokens = plans.covers(ordered, ["16x1"]), _attention.Tokens(ordered)
    yield from run_schedule(plans.scheduled(cover), cover, tokens, QUICK)
    yield from run_baselines(["sdpa_dense", "sdpa_mask"], tokens, QUICK, max_dense_tokens=1000)


def network():
    return whole("networks", _networks.run_network("dynamicvit-256-32", {"native": [1, 2], "full": [1]}, QUICK))


def packed():
    return whole("ragged", _ragged.run_ragged(2, 16, [(3, 9)], {"tilewright": [2], "sdpa_mask": [2]}, QUICK))


def pruned():
    chosen = ("deit-tiny-64-threshold_l2", ({},), ("padded", "ragged"), {"eager": [2]})
    return whole("pruned", _pruned.run_pruned(*chosen, QUICK))


MAPS = {
    **{"groups": ("128x1",), "predictors": {"pooled": {"by": "pooled", "pool": 64}}, "baselines": ("sdpa_dense",)},
    "max_seconds": 0.001,
}


def lists():
    stated = slices.Settings(order="raster", sparsities=(0.5,), **MAPS)
    return whole("slices", _slices.run("1x64-6x16x16", stated, HOW))


def recalls():
    stated = recall.Settings(
        weights=None, layers=1, noise=(), orders=("raster",), recalls=(0.9,), timed=0.9, **MAPS | {"predictors": {}}
    )
    return whole("recall", _recall.run("1x64-6x16x16", stated, HOW))


def passes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video, "check_attention", lambda *_: None)
        clip = (torch.randn(1, 16, 1, 16, 16), torch.tensor([500.0]), None)
        patch.setattr(_video, "_inputs", lambda *_, **__: clip)
        # Before its parts are timed, a pass is: these hold for both.
        chosen = {
            "dense": video.Attention("dense", {}, None, 1),
            "slices": video.Attention("slices", {"keep": 0.4, "budget": 0.4}, None, 1),
        }
        return whole("video", _video.run("wan-tiny-480p-5f", video.Settings(chosen, ("eager",), 2, 0.001, None), HOW))


def cells():
    chosen = heatmap.Settings([16], 100, "window", "greedy", 0.001, ("16x1",), 1024)
    return whole("heatmap", heatmap.run("64", chosen, HOW))


def grid():
    stated = {
        **{"square": 1, "densities": (0.2,), "heads": 2, "head_dim": 32, "batch": 1, "order": "none"},
        **{"solver": "greedy", "masked": {"sdpa_mask": ("torch",)}, "masked_densities": (0.2,), "compiled": False},
        **{"max_entries": 10**6, "max_seconds": 0.001},
    }
    return list(_worth.run("8", worth.Settings(**stated), HOW))


def ways():
    stated = gains.Settings({"native": ("eager",), "dense": ("eager",)}, (1,), 15, 0.001)
    return list(_gains.run("vil-tiny-64", stated, HOW))


def windows():
    contenders = {"gather": 1000, "sdpa_dense": 1000}
    return list(_neighborhood.run("8x8-w3-1x16", neighborhood.Settings(contenders, 1, 1000, 0.001), HOW))


def budgeted():
    stated = {
        **{"order": "raster", "shares": (0.2, 0.6), "keeps": (0.2,), "choosers": ("single",), "steps": 1, "parts": 1},
        **{"rows": 64, "max_seconds": 0.001, "weights": None},
    }
    tokens = torch.randn(3, 1, 1, 256, 64, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        one = tuning.Pass(0, (1, 16, 16), lambda attend: attend(0, *tokens))
        patch.setattr(_budgets, "_planted", lambda *_: one)
        # Times that the choice is made by are not the rows'.
        patch.setattr(tuning, "times", lambda *_, **__: np.arange(1.0, 3.0))
        return whole("budgets", _budgets.run("1x64-1x16x16", budgets.Settings(**stated), HOW))


# `pruned_accuracy` times by `pruned`; `paths` and `stream` follow. The others time an order that is found, or a solver.
EXPERIMENTS = {
    **{"attention": attention, "networks": network, "ragged": packed, "pruned": pruned, "slices": lists},
    **{"recall": recalls, "video": passes, "heatmap": cells, "worth": grid, "gains": ways},
    **{"neighborhood": windows, "budgets": budgeted},
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_call_that_is_another_where_it_is_timed_has_no_time(name, faulty):
    rows = list(EXPERIMENTS[name]())
    assert faulty and all(isinstance(call, timing.Checked) for call in faulty.values())
    assert not [row for row in rows if row.get("p50_us") or row.get("plan_p50_us")]
    failed = [row["reason"] for row in rows if row["status"] == "failed"]
    assert failed and all("when it was timed: " in reason for reason in failed)


def test_every_experiment_that_times_calls_is_among_them():
    untimed, on_host, on_device = experiments.by_place()
    assert {*on_device, *on_host} - {"paths", "stream", "pruned_accuracy", "orders", "configure"} <= {*EXPERIMENTS}
    assert {"attention"} == {*experiments.NAMES} - {*untimed, *on_host, *on_device}


# Paths and streams, whose calls are also timed one by one


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a network with random weights, and a table of two of its paths."""
    folder, classes = tmp_path_factory.mktemp("stream"), len(scenes.create("stream").classes)
    family, options = networks.parse("segformer-b0-64")
    made = networks.create(family, seed=0, num_classes=classes, **options)
    safetensors.torch.save_file(made.state_dict(), folder / "b0.safetensors")
    stated = {"network": "segformer-b0-64", "checkpoint": str(folder / "b0.safetensors")}
    facts = {"network": "segformer-b0-64", "checkpoint": provenance.sha256_file(stated["checkpoint"])[:12], "batch": 1}
    facts |= {"rung": "trained", "device": devices.describe("cpu")["name"], "dtype": "float32", "macs": 1}
    entries = [
        look_up.Entry(path=path, p50_us=us, promise_us=us, choice=score, **facts)
        for path, us, score in (("11.11.11.11 scale=0.5", 1e3, 0.4), ("11.11.11.11", 2e3, 0.5))
    ]
    look_up.write(folder / "table.csv", entries)
    return stated, str(folder / "table.csv")


def planned(weights):
    stated = {
        **{"network": weights[0], "data": "scenes", "bases": [""], "alone": ["scale=0.5"], "rungs": ["trained"]},
        **{"fit": 2, "choice": 2, "test": 2, "novel": 0, "drawn": 4, "timed": 2, "every": False, "budgets": 2},
        **{"solver": "highs", "rounds": 1, "proposals": 2, "samples": 3, "batch": 1, "compiled": False},
        "max_seconds": 0.001,
    }
    return list(experiments.runner("paths").run("mine", experiments.parse("paths", stated), HOW))


def streamed(weights, **changes):
    stated = {
        **{"network": weights[0], "table": weights[1], "traces": ["uniform"], "frames": 4, "shown": 2},
        **{"contenders": ["closed", "static", "oracle"], "static": {"b0": weights[0]}, "rung": "trained"},
        **{"margin": 0.0, "late": 0.005, "least": 0.0, "samples": 3, "scenes": 2, "shots": 2, "switches": 2},
    }
    return list(experiments.runner("stream").run("mine", experiments.parse("stream", stated | changes), HOW))


SMALLER = "11.11.11.11 scale=0.5"


def smaller(right):
    """One path, a quarter of the pixels, for all."""

    def called(self, text, images):
        return self.network(images, self.network.path(SMALLER))

    return called


def zeros(right):
    return lambda self, text, images: torch.zeros(1)


def one_place(right):
    """Maps are read from where another graph has written once."""
    kept = {}
    return lambda self, text, images: kept.setdefault(text, right(self, text, images))


WRONG = {"zeros": zeros, "smaller": smaller, "elsewhere": one_place}
RUNS = {"paths": planned, "stream": streamed}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("name", RUNS)
def test_a_path_that_gives_other_maps_has_no_time(name, fault, weights, monkeypatch):
    monkeypatch.setattr(calls.Calls, "_called", WRONG[fault](calls.Calls._called))
    rows = RUNS[name](weights)
    assert rows and {row["status"] for row in rows} == {"failed"} and all("maps" in row["reason"] for row in rows)
    assert not [row for row in rows if {"p50_us", "promise_us", "measured_us", "miou", "missed"} & row.keys()]


def test_without_a_fault_paths_and_frames_have_times(weights):
    for name, run in RUNS.items():
        rows = run(weights)
        assert {row.get("status", "ok") for row in rows} == {"ok"}, name
        assert [row for row in rows if row.get("p50_us")]


def test_a_stream_that_goes_wrong_in_the_middle_has_no_row(weights, monkeypatch):
    """The network, and what is rehearsed, are right; frames are not."""
    right, running = runner.Picker.run, []
    streaming = experiments.member("stream")
    from tilewright_study.experiments.stream import traces

    run = traces.run

    def wrong(picker, entry, images):
        maps = right(picker, entry, images)
        return maps.flip(-1) if running else maps

    def streams(*arguments, **options):
        running.append(1)
        return run(*arguments, **options)

    monkeypatch.setattr(runner.Picker, "run", wrong)
    monkeypatch.setattr(traces, "run", streams)
    rows = streamed(weights)
    assert streaming and {row["status"] for row in rows} == {"failed"}
    running.clear()
    frames = [row for row in streamed(weights, contenders=["oracle"]) if row["part"] == "frames"]
    assert all("status" not in row for row in frames)


def test_a_stream_that_goes_wrong_between_two_frames_has_no_row(weights, monkeypatch):
    """The second frame alone gives other maps."""
    right = _stream.Contenders.contender

    def contender(self, name, trace):
        asked = right(self, name, trace)

        def other(frame, *given):
            entry, call = asked(frame, *given)
            return entry, (lambda: call().flip(-1)) if frame == 1 else call

        return other

    monkeypatch.setattr(_stream.Contenders, "contender", contender)
    rows = streamed(weights, contenders=["closed", "oracle"])
    assert {row["status"] for row in rows} == {"failed"} and "maps" in rows[0]["reason"]


def test_a_stream_whose_frames_run_something_else_has_no_row(weights, monkeypatch):
    right = _stream.Contenders.contender

    def contender(self, name, trace):
        asked = right(self, name, trace)
        return lambda *given: (asked(*given)[0], lambda: torch.zeros(1))

    monkeypatch.setattr(_stream.Contenders, "contender", contender)
    rows = streamed(weights, contenders=["closed", "oracle"])
    assert {row["status"] for row in rows} == {"failed"} and "expected maps of" in rows[0]["reason"]


def test_paths_that_go_wrong_where_they_are_sampled_have_no_row(weights, monkeypatch):
    right = calls.Calls.__call__
    monkeypatch.setattr(calls.Calls, "__call__", lambda self, text, images: right(self, text, images) * 2)
    rows = planned(weights)
    assert rows and {row["status"] for row in rows} == {"failed"}


# Graphs: what a replay has written is read back.


class Graph:
    """Stands for a CUDA graph of a call: what a replay does to the result that the capture returned."""

    def __init__(self, call, write):
        self.call, self.write = call, write
        call()

    def replay(self):
        self.write(self.call.result)


RIGHT = torch.arange(4.0)


@pytest.mark.parametrize(
    ("write", "wrong"),
    [
        (lambda result: result.copy_(RIGHT), False),
        (lambda result: None, True),
        (lambda result: result.clone().copy_(RIGHT), True),
        (lambda result: result[1:].copy_(RIGHT[1:]), True),
        (lambda result: result.copy_(RIGHT.flip(0)), True),
    ],
    ids=["right", "nothing", "elsewhere", "a-part", "other-values"],
)
def test_what_a_replay_writes_is_read_back(write, wrong, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_gpu_us", lambda run: run() or 400.0)
    monkeypatch.setattr(timing, "_captured", lambda call, calls: Graph(call, write))
    call = timing.Checked(RIGHT.clone, lambda found: "" if torch.equal(found, RIGHT) else "other numbers")
    found = timing.time_gpu(call, min_reps=3, max_seconds=0.001, rse_target=1.0)
    assert found.method == "graph" and (call.wrong == "other numbers") == wrong


def test_a_graph_that_stops_writing_is_read_back_in_the_end(monkeypatch):
    turns = itertools.count()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_gpu_us", lambda run: run() or 400.0)
    write = SimpleNamespace(run=lambda result: result.copy_(RIGHT) if next(turns) < 4 else None)
    monkeypatch.setattr(timing, "_captured", lambda call, calls: Graph(call, write.run))
    call = timing.Checked(RIGHT.clone, lambda found: "" if torch.equal(found, RIGHT) else "other numbers")
    timing.time_gpu(call, min_reps=3, max_seconds=0.001, rse_target=1.0)
    assert call.wrong == "other numbers"

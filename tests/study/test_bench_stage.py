"""What stages T3 and T5 make of their command lines, beyond what test_bench.py runs."""

import contextlib

import pandas as pd
import pytest

from tilewright import graph, models
from tilewright.core.errors import ConfigError
from tilewright.study import bench
from tilewright.study.bench import stage, sweeps
from tilewright.study.stages import reorder

QUICK = {"rse": 1.0, "min_repetitions": 3, "max_seconds": 0.01}
BASELINES = {"heads": None, "head_dim": None, "dtype": "bfloat16", "batch": 1, "seed": 0, "max_dense_tokens": 1000}
MODES = dict.fromkeys(stage.MODES)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The files of a graph in its own order and in that of its windows."""
    folder, natural = tmp_path_factory.mktemp("graphs"), models.build("vil-tiny-64-s1")
    graph.save(folder / "natural.npz", natural)
    reorder.run("window", folder / "natural.npz", folder / "window.npz", [])
    return [folder / "natural.npz", folder / "window.npz"]


def test_baselines_are_run_in_every_order_but_dense_ones_in_the_first(graphs, tmp_path, monkeypatch):
    asked, run = [], bench.run_baselines

    def dense_ones(names, *arguments, **options):
        asked.append(list(names))
        return run([name for name in names if name != "flex"], *arguments, **options)

    monkeypatch.setattr(bench, "run_baselines", dense_ones)
    names = ["sdpa_dense", "sdpa_mask", "flex"]
    stage.run([tmp_path / "out.csv"], "cpu", **QUICK, **MODES | {"baselines": names}, graph=graphs, **BASELINES)
    assert asked == [names, ["flex"]]
    frame = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    found = [("sdpa_dense", "none", True), ("sdpa_mask", "none", True)]
    assert list(zip(frame["provider"], frame["reorder"], frame["ordered"], strict=True)) == found
    assert set(frame["status"]) == {"ok"} and set(frame["dtype"]) == {"bfloat16"}


def test_a_schedule_has_one_graph():
    assert stage._one(None) is None and stage._one(["a.npz"]) == "a.npz"
    with pytest.raises(ConfigError, match="--graph: expected one graph with --schedule, found 2"):
        stage._one(["a.npz", "b.npz"])


def test_the_heat_map_is_told_the_device_and_the_type(monkeypatch, tmp_path):
    told = {}
    monkeypatch.setattr(sweeps, "run_heatmap", lambda *sizes, **options: told.update(options) or [])
    monkeypatch.setattr(stage.turns, "turn", contextlib.nullcontext)
    facts = {"orders": ["window"], "tiles": ["64x1"], "solver": "greedy", "split_keys": 512, "patches": [16]}
    chosen = {**MODES, "heatmap": 64}
    stage.run([tmp_path / "out.csv"], "cuda", **QUICK, **chosen, **facts, **BASELINES)
    assert (told["device"], told["dtype"], told["split_keys"]) == ("cuda", "bfloat16", 512)

"""What the commands of T5 make of their arguments, beyond what test_attention.py runs."""

import pandas as pd
import pytest

from tilewright import graph, models
from tilewright.study.experiments import _attention
from tilewright.study.stages import baselines, reorder

QUICK = {"rse": 1.0, "min_repetitions": 3, "max_seconds": 0.01, "max_dense_tokens": 1000}
SIZES = {"heads": None, "head_dim": None, "dtype": "bfloat16", "batch": 1, "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The files of a graph in its own order and in that of its windows."""
    folder, natural = tmp_path_factory.mktemp("graphs"), models.build("vil-tiny-64-s1")
    graph.save(folder / "natural.npz", natural)
    reorder.run("window", folder / "natural.npz", folder / "window.npz", [])
    return [folder / "natural.npz", folder / "window.npz"]


def test_baselines_are_run_in_every_order_but_dense_ones_in_the_first(graphs, tmp_path, monkeypatch):
    asked, run = [], _attention.run_baselines

    def dense_ones(names, *arguments, **options):
        asked.append(list(names))
        return run([name for name in names if name != "flex"], *arguments, **options)

    monkeypatch.setattr(_attention, "run_baselines", dense_ones)
    names = ["sdpa_dense", "sdpa_mask", "flex"]
    baselines.run(names, graphs, tmp_path / "out.csv", **SIZES, **QUICK)
    assert asked == [names, ["flex"]]
    frame = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    found = [("sdpa_dense", "none", True), ("sdpa_mask", "none", True)]
    assert list(zip(frame["provider"], frame["reorder"], frame["ordered"], strict=True)) == found
    assert set(frame["status"]) == {"ok"} and set(frame["dtype"]) == {"bfloat16"}

"""What the commands of T5 make of their arguments, beyond what test_attention.py runs."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from tilewright import graph, masks
from tilewright.core.errors import UnknownNameError
from tilewright.torch_attention import Ready
from tilewright_study.baselines import sparse
from tilewright_study.baselines.sparse import flex
from tilewright_study.experiments.attention import run as _attention
from tilewright_study.stages import baselines, reorder

QUICK = {"rse": 1.0, "min_repetitions": 3, "max_seconds": 0.01, "max_dense_tokens": 1000}
SIZES = {"heads": None, "head_dim": None, "dtype": "bfloat16", "batch": 1, "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The files of a graph in its own order and in that of its windows."""
    folder, natural = tmp_path_factory.mktemp("graphs"), masks.build("vil-tiny-64-s1")
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


def test_first_calls_are_made_of_what_compiles_alone(graphs, tmp_path, monkeypatch):
    made = []

    def prepared(graph, *, variant, **setting):
        if variant == "64":
            raise sparse.Unavailable("no such form")
        return Ready(lambda q, k, v: made.append((graph.meta.get("reorder", {}).get("order"), variant)), 0, 0)

    monkeypatch.setattr(flex, "prepare", prepared)
    monkeypatch.setattr(flex, "VARIANTS", ("128", "64", "32"))
    names = ["sdpa_dense", "flex"]
    baselines.run(names, graphs, tmp_path / "compiled.txt", **SIZES, **QUICK, compile_only=True)
    assert made == [(order, variant) for order in (None, "window") for variant in ("128", "32")]
    assert (tmp_path / "compiled.txt").read_text() == "flex 128\nflex 32\n" * 2
    # Of the forms that are asked for alone.
    asked = {"compile_only": True, "forms": [("flex", "32")]}
    baselines.run(names, graphs, tmp_path / "compiled.txt", **SIZES, **QUICK, **asked)
    assert (tmp_path / "compiled.txt").read_text() == "flex 32\n" * 2
    with pytest.raises(UnknownNameError, match="unknown form of flex '31'; known: 128, 64, 32"):
        asked["forms"] = [("flex", "31")]
        baselines.run(names, graphs, tmp_path / "compiled.txt", **SIZES, **QUICK, **asked)


# Prints how often torch looked for what it compiled, and found it, in a run with the arguments of this process.
COUNTED = """
import json, sys
from torch._dynamo.utils import counters
from tilewright_study.baselines.sparse import flex
from tilewright_study.stages import baselines
flex.VARIANTS = ("32",)
baselines.run(**json.loads(sys.argv[1]))
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_later_process_finds_what_was_compiled_ahead(graphs, tmp_path):
    def counted(output, **more):
        options = {"baselines": ["flex"], "graph": [str(graphs[0])], "output": str(tmp_path / output), **SIZES, **QUICK}
        given = json.dumps(options | {"dtype": "float32"} | more)
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, given], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()[-1]

    assert counted("compiled.txt", compile_only=True) == "1 0"
    assert counted("rows.csv") == "0 1"
    assert set(pd.read_csv(tmp_path / "rows.csv")["status"]) == {"ok"}

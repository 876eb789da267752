"""A device is a word and a folder for each operator: a copy of the package with both runs the commands on it."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import plans
from tilewright import graph
from tilewright.attention import blocks

ROOT = Path(__file__).parents[2]
OTHERS = ROOT / "tests" / "helpers" / "devices_of_others"
NAMES = 'NAMES = ("cpu", "cuda")'
TILES = ["16x1", "16x16"]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """``callable(script, *arguments) -> text on stdout``: a command of the copy, which must succeed."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "workflow" / "scripts", folder / "scripts")
    package = folder / "src" / "tilewright"
    shutil.copytree(OTHERS, package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    registry = package / "devices" / "__init__.py"
    text = registry.read_text()
    assert text.count(NAMES) == 1
    registry.write_text(text.replace(NAMES, 'NAMES = ("cpu", "cuda", "abacus")'))

    def run(script, *arguments):
        line = [sys.executable, folder / "scripts" / script, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_commands_profile_schedule_and_time_on_a_new_device(command, tmp_path):
    ordered = plans.reordered(plans.pattern(75, 63, n_global=2, empty=3), heads=2, head_dim=16)
    graph.save(tmp_path / "graph.npz", ordered)
    made, profiles = [tmp_path / f"{name}.npz" for name in TILES], [tmp_path / f"{name}.json" for name in TILES]
    for path, cover in zip(made, plans.covers(ordered, TILES).values(), strict=True):
        blocks.save(path, cover)
    on = "--device", "abacus"
    command("run_bench.py", "--profile_only", "--blocks", *made, *on, "--split-keys", 32, "--output", *profiles)
    device = json.loads(profiles[0].read_text())["device"]
    assert device["kind"] == "abacus" and device["name"] == "wooden abacus"
    chosen = tmp_path / "set.greedy.json"
    command("solve_ilp.py", "--blocks", *made, "--profile", *profiles, "--solver", "greedy", "--output", chosen)
    inputs = "--schedule", chosen, "--graph", tmp_path / "graph.npz", "--blocks", *made
    effort = "--max-seconds", 0.1, "--rse", 1, "--min-repetitions", 3
    command("run_bench.py", *inputs, *on, *effort, "--output", tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]
    assert {row["device"] for row in rows} == {"wooden abacus"}
    assert all(float(row["p50_us"]) > 0 and float(row["max_abs_error"]) < 1e-5 for row in rows)

"""A study goes on without Gurobi: its schedules say why they were skipped, and so does all that is made of them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gurobipy
import numpy as np
import pandas as pd
import pytest

import tilewright
from helpers import plans
from helpers.factories import make_profile
from tilewright import devices, graph
from tilewright.attention import blocks, profile, schedule
from tilewright.core.errors import ArtifactError, SolverError, SolverUnavailableError
from tilewright_study import schedules
from tilewright_study.experiments.attention import table_solvers
from tilewright_study.report import explorer
from tilewright_study.stages import bench
from tilewright_study.stages import schedule as stage

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/solve_ilp.py"
META = {"model": "toy", "family": "toys", "resolution": 8, "heads": 2, "head_dim": 8}
TILES = ("16x1", "8x8")
EXPIRED = "License expired 2027-11-29"
# Stands for the package, in a folder that comes first on the path of a process.
FAKE = """
class GRB:
    class Error:
        NO_LICENSE = 10009

class GurobiError(Exception):
    errno = 10009

def Env(*_, **__):
    raise GurobiError("License expired 2027-11-29")
"""


def expired(*_, **__):
    raise gurobipy.GurobiError(10009, EXPIRED)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The files of a toy in the working folder, all but schedules."""
    monkeypatch.chdir(tmp_path)
    ordered = plans.reordered(plans.pattern(140, 90), **META)
    graph.save("results/graphs/toy/ic.npz", ordered)
    device = devices.describe("cpu")
    for name, cover in plans.covers(ordered, TILES).items():
        blocks.save(f"results/blocks/toy/ic/{name}.npz", cover)
        timed = replace(make_profile(cover, device=device), graph_id=ordered.id)
        profile.save(f"results/profiling/toy/ic/{name}.json", timed)
    return tmp_path


def files(kind, suffix):
    return [f"results/{kind}/toy/ic/{name}.{suffix}" for name in TILES]


def solve(solver):
    """The schedule's path, as the workflow has it made."""
    output = f"results/schedules/toy/ic/mixed.{solver}.json"
    numbers = {"time_limit": 10.0, "gap": 1e-4, "seed": 0, "threads": 1, "rounds": 1, "max_tile_kinds": 4}
    inputs = {"blocks": files("blocks", "npz"), "profile": files("profiling", "json")}
    stage.run(**inputs, **numbers, solver=[solver], tiles=None, objective="sum", output=[output])
    return output


@pytest.fixture
def skipped(study, monkeypatch):
    """Paths of a schedule by greedy, and of Gurobi's without a licence."""
    monkeypatch.setattr(gurobipy, "Env", expired)
    return solve("greedy"), solve("gurobi")


def test_the_file_says_who_was_skipped_and_why(skipped, capsys):
    made, missing = schedules.read(skipped[0]), schedules.read(skipped[1])
    assert isinstance(missing, schedules.Skipped) and EXPIRED in missing.reason
    for name in ("graph_id", "tiles", "blocks_ids", "blocks_paths", "profile_paths", "device_id", "objective"):
        assert getattr(missing, name) == getattr(made, name)
    assert schedules.summary(missing) == {
        "solver": "gurobi",
        "status": "skipped",
        "objective": "sum",
        "reason": missing.reason,
    }


def test_a_skipped_schedule_is_no_schedule(skipped):
    with pytest.raises(ArtifactError, match=r"gurobi\.json: expected a complete schedule"):
        schedule.load(skipped[1])


@pytest.mark.parametrize("number", [10009, 10010])
def test_a_licence_that_is_missing_or_too_small_is_skipped(study, monkeypatch, number):
    def refuse(*_, **__):
        raise gurobipy.GurobiError(number, "refused")

    monkeypatch.setattr(gurobipy, "Env", refuse)
    assert schedules.read(solve("gurobi")).status == "skipped"


def test_a_package_that_is_missing_or_broken_is_skipped(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    assert "needs the package gurobipy, which is not installed" in schedules.read(solve("gurobi")).reason
    monkeypatch.setattr("tilewright.milp.gurobi.available", lambda: True)
    assert "gurobipy cannot be imported" in schedules.read(solve("gurobi")).reason


def test_a_plan_is_refused_without_the_solver_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(gurobipy, "Env", expired)
    with pytest.raises(SolverUnavailableError, match=f"no valid licence .*{EXPIRED}.*: use --solver highs"):
        tilewright.plan(np.ones((64, 64), bool), heads=1, head_dim=16, solver="gurobi")


@pytest.mark.parametrize("number", [10001, 10022])
def test_any_other_error_of_gurobi_fails_and_writes_nothing(study, monkeypatch, number):
    def refuse(*_, **__):
        raise gurobipy.GurobiError(number, "refused")

    monkeypatch.setattr(gurobipy, "Env", refuse)
    with pytest.raises(SolverError, match=f"gurobi failed with error {number}: refused") as caught:
        solve("gurobi")
    assert not isinstance(caught.value, SolverUnavailableError) and not Path("results/schedules").exists()


def test_highs_is_never_skipped(study, monkeypatch):
    monkeypatch.setattr("tilewright.milp.highs.available", lambda: False)
    with pytest.raises(SolverError, match="'highs' needs the package highspy"):
        solve("highs")
    assert not Path("results/schedules").exists()


def test_the_command_ends_well_and_says_why(study):
    (study / "fake/gurobipy").mkdir(parents=True)
    (study / "fake/gurobipy/__init__.py").write_text(FAKE)
    path = os.pathsep.join(filter(None, [str(study / "fake"), os.environ.get("PYTHONPATH")]))
    inputs = ["--blocks", *files("blocks", "npz"), "--profile", *files("profiling", "json")]
    words = [sys.executable, SCRIPT, *inputs, "--solver", "gurobi", "--output", "out.json"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0 and "status: skipped" in done.stderr and EXPIRED in done.stderr
    assert schedules.read("out.json").status == "skipped"


def test_its_rows_have_a_reason_and_no_time(skipped):
    inputs = {"blocks": files("blocks", "npz"), "profile": files("profiling", "json")}
    inputs["graph"] = "results/graphs/toy/ic.npz"
    numbers = {"heads": None, "head_dim": None, "dtype": None, "batch": 1, "seed": 0}
    effort = {"rse": 1.0, "min_repetitions": 3, "max_seconds": 0.01}
    outputs = ["greedy.csv", "gurobi.csv"]
    bench.run(skipped, outputs, **inputs, **numbers, **effort, device="cpu")
    timed, rows = map(pd.read_csv, outputs)
    assert set(timed["status"]) == {"ok"} and (timed["p50_us"] > 0).all()
    assert rows["ordered"].tolist() == [True, False] and set(rows["tiles"]) == {"mixed"}
    assert set(rows["status"]) == {"skipped"} and set(rows["solver"]) == {"gurobi"}
    assert rows["reason"].str.contains(EXPIRED).all()
    assert rows[["p50_us", "predicted_us", "objective_us", "gap", "max_abs_error"]].isna().all(axis=None)


def test_the_table_of_solvers_shows_a_reason_and_no_numbers(skipped):
    frame = table_solvers.table([Path(path) for path in skipped]).set_index("solver")
    numbers = ["predicted_us", "objective_us", "bound_us", "gap", "variables", "solve_s", "gain"]
    assert frame.loc["gurobi", "status"] == "skipped" and EXPIRED in frame.loc["gurobi", "reason"]
    assert frame.loc["gurobi", numbers].isna().all()
    assert frame.loc["greedy", "reason"] == "" and frame.loc["greedy", "gain"] == 0
    alone = table_solvers.table([Path(skipped[1])])
    assert alone["status"].tolist() == ["skipped"] and alone[numbers].isna().all(axis=None)


def test_the_tile_explorer_leaves_it_out_with_the_reason(skipped):
    inputs = ["results/graphs/toy/ic.npz", *files("blocks", "npz"), *files("profiling", "json"), *skipped]
    scene = explorer.scene([Path(path) for path in inputs])
    assert [plan["name"] for plan in scene["plans"]] == ["mixed tiles, greedy"]
    (line,) = scene["omitted"]
    assert "mixed.gurobi.json: gurobi was skipped" in line and EXPIRED in line

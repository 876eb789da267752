"""Stage T4 on files, and its command line."""

import json
from pathlib import Path

import pytest

from helpers.factories import random_inputs
from helpers.files import run_script
from helpers.terminal import Terminal, clock_of
from tilewright import devices
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention import schedule
from tilewright.core.errors import ArtifactError, ConfigError, UnknownNameError
from tilewright_study.measure import schedule_check
from tilewright_study.schedules import summary
from tilewright_study.stages import schedule as schedule_stage

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/solve_ilp.py"
TILES = ("4x1", "4x8")


@pytest.fixture
def files(tmp_path):
    device = devices.describe("cpu")
    covers, profiles = random_inputs(0, 5, TILES, device=device)
    for name in TILES:
        blocks_file.save(tmp_path / f"{name}.npz", covers[name])
        profile_file.save(tmp_path / f"{name}.json", profiles[name])
    return tmp_path, covers, profiles, devices.limits(device)


def arguments(folder, **changes):
    values = {
        "blocks": [folder / f"{name}.npz" for name in TILES],
        "profile": [folder / f"{name}.json" for name in TILES],
        "solver": ["highs"],
        "tiles": None,
        "objective": "sum",
        "time_limit": 10.0,
        "gap": 1e-4,
        "seed": 0,
        "threads": 1,
        "rounds": 1,
        "max_tile_kinds": 4,
        "output": [folder / "out.json"],
    }
    return {**values, **changes}


def test_the_stage_writes_a_right_schedule(files):
    folder, covers, profiles, limits = files
    schedule_stage.run(**arguments(folder))
    found = schedule.load(folder / "out.json")
    schedule.verify_inputs(found, covers, profiles)
    assert schedule_check.violations(found, covers, profiles, limits) == []
    assert found.blocks_paths == tuple(str(folder / f"{name}.npz") for name in TILES)
    assert found.profile_paths == tuple(str(folder / f"{name}.json") for name in TILES)


def test_schedules_of_several_solvers_and_tiles_are_those_of_each_alone(files):
    folder, *_ = files
    asked = {"a.json": ("greedy", "4x1"), "b.json": ("descent", "4x1+4x8"), "c.json": ("greedy", "4x8")}
    solvers, tiles = zip(*asked.values(), strict=True)
    output = [folder / name for name in asked]
    schedule_stage.run(**arguments(folder, solver=solvers, tiles=tiles, output=output))
    for path, solver, names in zip(output, solvers, tiles, strict=True):
        alone = {name: [folder / f"{tile}.{kind}" for tile in names.split("+")]
                 for name, kind in (("blocks", "npz"), ("profile", "json"))}  # fmt: skip
        schedule_stage.run(**arguments(folder, solver=[solver], **alone))
        found, expected = (schedule.load(each) for each in (path, folder / "out.json"))
        assert summary(found) | {"seconds": 0} == summary(expected) | {"seconds": 0}
        assert found.blocks_paths == expected.blocks_paths and found.solver == solver
        stated = [json.loads(each.read_text())["made_by"] for each in (path, folder / "out.json")]
        assert stated[0]["inputs"] == stated[1]["inputs"]


def test_a_file_says_which_objective_the_solver_had(files):
    folder, *_ = files
    schedule_stage.run(**arguments(folder, solver=["highs-paper"]))
    assert schedule.load(folder / "out.json").objective == "paper"
    stated = json.loads((folder / "out.json").read_text())["made_by"]["parameters"]
    assert (stated["solver"], stated["objective"]) == ("highs-paper", "paper")


BAD = {
    "time-limit": ({"time_limit": -1.0}, ConfigError, "time limit: expected at least 0, found -1.0"),
    "gap-nan": ({"gap": float("nan")}, ConfigError, "gap: expected at least 0, found nan"),
    "rounds": ({"rounds": 0}, ConfigError, "rounds: expected at least 1, found 0"),
    "kinds": ({"max_tile_kinds": 0}, ConfigError, "max tile kinds: expected at least 1, found 0"),
    "outputs": (
        {"solver": ["greedy"] * 2},
        ConfigError,
        "expected an output, and tiles, for each solver, found 1 outputs",
    ),
    "tiles": ({"tiles": ["4x1+16x1"]}, UnknownNameError, "unknown tile '16x1'; known: 4x1, 4x8"),
    "profiles": ({"profile": []}, ArtifactError, "one profile for each blocks file, found 0 for 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_write_nothing(case, files):
    changes, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        schedule_stage.run(**arguments(files[0], **changes))
    assert not (files[0] / "out.json").exists()


def test_the_same_tile_twice(files):
    folder = files[0]
    twice = {"blocks": [folder / "4x1.npz"] * 2, "profile": [folder / "4x1.json", folder / "4x8.json"]}
    (folder / "again.npz").write_bytes((folder / "4x1.npz").read_bytes())
    twice["blocks"][1] = folder / "again.npz"
    with pytest.raises(ArtifactError, match=r"blocks files of different tiles, found \['4x1', '4x1'\]"):
        schedule_stage.run(**arguments(folder, **twice))


def test_the_digest_covers_the_solver_that_ran(files, monkeypatch):
    seen = []
    monkeypatch.setattr(schedule_stage.provenance, "code_digest", lambda *modules: seen.append(modules) or "digest")
    solvers = ["greedy", "descent", "gurobi"]
    schedule_stage.run(**arguments(files[0], solver=solvers, output=[files[0] / f"{name}.json" for name in solvers]))
    assert seen == [("tilewright_study.stages.schedule",)] * 2 + [
        ("tilewright_study.stages.schedule", "tilewright.milp.gurobi")
    ]


def command(*words):
    return run_script(SCRIPT, *words)


def test_the_command_line(files):
    folder, *_ = files
    inputs = ["--blocks", folder / "4x1.npz", folder / "4x8.npz", "--profile", folder / "4x1.json", folder / "4x8.json"]
    done = command(*inputs, "--output", folder / "out.json")
    assert done.returncode == 0, done.stderr
    assert schedule.load(folder / "out.json").solver == "highs"
    wrong = command(*inputs, "--solver", "cplex", "--output", folder / "no.json")
    assert wrong.returncode == 2 and "unknown solver 'cplex'; known: greedy, descent, highs, gurobi" in wrong.stderr
    assert "Traceback" not in wrong.stderr and not (folder / "no.json").exists()


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, schedule_stage)


def test_the_lines_of_a_solver_reach_a_log_with_its_limit(capsys):
    with schedule_stage.within("highs", 60) as show:
        show("Gap 3.1%")
    assert capsys.readouterr().err.splitlines() == ["highs: at most 60 s", "Gap 3.1%"]


def test_a_terminal_sees_how_much_of_the_limit_went_by(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with schedule_stage.within("highs", 60) as show:
        for clock[0] in (24, 99):
            show("Gap 3.1%")
    assert terminal.getvalue().count("Gap 3.1%\n") == 2
    assert "60 of at most 60 s" in terminal.getvalue()

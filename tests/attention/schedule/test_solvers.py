"""The solvers behind their contract: sizes, licences, statuses, limits; and realistic sizes in the time they
may take."""

import sys
from importlib import import_module

import numpy as np
import pytest

from helpers.factories import make_blocks, make_limits, make_profile, random_inputs
from helpers.solvers import need
from tilewright import milp
from tilewright.attention.blocks.tiles import parse
from tilewright.attention.schedule import _program, descent, search
from tilewright.attention.schedule import problem as problems
from tilewright.attention.schedule.search import solve
from tilewright.core.errors import SolverError
from tilewright_study.measure import schedule_check

OPTIONS = {"time_limit_s": 20.0, "gap": 1e-4, "seed": 0, "threads": 1}


def member(name):
    return import_module(f"tilewright.milp.{name}")


def toy():
    blocks, profiles = random_inputs(0, 3)
    problem = problems.build(blocks, profiles, make_limits())
    return _program.build(problem, "sum")[0]


def irregular(seed, n_regions):
    """Blocks of 128-row regions whose keys differ from row to row, as an order that found no structure leaves
    them."""
    rng = np.random.default_rng(seed)
    keys, scatter = rng.lognormal(np.log(300), 0.5, (n_regions, 1)), rng.uniform(0.02, 1, (n_regions, 1))
    blocks, profiles = {}, {}
    for name in ("16x1", "64x1", "64x64", "128x128"):
        tile = parse(name)
        n = 128 // tile.rows
        union = keys * (tile.rows / 128) ** (scatter / 2) * rng.uniform(0.85, 1.15, (n_regions, n))
        waste = 1 if tile.gathered else 1 + 2 * scatter
        runs = np.ceil(np.clip(union * waste, 16, 2000) / tile.run).astype(int)
        blocks[name] = make_blocks(name, runs.tolist())
        rate = (2000 if tile.gathered else 3500) * (min(tile.rows, 64) / 64) ** 0.3
        profiles[name] = make_profile(
            blocks[name], latency=lambda r, u, m, t=tile, f=rate: 1.5 + r * u * t.run / f, launch_us=15.0
        )
    return blocks, profiles


def test_realistic_sizes_are_proven_within_one_percent():
    blocks, profiles = irregular(1, 600)
    limits = make_limits(max_tile_kinds=4)
    found = solve(blocks, profiles, limits, time_limit_s=60)
    assert found.gap <= 0.01 and found.solve_s <= 60 and found.model_size["variables"] > 1000
    assert found.predicted_us < solve(blocks, profiles, limits, "greedy").predicted_us
    assert schedule_check.violations(found, blocks, profiles, limits) == []


@pytest.mark.parametrize("name", milp.NAMES)
def test_the_published_programs_are_those_of_the_published_objective(name):
    need(name)
    blocks, profiles = random_inputs(0, 3)
    limits = make_limits(rounds=2)
    found = solve(blocks, profiles, limits, f"{name}-paper")
    other = solve(blocks, profiles, limits, name, "paper")
    assert (found.solver, found.objective) == (f"{name}-paper", "paper")
    assert found.objective_us == other.objective_us and other.solver == name
    assert search.entered(found.solver) == search.entered(name) == [f"tilewright.milp.{name}"]
    assert search.entered("greedy") == []


def test_more_classes_than_the_linkage_takes_are_bucketed(monkeypatch):
    blocks, profiles = irregular(2, 200)
    free = solve(blocks, profiles, make_limits(), "descent")
    monkeypatch.setattr(descent, "LINKAGE_LIMIT", 40)
    found = solve(blocks, profiles, make_limits(), "descent")
    assert found.predicted_us == pytest.approx(free.predicted_us, rel=1e-3)
    assert schedule_check.violations(found, blocks, profiles, make_limits()) == []


def test_gurobi_names_the_size_and_the_limit():
    need("gurobi")
    blocks, profiles = irregular(3, 900)
    limits = make_limits(rounds=2)
    with pytest.raises(
        SolverError, match=r"the model has [3-9],\d{3} variables .* licence allows 2,000 of each: use --solver highs"
    ):
        solve(blocks, profiles, limits, "gurobi")


def test_gurobi_without_licence(monkeypatch):
    import gurobipy

    def refuse(*_, **__):
        raise gurobipy.GurobiError(member("gurobi").NO_LICENCE, "no licence found")

    monkeypatch.setattr(gurobipy, "Env", refuse)
    with pytest.raises(SolverError, match=r"no valid licence .*no licence found.*: use --solver highs"):
        member("gurobi").solve(toy(), **OPTIONS)


def test_gurobi_error_of_another_kind(monkeypatch):
    import gurobipy

    def refuse(*_, **__):
        raise gurobipy.GurobiError(10001, "out of memory")

    monkeypatch.setattr(gurobipy, "Env", refuse)
    with pytest.raises(SolverError, match="gurobi failed with error 10001: out of memory"):
        member("gurobi").solve(toy(), **OPTIONS)


def test_the_licence_constants_are_gurobis():
    from gurobipy import GRB

    gurobi = member("gurobi")
    assert (GRB.Error.NO_LICENSE, GRB.Error.SIZE_LIMIT_EXCEEDED) == (gurobi.NO_LICENCE, gurobi.TOO_LARGE)


@pytest.mark.parametrize(("name", "package"), [("highs", "highspy"), ("gurobi", "gurobipy")])
def test_a_missing_package_is_named(name, package, monkeypatch):
    assert member(name).available()
    monkeypatch.setattr(member(name), "find_spec", lambda _: None)
    assert not member(name).available()
    with pytest.raises(SolverError, match=f"'{name}' needs the package {package}, which is not installed"):
        member(name).solve(toy(), **OPTIONS)


@pytest.mark.parametrize("name", milp.NAMES)
def test_an_unmapped_status_raises(name, monkeypatch):
    need(name)
    monkeypatch.setattr(member(name), "STATUSES", {})
    with pytest.raises(SolverError, match=rf"(?i){name} ended with status .*optimal"):
        member(name).solve(toy(), **OPTIONS)


@pytest.mark.parametrize("name", ["highs", "gurobi"])
def test_statuses_are_the_solvers_own_names(name):
    if name == "highs":
        from highspy import HighsModelStatus

        known = set(HighsModelStatus.__members__)
    else:
        from gurobipy import GRB

        known = set(dir(GRB.Status))
    assert set(member(name).STATUSES) <= known


@pytest.mark.parametrize("name", milp.NAMES)
def test_no_time_gives_a_start_back_or_no_point(name):
    need(name)
    blocks, profiles = irregular(4, 60)
    problem = problems.build(blocks, profiles, make_limits(rounds=3, max_tile_kinds=1))
    program, _ = _program.build(problem, "paper")
    answer = member(name).solve(program, **{**OPTIONS, "time_limit_s": 0.0})
    assert answer.status in ("unsolved", "feasible") and (answer.x is None) == (answer.status == "unsolved")


@pytest.mark.parametrize("name", milp.NAMES)
def test_progress_goes_to_the_log_and_not_to_stdout(name, capfd):
    need(name)
    lines = []
    member(name).solve(toy(), log=lines.append, **OPTIONS)
    assert any(name in line.lower() or "optim" in line.lower() for line in lines)
    assert capfd.readouterr().out == ""
    member(name).solve(toy(), **OPTIONS)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", milp.NAMES)
def test_members_offer_the_contract(name):
    assert (
        callable(member(name).available) and callable(member(name).solve) and name in sys.modules[milp.__name__].NAMES
    )

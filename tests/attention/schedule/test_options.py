"""Schedules whose regions choose a split length, too: against brute force, and never worse than with one length."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.factories import make_blocks, make_limits, make_profile, random_inputs
from helpers.solvers import need
from tilewright import milp
from tilewright.attention import profile as profile_file
from tilewright.attention import schedule as schedules
from tilewright.attention.blocks import work
from tilewright.attention.schedule import _program, _region_classes, check, problem, search, solve
from tilewright.core.errors import ArtifactError, InfeasibleError, SolverError

TILES = ("4x1", "2x1")
LENGTHS = {"split_keys": 64, "further": (16, None)}
CASES = {
    "one-round": {},
    "two-rounds": {"rounds": 2, "round_us": 0.1},
    "kappa": {"max_tile_kinds": 1, "rounds": 2},
    "fork": {"fork_us": 0.3},
    "working-set": {"per_block": {"working_set_bytes": 300.0}},
    "occupancy": {"occupancy": 9.0, "rounds": 2},
}


def inputs(seed, n_regions=3, tile_us=0.1, **options):
    return random_inputs(seed, n_regions, TILES, most_runs=5, tile_us=tile_us, **LENGTHS | options)


def one_length(profiles, length):
    """The profiles with this split length alone."""
    found = {}
    for name, profile in profiles.items():
        costs = profile.options[length]
        alone = {"split_keys": length, "shapes": costs.shapes, "tile_us": costs.tile_us, "further": ()}
        found[name] = dataclasses.replace(profile, **alone)
    return found


def brute_force(blocks, profiles, limits):
    """Least makespan and least longest round over every assignment, from the definitions alone."""
    lengths = (64, 16, None)
    needs = {}
    for name, length in itertools.product(blocks, lengths):
        cover = blocks[name]
        items = work.items(cover, length)
        for b in range(cover.n_regions):
            shapes = items.shape[cover.region[items.block] == b].tolist()
            needs[b, name, length] = [profiles[name].options[length].shapes[k] for k in shapes]
    fits = {
        place: all(s.resources[what] <= most for s in shapes for what, most in limits.per_block.items())
        for place, shapes in needs.items()
    }
    n = next(iter(blocks.values())).n_regions
    best = {"sum": np.inf, "paper": np.inf}
    places = list(itertools.product(blocks, lengths, range(limits.rounds)))
    for choice in itertools.product(places, repeat=n):
        if not all(fits[b, name, length] for b, (name, length, _) in enumerate(choice)):
            continue
        durations, total = [], 0.0
        for r in range(limits.rounds):
            here = [(b, name, length) for b, (name, length, q) in enumerate(choice) if q == r]
            shapes = [(name, s) for b, name, length in here for s in needs[b, name, length]]
            if len({name for _, name, _ in here}) > limits.max_tile_kinds:
                break
            if sum(s.occupancy for _, s in shapes) > limits.occupancy:
                break
            if here:
                options = {(name, length) for _, name, length in here}
                uneven = max(profiles[name].options[length].tile_us for name, length in options)
                load = sum(s.latency_us for _, s in shapes) / limits.lanes + uneven
                durations.append(max(load, max(s.alone_us for _, s in shapes)))
                forms = {(name, s.rows, s.runs, s.masked, s.split) for name, s in shapes}
                total += durations[-1] + sum(profiles[name].launch_us for name, *_ in forms) + limits.round_us
                total += limits.fork_us * (len({name for name, _ in options}) - 1)
        else:
            best = {"sum": min(best["sum"], total), "paper": min(best["paper"], max(durations))}
    return best


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_optimum_is_that_of_brute_force(case, seed):
    blocks, profiles = inputs(seed)
    limits = make_limits(**CASES[case])
    best = brute_force(blocks, profiles, limits)
    for objective, solver in itertools.product(problem.OBJECTIVES, milp.NAMES):
        need(solver)
        found = solve(blocks, profiles, limits, solver, objective, gap=0.0)
        assert found.objective_us == pytest.approx(best[objective], rel=1e-6)
        assert found.bound_us == pytest.approx(best[objective], rel=1e-6) and found.left <= 1e-6
        assert check.violations(found, blocks, profiles, limits) == []


@pytest.mark.parametrize("seed", range(6))
def test_what_an_option_costs_beside_its_launches_is_paid(seed):
    blocks, profiles = inputs(seed, tile_us=4.0)
    best = brute_force(blocks, profiles, make_limits())["sum"]
    found = solve(blocks, profiles, make_limits(), "highs", gap=0.0)
    assert found.objective_us == pytest.approx(best, rel=1e-6) and found.bound_us == pytest.approx(best, rel=1e-6)


def test_several_lengths_gain_on_each_of_them():
    """A region of one long block gains by a split, one of short blocks by none: parts cost more, unless alone."""
    blocks = {"4x1": make_blocks("4x1", [[48], *([[8]] * 12)], n_cols=65536)}
    cost = {32: 1.0, 48: 200.0, 24: 50.0, 8: 10.0, 4: 9.0}
    profiles = {
        "4x1": make_profile(
            blocks["4x1"], latency=lambda r, u, m: cost.get(u, float(u)), launch_us=0.1, split_keys=None, further=(64,)
        )
    }
    limits = make_limits(lanes=2)
    found = solve(blocks, profiles, limits)
    alone = [solve(blocks, one_length(profiles, length), limits) for length in (None, 64)]
    assert found.predicted_us < 0.95 * min(other.predicted_us for other in alone)
    assert found.lengths == (None, 64) and set(found.length) == {0, 1} and found.summary()["lengths"] == "None 64"
    assert check.violations(found, blocks, profiles, limits) == []
    schedules.verify_work(found, blocks, profiles)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_regions=st.integers(1, 8),
    kappa=st.integers(1, 2),
    rounds=st.integers(1, 2),
    solver=st.sampled_from(["greedy", "descent", "highs"]),
    objective=st.sampled_from(problem.OBJECTIVES),
    budget=st.sampled_from([None, (60, 60)]),
)
def test_it_is_never_worse_than_with_the_first_length(seed, n_regions, kappa, rounds, solver, objective, budget):
    blocks, profiles = inputs(seed, n_regions)
    limits = make_limits(rounds=rounds, max_tile_kinds=kappa, round_us=0.3)
    settings = {"budget": budget} if solver == "highs" and n_regions > 4 else {}
    try:
        found = solve(blocks, profiles, limits, solver, objective, **settings)
    except SolverError as error:
        assert "smallest model" in str(error)
        return
    today = solve(blocks, one_length(profiles, 64), limits, solver, objective)
    assert found.objective_us <= today.objective_us * (1 + (1e-3 if settings else 1e-9))
    assert check.violations(found, blocks, profiles, limits) == []
    schedules.verify_work(found, blocks, profiles)
    if solver != "greedy":
        for length in (16, None):
            other = solve(blocks, one_length(profiles, length), limits, "greedy", objective)
            assert found.objective_us <= other.objective_us * (1 + 1e-9)


def test_equal_shapes_of_two_lengths_are_one_launch(monkeypatch):
    blocks = {"4x1": make_blocks("4x1", [[40], [4], [4]], n_cols=65536)}
    profiles = {"4x1": make_profile(blocks["4x1"], launch_us=5.0, split_keys=None, further=(320,))}
    built = problem.build(blocks, profiles, make_limits())
    assert built.n_options == 2 and len(built.option_of) > built.n_launches
    whole, mixed = np.zeros(3, int), np.array([0, 0, 1])
    rounds = np.zeros(3, int)
    # The short blocks are the same at both lengths, so that it does not matter which one they have.
    assert built.makespan_us(whole, rounds) == pytest.approx(built.makespan_us(mixed, rounds))
    monkeypatch.setitem(search.HEURISTICS, "greedy", lambda *_: (mixed, rounds))
    found = solve(blocks, profiles, make_limits(), "greedy")
    assert sorted(found.length) == [0, 0, 1]
    assert found.predicted_us == pytest.approx(built.makespan_us(mixed, rounds))
    assert check.violations(found, blocks, profiles, make_limits()) == []


def test_the_start_is_a_point_of_the_model():
    blocks, profiles = inputs(2, 5)
    built = problem.build(blocks, profiles, make_limits(rounds=2, round_us=0.2))
    rng = np.random.default_rng(0)
    for objective in problem.OBJECTIVES:
        form, program, columns = _program.fit(built, objective, None)
        for _ in range(20):
            option, rounds = rng.integers(built.n_options, size=5), rng.integers(2, size=5)
            x = _program.encode(built, form, columns, option, rounds)
            activity = program.rows @ x
            assert (activity <= program.row_upper + 1e-9).all() and (activity >= program.row_lower - 1e-9).all()
            assert program.cost @ x == pytest.approx(built.value(option, rounds, objective))
            assert len(set(program.names)) == len(program.cost)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_merged_bound_is_below_the_exact_optimum(seed):
    blocks, profiles = inputs(seed, 14)
    limits = make_limits(rounds=2, max_tile_kinds=1)
    exact = solve(blocks, profiles, limits)
    budget = exact.model_size["variables"] * 3 // 4, exact.model_size["constraints"] * 3 // 4
    merged = solve(blocks, profiles, limits, budget=budget)
    assert merged.form == "merged" and merged.model_size["variables"] <= budget[0]
    assert merged.bound_us <= exact.objective_us * (1 + 1e-6) <= merged.objective_us * (1 + 2e-6)
    assert check.violations(merged, blocks, profiles, limits) == []


def test_many_regions_keep_gurobis_size():
    rng = np.random.default_rng(0)
    runs = rng.integers(2, 60, (400, 2))
    blocks = {
        "64x1": make_blocks("64x1", runs.tolist(), n_cols=65536),
        "128x1": make_blocks("128x1", runs.max(axis=1, keepdims=True).tolist(), n_cols=65536),
    }
    profiles = {name: make_profile(cover, split_keys=512, further=(None, 64)) for name, cover in blocks.items()}
    built = problem.build(blocks, profiles, make_limits(rounds=2))
    classes, program, _ = _program.fit(built, "sum", (2000, 2000))
    assert program.size["variables"] <= 2000 and program.size["constraints"] <= 2000
    assert len(classes.size) <= len(_region_classes.exact(built).size)


def test_bounds_hold_for_every_choice():
    blocks, profiles = inputs(3, 3)
    limits = make_limits(rounds=2, round_us=0.2)
    best = brute_force(blocks, profiles, limits)["sum"]
    bounds = solve(blocks, profiles, limits, "greedy").lower_bounds
    assert bounds["work"] < bounds["launched"] <= best and bounds["longest"] <= best


BROKEN = {
    "unknown": (lambda s: {"length": np.full_like(s.length, 9)}, "names split length 9 of"),
    "other": (lambda s: {"length": (s.length + 1) % 3}, "does not fit shape|names shape"),
    "not-profiled": (lambda s: {"further": (17, None)}, "one that was not profiled"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_length_is_seen(case):
    blocks, profiles = inputs(5, 6)
    choice = np.array([1, 4, 1, 4, 1, 4]), np.zeros(6, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search.HEURISTICS, "greedy", lambda *_: choice)
        found = solve(blocks, profiles, make_limits(), "greedy")
    assert check.violations(found, blocks, profiles, make_limits()) == []
    change, message = BROKEN[case]
    broken = dataclasses.replace(found, **change(found))
    assert any(re.search(message, line) for line in check.violations(broken, blocks, profiles, make_limits()))
    with pytest.raises((ArtifactError, IndexError)):
        schedules.verify_work(broken, blocks, profiles)


def test_a_file_brings_the_lengths_back(tmp_path):
    blocks, profiles = inputs(1, 6)
    found = solve(blocks, profiles, make_limits())
    schedules.save(tmp_path / "s.json", found)
    again = schedules.load(tmp_path / "s.json")
    assert again.lengths == found.lengths == (64, 16, None) and np.array_equal(again.length, found.length)
    assert again.summary() == found.summary()
    for name, each in profiles.items():
        profile_file.save(tmp_path / "p.json", dataclasses.replace(each, device={}))
        document = json.loads((tmp_path / "p.json").read_text())
        assert [costs["split_keys"] for costs in document["further"]] == [16, None], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(further=[None]), "different split lengths"),
        (lambda d: d["work"].update(length=[5] * len(d["work"]["tile"])), "length: 0..0"),
        (lambda d: d["work"].pop("length"), "complete schedule"),
    ],
)
def test_damaged_lengths_are_named(change, message, tmp_path):
    blocks, profiles = random_inputs(1, 6, TILES)
    schedules.save(tmp_path / "s.json", solve(blocks, profiles, make_limits()))
    document = json.loads((tmp_path / "s.json").read_text())
    change(document)
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=message):
        schedules.load(tmp_path / "s.json")


def test_no_option_fits():
    blocks, profiles = inputs(0)
    with pytest.raises(InfeasibleError, match="fits no tile"):
        solve(blocks, profiles, make_limits(per_block={"registers": 1.0}))

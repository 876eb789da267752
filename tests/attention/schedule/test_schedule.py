"""The schedule against brute force over all assignments, and its own promises (greedy, aggregation,
determinism, files)."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import timeit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.factories import make_blocks, make_limits, make_profile, random_inputs
from helpers.solvers import need
from tilewright import milp
from tilewright.attention import schedule as schedules
from tilewright.attention.blocks import work
from tilewright.attention.schedule import _program, descent, greedy, solve
from tilewright.attention.schedule import problem as problems
from tilewright.core.errors import ArtifactError, InfeasibleError, SolverError, UnknownNameError
from tilewright_study.measure import schedule_check

TILES = ("4x1", "2x1", "4x8")
# Among them, every case binds.
SEEDS = (0, 7, 9)
CASES = {
    "one-round": {},
    "c2-working-set": {"per_block": {"working_set_bytes": 500.0}},
    "c3-kappa": {"max_tile_kinds": 1, "rounds": 2},
    "c5-envelope": {"envelope": {"registers": 5.0}, "rounds": 2},
    "c6-occupancy": {"occupancy": 3.0, "rounds": 2, "round_us": 0.2},
    "all": {
        "max_tile_kinds": 2,
        "envelope": {"registers": 6.0},
        "occupancy": 3.0,
        "rounds": 2,
        "round_us": 0.1,
    },
}


def brute_force(blocks, profiles, limits):
    """Least makespan and least longest round over every assignment, from the definitions alone, inf when there is none;
    and the assignments that keep all limits, ``(tile, round)`` of each region."""
    names, regions = list(blocks), range(next(iter(blocks.values())).n_regions)
    shapes = {}
    for name, cover in blocks.items():
        items = work.items(cover, profiles[name].split_keys)
        for b in regions:
            shapes[b, name] = items.shape[cover.region[items.block] == b].tolist()
    fits = {
        (b, name): all(
            profiles[name].shapes[k].resources[what] <= most
            for k in shapes[b, name]
            for what, most in limits.per_block.items()
        )
        for b in regions
        for name in names
    }
    usable = {
        name: [c for c in profiles[name].shapes if all(c.resources[w] <= m for w, m in limits.per_block.items())]
        for name in names
    }
    places = list(itertools.product(names, range(limits.rounds)))
    best, kept = {"sum": np.inf, "paper": np.inf}, set()
    for choice in itertools.product(places, repeat=len(regions)):
        if not all(fits[b, choice[b][0]] for b in regions):
            continue
        durations, total = [], 0.0
        for r in range(limits.rounds):
            here = [(b, name) for b, (name, q) in enumerate(choice) if q == r]
            kinds = {name for _, name in here}
            work_of = [(name, k) for b, name in here for k in shapes[b, name]]
            classes = [profiles[name].shapes[k] for name, k in work_of]
            longest, load = max((c.alone_us for c in classes), default=0), sum(c.latency_us for c in classes)
            units = sum(c.occupancy for c in classes)
            envelope_kept = all(
                sum(max(c.resources[what] for c in usable[name]) for name in kinds) <= most
                for what, most in limits.envelope.items()
            )
            if len(kinds) > limits.max_tile_kinds or units > limits.occupancy or not envelope_kept:
                break
            if here:
                durations.append(max(longest, load / limits.lanes + max(profiles[n].tile_us for n in kinds)))
                total += durations[-1] + sum(profiles[n].launch_us for n, _ in set(work_of)) + limits.round_us
        else:
            best = {"sum": min(best["sum"], total), "paper": min(best["paper"], max(durations))}
            kept.add(choice)
    return best | {"kept": kept}


@pytest.fixture(scope="module")
def truth():
    found = {}

    def of(case, seed):
        if (case, seed) not in found:
            blocks, profiles = random_inputs(seed, 4, TILES, tile_us=0.1)
            found[case, seed] = brute_force(blocks, profiles, make_limits(**CASES[case]))
        return found[case, seed]

    return of


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objective", problems.OBJECTIVES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("solver", milp.NAMES)
def test_optimum_is_brute_force(solver, case, objective, seed, truth):
    need(solver)
    blocks, profiles = random_inputs(seed, 4, TILES, tile_us=0.1)
    limits = make_limits(**CASES[case])
    best = truth(case, seed)[objective]
    assert best < np.inf
    found = solve(blocks, profiles, limits, solver, objective, gap=0.0)
    assert found.status == "optimal"
    assert found.objective_us == pytest.approx(best, rel=1e-6)
    assert found.bound_us == pytest.approx(best, rel=1e-6)
    assert schedule_check.violations(found, blocks, profiles, limits) == []


def feasible(problem, tile, rounds):
    """Whether an assignment keeps C2, C3, C5 and C6."""
    tile, rounds = np.asarray(tile), np.asarray(rounds)
    if not problem.allowed[np.arange(problem.n_regions), tile].all():
        return False
    units = np.bincount(rounds, problem.units[np.arange(problem.n_regions), tile], problem.limits.rounds)
    kinds = np.zeros((problem.limits.rounds, problem.n_tiles), np.bool_)
    kinds[rounds, tile] = True
    return (units <= problem.limits.occupancy * problems.SLACK).all() and all(map(problem.compatible, kinds))


@pytest.mark.parametrize("case", CASES)
def test_an_assignment_is_feasible_where_it_keeps_all_limits(case, truth):
    blocks, profiles = random_inputs(0, 4, TILES, tile_us=0.1)
    problem = problems.build(blocks, profiles, make_limits(**CASES[case]))
    places = list(itertools.product(range(len(TILES)), range(problem.limits.rounds)))
    for choice in itertools.product(places, repeat=problem.n_regions):
        kept = tuple((problem.tiles[o], r) for o, r in choice) in truth(case, 0)["kept"]
        assert feasible(problem, *zip(*choice, strict=True)) == kept


@pytest.mark.parametrize("case", [case for case in CASES if case != "one-round"])
def test_each_case_binds(case, truth):
    """Without its constraints each case has a better optimum: else the tests above would not notice a missing
    row."""
    rounds = {name: value for name, value in CASES[case].items() if name in ("rounds", "round_us")}
    gains = []
    for seed in SEEDS:
        blocks, profiles = random_inputs(seed, 4, TILES, tile_us=0.1)
        free = brute_force(blocks, profiles, make_limits(**rounds))
        gains += [truth(case, seed)[objective] - free[objective] for objective in problems.OBJECTIVES]
    assert min(gains) >= 0 and max(gains) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_of_a_round_fill_the_lanes_once(seed):
    """As the tile does it that takes longest for it."""
    blocks, profiles = random_inputs(seed, 4, TILES)
    tile_us = dict(zip(profiles, (0.2, 0.5, 0.3), strict=True))
    profiles = {name: dataclasses.replace(profile, tile_us=tile_us[name]) for name, profile in profiles.items()}
    limits = make_limits(rounds=2, round_us=0.6)
    best = brute_force(blocks, profiles, limits)
    for objective in problems.OBJECTIVES:
        found = solve(blocks, profiles, limits, "highs", objective, gap=0.0)
        assert [found.objective_us, found.bound_us] == pytest.approx([best[objective]] * 2, rel=1e-6)
        assert schedule_check.violations(found, blocks, profiles, limits) == []
    assert len(np.unique(found.tile)) > 1
    bounds = found.lower_bounds
    assert bounds["work"] < bounds["launched"] <= best["sum"] and bounds["longest"] <= best["sum"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_regions=st.integers(1, 12),
    rounds=st.integers(1, 3),
    kappa=st.integers(1, 3),
    occupancy=st.sampled_from([math.inf, 20.0, 6.0]),
    objective=st.sampled_from(problems.OBJECTIVES),
)
def test_no_solver_loses_to_what_it_starts_from(seed, n_regions, rounds, kappa, occupancy, objective):
    """An integer program to descent, and descent to greedy and to every fixed tile."""
    blocks, profiles = random_inputs(seed, n_regions, TILES)
    limits = make_limits(rounds=rounds, max_tile_kinds=kappa, round_us=0.3, occupancy=occupancy)

    def solved(solver, *tiles):
        taken = ({name: files[name] for name in tiles or TILES} for files in (blocks, profiles))
        try:
            found = solve(*taken, limits, solver, objective)
        except InfeasibleError:
            return None
        if not tiles:
            assert schedule_check.violations(found, blocks, profiles, limits) == []
        return found

    starts = [*filter(None, [solved("greedy"), *(solved("greedy", name) for name in TILES)])]
    descended, found = solved("descent"), solved("highs")
    assert bool(starts) == (descended is not None) and (found is not None or not starts)
    if starts:
        # Sums in another order differ in their last bits.
        assert descended.objective_us <= min(start.objective_us for start in starts) * (1 + 1e-12)
        assert found.objective_us <= descended.objective_us * (1 + 1e-12)
        assert all(other.bound_us <= found.objective_us * (1 + 1e-6) for other in (found, descended))


def test_a_worse_answer_gives_way_to_descent(monkeypatch):
    blocks, profiles = random_inputs(0, 6, TILES)
    monkeypatch.setattr(_program, "decode", lambda problem, *_: (problem.load_us.argmax(axis=1), np.zeros(6, int)))
    found = solve(blocks, profiles, make_limits())
    baseline = solve(blocks, profiles, make_limits(), "descent")
    assert found.predicted_us == baseline.predicted_us
    assert "descent" in found.note and (found.status == "optimal") == (found.gap <= 1e-4)


@pytest.mark.parametrize("objective", problems.OBJECTIVES)
@pytest.mark.parametrize("seed", [0, 1])
def test_classes_have_the_optimum_of_regions(seed, objective, monkeypatch):
    blocks, profiles = random_inputs(seed, 8, ("4x1", "2x8"), most_runs=2)
    limits = make_limits(rounds=2, max_tile_kinds=1, round_us=0.2)
    found = solve(blocks, profiles, limits, objective=objective, gap=0.0)
    every = np.arange(8)
    monkeypatch.setattr(problems.Problem, "classes", (every, every))
    apart = solve(blocks, profiles, limits, objective=objective, gap=0.0)
    assert found.model_size["variables"] < apart.model_size["variables"]
    assert found.bound_us == pytest.approx(apart.bound_us, rel=1e-6)


@pytest.mark.parametrize("objective", problems.OBJECTIVES)
@pytest.mark.parametrize("case", CASES)
def test_descent_ends_where_no_move_of_a_class_helps(case, objective):
    blocks, profiles = random_inputs(3, 9, TILES, most_runs=2, tile_us=0.1)
    problem = problems.build(blocks, profiles, make_limits(**CASES[case] | {"occupancy": math.inf}))
    tile, rounds = descent.assign(problem, objective)
    assert feasible(problem, tile, rounds)
    best, member = problem.value(tile, rounds, objective), problem.classes[1]
    places = {*zip(member, tile, rounds, strict=True)}
    for label, s, r in itertools.product(places, range(3), range(problem.limits.rounds)):
        moved = (member == label[0]) & (tile == label[1]) & (rounds == label[2])
        other = np.where(moved, s, tile), np.where(moved, r, rounds)
        if feasible(problem, *other):
            assert problem.value(*other, objective) >= best * (1 - descent.WORTH)


def test_descent_counts_launches():
    """Greedy gives each region its fastest tile and pays a launch for each; one tile would do."""
    blocks = {"4x1": make_blocks("4x1", [[2], [3], [4]]), "2x1": make_blocks("2x1", [[2, 2]] * 3)}
    profiles = {name: make_profile(cover, launch_us=50.0) for name, cover in blocks.items()}
    plain, found = (solve(blocks, profiles, make_limits(), solver) for solver in ("greedy", "descent"))
    assert (plain.launches, found.launches) == (3, 1)
    assert found.objective_us < plain.objective_us - 90


def test_descent_is_fast_where_all_regions_differ():
    blocks, profiles = random_inputs(0, 512, ("16x1", "32x1", "64x1"), most_runs=12, region_rows=128)
    problem = problems.build(blocks, profiles, make_limits(lanes=132, rounds=2, max_tile_kinds=1))
    assert len(problem.classes[0]) > descent.GROUPS
    tile, rounds = descent.assign(problem, "sum")
    again = descent.assign(problem, "sum")
    assert np.array_equal(tile, again[0]) and np.array_equal(rounds, again[1])
    assert feasible(problem, tile, rounds)
    assert min(timeit.repeat(lambda: descent.assign(problem, "sum"), number=1, repeat=3)) < 1


@pytest.mark.parametrize("case", CASES)
def test_greedy_is_a_feasible_point_of_the_model(case):
    blocks, profiles = random_inputs(3, 4, TILES)
    problem = problems.build(blocks, profiles, make_limits(**CASES[case]))
    tile, rounds = greedy.assign(problem)
    for objective in problems.OBJECTIVES:
        program, columns = _program.build(problem, objective)
        x = _program.encode(problem, columns, tile, rounds)
        activity = program.rows @ x
        assert (activity <= program.row_upper + 1e-9).all() and (activity >= program.row_lower - 1e-9).all()
        assert (x <= program.upper + 1e-9).all() and (x >= program.lower).all()
        assert program.cost @ x == pytest.approx(problem.value(tile, rounds, objective))
        assert problem.value(*_program.decode(problem, columns, x), objective) == pytest.approx(program.cost @ x)


def test_the_work_list_is_ordered_and_places_every_item():
    blocks, profiles = random_inputs(5, 24, TILES, most_runs=9, split_keys=128)
    limits = make_limits(rounds=3, max_tile_kinds=1, lanes=3, round_us=0.7)
    found = solve(blocks, profiles, limits, "highs", "paper")
    keys = np.stack([found.shape, found.tile, found.round])
    assert (np.lexsort(keys) == np.arange(found.n_items)).all()
    size = (found.run_hi - found.run_lo) * [
        blocks[found.tiles[t]].rows[b] for t, b in zip(found.tile, found.block, strict=True)
    ]
    same_launch = (np.diff(keys, axis=1) == 0).all(axis=0)
    assert (np.diff(size)[same_launch] <= 0).all() and (np.diff(size)[same_launch] < 0).any()
    assert set(found.lane.tolist()) == {0, 1, 2}
    latency = np.array(
        [profiles[found.tiles[t]].shapes[k].latency_us for t, k in zip(found.tile, found.shape, strict=True)]
    )
    # List scheduling ends at the prediction when the lanes end together, and never later than one item after
    # it a round.
    excess = (found.start_us + latency).max() - found.predicted_us
    assert -1e-6 <= excess <= sum(latency[found.round == r].max() for r in range(3))
    assert found.start_us[0] == pytest.approx(0.7 + profiles[found.tiles[found.tile[0]]].launch_us)
    assert found.launches == len(np.unique(keys, axis=1).T)


def test_a_region_without_keys_needs_no_work():
    blocks = {"4x1": make_blocks("4x1", [[2], [0], [3]]), "2x1": make_blocks("2x1", [[1, 2], [0, 0], [2, 0]])}
    profiles = {name: make_profile(cover) for name, cover in blocks.items()}
    found = solve(blocks, profiles, make_limits())
    assert schedule_check.violations(found, blocks, profiles, make_limits()) == []


def test_same_seed_same_schedule():
    blocks, profiles = random_inputs(7, 30, TILES, most_runs=5)
    first, second = (solve(blocks, profiles, make_limits(max_tile_kinds=2), seed=3) for _ in range(2))
    for name in schedules.COLUMNS:
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_region_fits_no_tile():
    blocks, profiles = random_inputs(0, 3, TILES)
    with pytest.raises(InfeasibleError, match=r"region \d fits no tile: 4x1 needs registers 4 of at most 1; 2x1 needs"):
        solve(blocks, profiles, make_limits(per_block={"registers": 1.0}))


@pytest.mark.parametrize("solver", milp.NAMES)
def test_no_schedule_keeps_the_limits(solver):
    need(solver)
    blocks, profiles = random_inputs(0, 3, TILES)
    with pytest.raises(InfeasibleError, match=r"rounds 1; .*occupancy 1 units a round .*at least [3-9]"):
        solve(blocks, profiles, make_limits(occupancy=1.0), solver)


def test_greedy_finds_no_place():
    blocks, profiles = random_inputs(0, 3, TILES)
    with pytest.raises(InfeasibleError, match="greedy finds no round for region"):
        solve(blocks, profiles, make_limits(occupancy=1.0), "greedy")


def test_no_time_and_no_start(monkeypatch):
    blocks, profiles = random_inputs(0, 4, TILES)
    unsolved = milp.Solution(None, "unsolved", np.inf, 0.0, np.inf, 0.0)
    monkeypatch.setattr("tilewright.milp.highs.solve", lambda *_, **__: unsolved)
    assert solve(blocks, profiles, make_limits()).note
    monkeypatch.setattr(greedy, "assign", lambda _: (_ for _ in ()).throw(InfeasibleError("none")))
    with pytest.raises(SolverError, match="highs ended without a schedule"):
        solve(blocks, profiles, make_limits())


def test_a_bound_above_a_schedule_is_a_broken_model(monkeypatch):
    blocks, profiles = random_inputs(0, 4, TILES)
    claim = milp.Solution(None, "unsolved", np.inf, 1e6, np.inf, 0.0)
    monkeypatch.setattr("tilewright.milp.highs.solve", lambda *_, **__: claim)
    with pytest.raises(SolverError, match=r"highs claims a bound of 1e\+06 us, above the"):
        solve(blocks, profiles, make_limits())


@pytest.mark.parametrize(("what", "arguments"), [("solver", ("cplex",)), ("objective", ("highs", "mean"))])
def test_unknown_names(what, arguments):
    blocks, profiles = random_inputs(0, 2, TILES)
    with pytest.raises(UnknownNameError, match=f"unknown {what} '{arguments[-1]}'; known: "):
        solve(blocks, profiles, make_limits(), *arguments)


def _altered(change):
    blocks, profiles = random_inputs(0, 3, TILES)
    return change(blocks, profiles)


MISMATCHES = {
    "no-profile": (lambda b, p: (b, {k: v for k, v in p.items() if k != "2x1"}), "expected a profile for each"),
    "wrong-tile": (lambda b, p: ({**b, "2x1": b["4x1"]}, p), "tile 2x1: found blocks of 4x1"),
    "other-graph": (
        lambda b, p: ({**b, "2x1": dataclasses.replace(b["2x1"], graph_id="g2")}, p),
        "tile 2x1: expected blocks of graph graph in 3 regions, found graph g2",
    ),
    "other-blocks": (
        lambda b, p: (b, {**p, "2x1": dataclasses.replace(p["2x1"], blocks_id="x")}),
        "the profile was made for blocks x, found",
    ),
    "other-device": (
        lambda b, p: (b, {**p, "2x1": dataclasses.replace(p["2x1"], device_id="x")}),
        "expected a profile with device_id 'device', found 'x'",
    ),
    "other-shapes": (
        lambda b, p: (b, {**p, "2x1": dataclasses.replace(p["2x1"], shapes=p["2x1"].shapes[:1])}),
        "expected a profile of the",
    ),
    "no-latency": (
        lambda b, p: (
            b,
            {**p, "2x1": dataclasses.replace(
                p["2x1"], shapes=tuple(dataclasses.replace(c, latency_us=0.0) for c in p["2x1"].shapes)
            )},
        ),
        "expected positive, finite latencies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_inputs_that_do_not_belong_together(case):
    change, message = MISMATCHES[case]
    with pytest.raises(ArtifactError, match=message):
        solve(*_altered(change), make_limits())


def test_limits_name_a_resource_that_the_profile_lacks():
    with pytest.raises(ArtifactError, match="expected a profile that states 'smem_bytes'"):
        solve(*random_inputs(0, 2, TILES), make_limits(per_block={"smem_bytes": 1.0}))


@pytest.fixture
def solved():
    blocks, profiles = random_inputs(2, 5, TILES)
    return solve(blocks, profiles, make_limits(), paths={"2x1": ("b.npz", "p.json")}), blocks, profiles


def test_a_file_brings_the_schedule_back(solved, tmp_path):
    found, blocks, profiles = solved
    schedules.save(tmp_path / "s.json", found, {"by": "test"})
    again = schedules.load(tmp_path / "s.json")
    for field in dataclasses.fields(found):
        before, after = getattr(found, field.name), getattr(again, field.name)
        same = np.array_equal(before, after) if field.name in schedules.COLUMNS else before == after
        assert same and type(before) is type(after), field.name
    assert again.blocks_paths == ("", "b.npz", "")
    assert schedule_check.violations(again, blocks, profiles, make_limits()) == []


DAMAGE = {
    "missing-field": (lambda d: d.pop("gap"), "complete schedule"),
    "missing-column": (lambda d: d["work"].pop("lane"), "complete schedule"),
    "short-column": (lambda d: d["work"]["lane"].pop(), "columns of one length"),
    "text-column": (lambda d: d["work"].update(lane=["a"]), "complete schedule"),
    "other-kind": (lambda d: d.update(kind="profile"), "expected kind 'schedule', found 'profile'"),
    "older-version": (lambda d: d.update(version=1), "expected schedule version 3, found version 1"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_named(case, solved, tmp_path):
    path = tmp_path / "s.json"
    schedules.save(path, solved[0])
    change, message = DAMAGE[case]
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=f"s.json: .*{message}"):
        schedules.load(path)


FOREIGN = {
    "other-graph": (
        lambda b, p: b.update({"4x1": dataclasses.replace(b["4x1"], graph_id="g2")}),
        "made for graph graph",
    ),
    "other-blocks": (
        lambda b, p: b.update({"4x1": make_blocks("4x1", [[1]] * 5)}),
        "4x1: the schedule was made for blocks",
    ),
    "no-blocks": (lambda b, p: b.pop("4x1"), "needs blocks of the tiles"),
    "no-profile": (lambda b, p: p.pop("4x1"), "needs profiles of the tiles"),
    "profile-of-others": (
        lambda b, p: p.update({"4x1": dataclasses.replace(p["4x1"], blocks_id="x")}),
        "found a profile of x",
    ),
    "other-device": (
        lambda b, p: p.update({"4x1": dataclasses.replace(p["4x1"], device_id="x")}),
        "made for device device",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_schedule_of_other_inputs_is_refused(case, solved):
    found, blocks, profiles = solved
    schedules.verify_inputs(found, blocks, profiles)
    change, message = FOREIGN[case]
    change(blocks, profiles)
    with pytest.raises(ArtifactError, match=message):
        schedules.verify_inputs(found, blocks, profiles)


def test_importing_the_schedule_is_light():
    code = (
        "import sys, tilewright.attention.schedule, tilewright_study.measure.schedule_check, tilewright.milp;"
        "print(sorted({'highspy', 'gurobipy', 'torch', 'matplotlib', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""The search for a schedule: build the problem, choose tiles and rounds, write the work list (stage T4)."""

import heapq
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright import milp
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.profile import Profile
from tilewright.attention.schedule import _program, descent, greedy
from tilewright.attention.schedule.problem import OBJECTIVES, Choice, Ints, Problem, build
from tilewright.attention.schedule.record import COLUMNS, Schedule, choose
from tilewright.core import registry
from tilewright.core.errors import InfeasibleError, SolverError
from tilewright.devices import Limits

# They need no integer program: ``call(problem, objective) -> Choice``.
HEURISTICS: dict[str, Callable[[Problem, str], Choice]] = {
    "greedy": lambda problem, _: greedy.assign(problem),
    "descent": descent.assign,
}
# The integer programs under the published objective, the longest round, by the solver of each.
PUBLISHED = {f"{name}-paper": name for name in milp.NAMES}
NAMES = (*HEURISTICS, *milp.NAMES, *PUBLISHED)

GAP = 1e-4
# By this much a bound may exceed its objective, or fall short of it where it is met, relative and in microseconds: the
# feasibility tolerance of the solvers.
TOLERANCE = 1e-6


def solve(
    blocks: Mapping[str, Blocks],
    profiles: Mapping[str, Profile],
    limits: Limits,
    solver: str = "highs",
    objective: str = "sum",
    *,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    seed: int = 0,
    threads: int = 1,
    paths: Mapping[str, tuple[Any, Any]] | None = None,
    doubted: bool = False,
    beside_torch: bool = False,
    log: Callable[[str], None] | None = None,
) -> Schedule:
    """Choose tile and round of each region and return the `Schedule`.

    blocks, profiles: by tile, of one graph and its regions.
    solver: of `NAMES`. An integer program starts from the answer of ``descent``; ``descent`` starts from greedy's
        answers. None is worse than its starts under the `objective`. Where an integer program does not beat descent,
        the schedule of descent is kept and its `note` says so.
    objective: ``sum`` (makespan) or ``paper`` (longest round), which is that of the solvers `PUBLISHED`.
    time_limit_s, gap, seed, threads: of the solver; gap is the relative gap at which the search stops.
    paths: ``{tile: (blocks path, profile path)}`` to record.
    doubted: several tiles are taken only where they are predicted to be faster than the best alone by more than the
        `spread` of the profiles, by any solver but ``greedy`` and under the objective ``sum``; the `note` says so.
    beside_torch: torch's own attention is taken in place of the work list where the profiles state a shorter time of
        it, see `record.choose`.
    log: called with each line of the solver's progress.

    Raises `UnknownNameError`; `ArtifactError` for inputs that do not belong together; `InfeasibleError` where no
    schedule exists; `SolverUnavailableError` for a solver without a package, or without a licence for as large a model;
    `SolverError` where the solver ends without an answer.
    """
    registry.check("solver", solver, NAMES)
    registry.check("objective", objective, OBJECTIVES)
    objective = objective_of(solver, objective)
    problem = build(blocks, profiles, limits)
    if solver in HEURISTICS:
        choice, facts = _heuristic(problem, solver, objective)
    else:
        options = {"time_limit_s": time_limit_s, "gap": gap, "seed": seed, "threads": threads, "log": log}
        choice, facts = _integer_program(problem, PUBLISHED.get(solver, solver), objective, options)
    if doubted and solver != "greedy" and objective == "sum":
        choice, note = _doubted(problem, profiles, choice)
        facts |= note
    bounds = problem.lower_bounds_us
    value = problem.value(*choice, objective)
    shared = bounds["launched"] if objective == "sum" else bounds["work"] / limits.rounds
    bound = max(bounds["longest"], shared, facts.pop("bound_us", 0.0))
    if bound > value * (1 + TOLERANCE) + TOLERANCE:
        raise SolverError(f"{solver} claims a bound of {bound:g} us, above the {value:g} us of a schedule that exists")
    bound = min(bound, value)
    proven = milp.relative_gap(value, bound)
    facts.setdefault("status", "optimal" if proven <= gap + TOLERANCE else "feasible")
    first, profile = next(iter(blocks.values())), next(iter(profiles.values()))
    paths = paths or {}
    made = Schedule(
        graph_id=first.graph_id,
        tiles=problem.tiles,
        blocks_ids=tuple(cover.id for cover in blocks.values()),
        blocks_paths=tuple(str(paths.get(name, ("", ""))[0]) for name in blocks),
        profile_paths=tuple(str(paths.get(name, ("", ""))[1]) for name in blocks),
        split_keys=profile.split_keys,
        lanes=limits.lanes,
        solver=solver,
        objective=objective,
        predicted_us=problem.value(*choice),
        objective_us=value,
        bound_us=bound,
        gap=proven,
        lower_bounds=bounds,
        device_id=profile.device_id,
        **facts,
        **_work_list(problem, [(blocks[name], profiles[name].split_keys) for name in blocks], *choice),
    )
    return choose(made, profile.torch_us or {}) if beside_torch else made


def compares(solver: str) -> bool:
    """Whether plans of a solver of `NAMES` run torch's own attention where it is faster: not those of baselines, which
    are greedy's and those of the published objective."""
    return solver != "greedy" and solver not in PUBLISHED


def objective_of(solver: str, stated: str) -> str:
    """The objective that a solver of `NAMES` has: its own, else the one that is `stated`."""
    return "paper" if solver in PUBLISHED else stated


def entered(solver: str) -> list[str]:
    """Dotted names of the modules that a solver of `NAMES` enters by name: none for a heuristic."""
    return [] if solver in HEURISTICS else [f"{milp.__name__}.{PUBLISHED.get(solver, solver)}"]


def _heuristic(problem: Problem, name: str, objective: str) -> tuple[Choice, dict[str, Any]]:
    begin = perf_counter()
    choice = HEURISTICS[name](problem, objective)
    size = dict.fromkeys(("variables", "integers", "constraints", "nonzeros"), 0)
    seconds = perf_counter() - begin
    return choice, {"status": "heuristic", "model_size": size, "solve_s": seconds}


def _integer_program(
    problem: Problem, solver: str, objective: str, options: dict[str, Any]
) -> tuple[Choice, dict[str, Any]]:
    member = registry.member("tilewright.milp", "solver", solver, milp.NAMES)
    program, columns = _program.build(problem, objective)
    begin, start = perf_counter(), None
    with suppress(InfeasibleError):
        start = descent.assign(problem, objective)
    start_s = perf_counter() - begin
    options = options | {"time_limit_s": max(0.0, options["time_limit_s"] - start_s)}
    point = None if start is None else _program.encode(problem, columns, *start)
    answer = member.solve(program, start=point, **options)
    if answer.status == "infeasible":
        raise InfeasibleError(_infeasible(problem))
    facts = {"model_size": program.size, "solve_s": start_s + answer.seconds, "bound_us": answer.bound}
    choice = None if answer.x is None else _program.decode(problem, columns, answer.x)
    if start and (choice is None or problem.value(*choice, objective) > problem.value(*start, objective)):
        # Equal but for rounding, the start is proven as good as the answer.
        return start, {**facts, "note": f"descent's schedule, which {solver} did not beat"}
    if choice is None:
        raise SolverError(
            f"{solver} ended without a schedule after {answer.seconds:.1f} s (limit {options['time_limit_s']:g} s), "
            "and descent finds none either; raise the time limit"
        )
    return choice, facts


def _doubted(problem: Problem, profiles: Mapping[str, Profile], choice: Choice) -> tuple[Choice, dict[str, Any]]:
    """``(choice, facts)``: the best tile alone in place of a `choice` that is not surely faster."""
    fixed = descent.alone(problem)
    if len(np.unique(choice[0])) < 2 or not fixed:
        return choice, {}
    alone = min(fixed, key=lambda one: problem.value(*one))
    taken, least = problem.value(*choice), problem.value(*alone)
    doubt = max(spread(problem, profiles, *one) for one in (choice, alone))
    if taken < least * (1 - doubt):
        return choice, {}
    name = problem.tiles[alone[0][0]]
    return alone, {"note": f"{name} alone: several are predicted {1 - taken / least:.1%} faster, known to {doubt:.1%}"}


def spread(problem: Problem, profiles: Mapping[str, Profile], tile: Ints, rounds: Ints) -> float:
    """The distance of the quintiles of the latencies of an assignment, over its load.

    Where latencies are predicted, their quintiles are as far off as the median error of the calibration, to both sides.
    """
    # ASSUME: schedules are told apart by no less. On two quiet CPU cores the quintiles of timed calls lay about 15 %
    # apart, and of a predicted gain of 14 % nothing was measured.
    shapes = [shape for name in problem.tiles for shape in profiles[name].shapes]
    apart_us = np.array([shape.p80_us - shape.p20_us for shape in shapes])
    counts = problem.table(tile, rounds).sum(axis=0)
    return float(counts @ apart_us / (counts @ problem.latency_us))


def _infeasible(problem):
    limits = problem.limits
    least = np.where(problem.allowed, problem.units, np.inf).min(axis=1).sum()
    envelope = {
        name: f"{[f'{t} {n:g}' for t, n in zip(problem.tiles, need, strict=True)]} of {limits.envelope[name]:g}"
        for name, need in problem.envelope.items()
    }
    return (
        f"no schedule of {problem.n_regions} regions keeps all limits: rounds {limits.rounds}; tile kinds a round "
        f"{limits.max_tile_kinds}; occupancy {limits.occupancy:g} units a round (the regions need at least "
        f"{least:g} in all); envelopes {envelope}"
    )


def _work_list(problem, blocks, tile, rounds):
    """The columns of `Schedule`: rounds ascending, then launch, then the most work first."""
    parts = []
    for s, (cover, split_keys) in enumerate(blocks):
        items = work.items(cover, split_keys)
        round_of = np.full(cover.n_regions, -1)
        round_of[problem.region[tile == s]] = rounds[tile == s]
        item_round = round_of[cover.region[items.block]]
        keep = np.flatnonzero(item_round >= 0)
        part = {name: getattr(items, name)[keep] for name in ("block", "run_lo", "run_hi", "shape", "split")}
        size = (part["run_hi"] - part["run_lo"]) * cover.rows[part["block"]]
        column = np.searchsorted(problem.tile_of, s) + part["shape"]
        parts.append({"tile": np.full(len(keep), s), **part, "round": item_round[keep], "size": size, "column": column})
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort([-joined.pop("size"), joined["column"], joined["round"]])
    columns = {name: column[order] for name, column in joined.items()}
    columns["lane"], columns["start_us"] = _place(problem, columns["round"], columns.pop("column"))
    return {name: columns[name].astype(dtype) for name, dtype in COLUMNS.items()}


def _place(problem: Problem, rounds: Ints, shape: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Lane and start of each item by list scheduling: the next item goes to the lane that is free first.

    A round starts when the one before is over. A launch holds every lane for its cost, as the makespan counts it.
    """
    lane, start = np.empty(len(shape), np.int64), np.empty(len(shape))
    held, clock, launch = 0.0, 0.0, None
    free: list[tuple[float, int]] = []
    for i, (k, r) in enumerate(zip(shape.tolist(), rounds.tolist(), strict=True)):
        if launch is None or r != launch[0]:
            clock = max((end for end, _ in free), default=0.0) + held + problem.limits.round_us
            free, held = [(clock, s) for s in range(problem.limits.lanes)], 0.0
        if (r, k) != launch:
            held += problem.launch_us[k]
        launch = r, k
        begin, lane[i] = free[0]
        # Lanes keep their order while all of them wait for a launch: the wait is added when an item is
        # placed.
        start[i] = begin + held
        heapq.heapreplace(free, (begin + problem.latency_us[k], int(lane[i])))
    return lane, start

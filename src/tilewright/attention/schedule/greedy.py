"""The greedy heuristic: each region takes its best option, the longest first (stage T4)."""

from contextlib import suppress

import numpy as np

from tilewright.attention.schedule.problem import SLACK, Problem
from tilewright.core.errors import InfeasibleError


def assign(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Option and round of each region, ``(int [B], int [B])``.

    Regions come in the order of their least load, largest first. Each takes the option of its least load in the first
    round where C3 and C5 to C7 still hold, else the next best one. Raises `InfeasibleError` where a region finds no
    place. This does not prove that no schedule exists.
    """
    limits = problem.limits
    load = np.where(problem.allowed, problem.load_us, np.inf)
    preference = np.argsort(load, axis=1, kind="stable")
    held = np.zeros((limits.rounds, problem.n_options), bool)
    units = np.zeros(limits.rounds)
    option = np.empty(problem.n_regions, np.int64)
    rounds = np.empty(problem.n_regions, np.int64)
    for b in np.argsort(-load.min(axis=1), kind="stable"):
        for o in preference[b, : problem.allowed[b].sum()]:
            place = _first_round(problem, held, units, o, problem.units[b, o])
            if place is not None:
                break
        else:
            kinds = [len(np.unique(problem.tile_of[own])) for own in held]
            raise InfeasibleError(
                f"greedy finds no round for region {problem.region[b]}: {limits.rounds} rounds of at most "
                f"{limits.max_tile_kinds} tile kinds and {limits.occupancy:g} occupancy units hold "
                f"{kinds} kinds and {units.tolist()} units already; allow more rounds or use an ILP solver"
            )
        option[b], rounds[b] = o, place
        held[place, o] = True
        units[place] += problem.units[b, o]
    return option, rounds


def best(problem: Problem, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """`assign`; where tiles have several options, that with their first ones alone if its `objective` is less."""
    found = []
    if problem.has_splits:
        with suppress(InfeasibleError):
            only, first = problem.first_options()
            option, rounds = assign(only)
            found.append((first[option], rounds))
    try:
        found.append(assign(problem))
    except InfeasibleError:
        if not found:
            raise
    return min(found, key=lambda choice: problem.value(choice[0], choice[1], objective))


def _first_round(problem, held, units, o, more):
    for r in range(len(held)):
        if units[r] + more > problem.limits.occupancy * SLACK:
            continue
        if held[r, o] or problem.compatible(held[r] | (np.arange(held.shape[1]) == o)):
            return r
    return None

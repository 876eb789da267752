"""The greedy heuristic: each region takes its best tile, the longest first (stage T4)."""

import numpy as np

from tilewright.attention.schedule.problem import SLACK, Choice, Problem
from tilewright.core.errors import InfeasibleError


def assign(problem: Problem) -> Choice:
    """Tile and round of each region, ``(int [B], int [B])``.

    Regions come in the order of their least load, largest first. Each takes the tile of its least load in the first
    round where C3, C5 and C6 still hold, else the next best one. Raises `InfeasibleError` where a region finds no
    place. This does not prove that no schedule exists.
    """
    limits = problem.limits
    load = np.where(problem.allowed, problem.load_us, np.inf)
    preference = np.argsort(load, axis=1, kind="stable")
    held = np.zeros((limits.rounds, problem.n_tiles), bool)
    units = np.zeros(limits.rounds)
    tile = np.empty(problem.n_regions, np.int64)
    rounds = np.empty(problem.n_regions, np.int64)
    for b in np.argsort(-load.min(axis=1), kind="stable"):
        for s in preference[b, : problem.allowed[b].sum()]:
            place = _first_round(problem, held, units, s, problem.units[b, s])
            if place is not None:
                break
        else:
            raise InfeasibleError(
                f"greedy finds no round for region {problem.region[b]}: {limits.rounds} rounds of at most "
                f"{limits.max_tile_kinds} tile kinds and {limits.occupancy:g} occupancy units hold "
                f"{held.sum(axis=1).tolist()} kinds and {units.tolist()} units already; allow more rounds or use an "
                "ILP solver"
            )
        tile[b], rounds[b] = s, place
        held[place, s] = True
        units[place] += problem.units[b, s]
    return tile, rounds


def _first_round(problem, held, units, s, more):
    for r in range(len(held)):
        if units[r] + more > problem.limits.occupancy * SLACK:
            continue
        if held[r, s] or problem.compatible(held[r] | (np.arange(held.shape[1]) == s)):
            return r
    return None

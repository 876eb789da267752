"""The descent heuristic: the best fixed tile and greedy's schedule, improved move by move (stage T4).

Integer programs start from its answer.
"""

from dataclasses import replace

import numpy as np

from tilewright.core.errors import InfeasibleError
from tilewright.schedule import greedy
from tilewright.schedule._region_classes import Merges, exact
from tilewright.schedule.problem import SLACK, Problem

# ASSUME: this many groups of regions (of similar ones where there are more classes) and, after them, this many moves of
# classes find the improvements that exist. They bound the time, to one second for patterns of 65,537 tokens.
GROUPS, MOVES = 64, 100
# A move is worth at least this share of the objective.
WORTH = 1e-5


def assign(problem: Problem, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Tile and round of each region, ``(int [B], int [B])``.

    The descent begins at each of the `starts`. A move takes all regions of one tile and round, or those of one class
    among them, to a different tile or round. The best move is made while the objective falls. Raises `InfeasibleError`
    where no start keeps the limits. This does not prove that no schedule exists.
    """
    classes = exact(problem)
    few = classes if len(classes.size) <= GROUPS else Merges(problem, classes).cut(GROUPS)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for tile, rounds in starts(problem):
        for label in (np.zeros_like(few.member), few.member):
            tile, rounds = _descend(problem, objective, label, tile, rounds)
        found.append((tile, rounds))
    best = min(found, key=lambda choice: problem.value(choice[0], choice[1], objective))
    return best if few is classes else _descend(problem, objective, classes.member, *best)


def starts(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Greedy's assignment, and greedy's for each tile that all regions fit, where greedy finds rounds for them.

    Raises the first `InfeasibleError` of greedy where there is none.
    """
    fixed = [problem.allowed & (np.arange(len(problem.tiles)) == s) for s in range(len(problem.tiles))]
    found, refused = [], []
    for allowed in (problem.allowed, *(own for own in fixed if own.any(axis=1).all())):
        try:
            found.append(greedy.assign(replace(problem, allowed=allowed)))
        except InfeasibleError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


def _descend(problem, objective, label, tile, rounds):
    """The assignment after the best moves; regions of one `label` (int [B]) move together."""
    tile, rounds = tile.copy(), rounds.copy()
    value = problem.value(tile, rounds, objective)
    for _ in range(MOVES):
        moved, s, r, after = _best_move(problem, objective, label, tile, rounds)
        if not after < value * (1 - WORTH):
            break
        tile[moved], rounds[moved], value = s, r, after
    return tile, rounds


def _best_move(problem, objective, label, tile, rounds):
    """``(regions bool [B], tile, round, value)`` of the move after which the objective is least; value inf: none."""
    limits, n_tiles, n_rounds = problem.limits, len(problem.tiles), problem.limits.rounds
    keys = (label * n_tiles + tile) * n_rounds + rounds
    key, first, group = np.unique(keys, return_index=True, return_inverse=True)
    own_tile, own_round, every = tile[first], rounds[first], np.arange(len(key))
    # Of each group [G]: work items, units, tiles that all of it may take; and whether its tile goes with it.
    size = np.bincount(group)
    order, begin = np.argsort(group, kind="stable"), np.cumsum(size) - size
    counts, units, refused = (
        np.add.reduceat(x[order], begin) for x in (problem.counts, problem.units, ~problem.allowed)
    )
    allowed = refused == 0
    regions = np.zeros((n_rounds, n_tiles))
    np.add.at(regions, (rounds, tile), 1)
    last = regions[own_round, own_tile] == size
    table = problem.table(tile, rounds)
    held = np.bincount(rounds, problem.units[np.arange(len(tile)), tile], n_rounds)
    left = table[own_round] - np.where(problem.tile_of == own_tile[:, None], counts, 0)
    costs, left_cost = problem.costs_us(table, objective), problem.costs_us(left, objective)
    best = np.inf, 0, 0, 0
    for r in range(n_rounds):
        stays = own_round == r
        for s in range(n_tiles):
            possible = allowed[:, s] & ~(stays & (own_tile == s))
            more = units[:, s] - np.where(stays, units[every, own_tile], 0)
            possible &= held[r] + more <= limits.occupancy * SLACK
            possible &= _compatible(problem, regions[r] > 0, s, np.where(stays & last, own_tile, s))
            if not possible.any():
                continue
            joined = np.where(stays[:, None], left, table[r]) + np.where(problem.tile_of == s, counts, 0)
            after = np.tile(costs, (len(key), 1))
            after[every, own_round] = left_cost
            after[:, r] = problem.costs_us(joined, objective)
            values = np.where(possible, after.sum(axis=1) if objective == "sum" else after.max(axis=1), np.inf)
            g = int(values.argmin())
            best = min(best, (float(values[g]), g, s, r))
    value, g, s, r = best
    return group == g, s, r, value


def _compatible(problem, kinds, s, leaving):
    """bool [G]: whether tile `s` may join the `kinds` (bool [S]) of a round that the tile `leaving` [G] leaves."""
    tiles = np.arange(len(kinds))
    fits = {t: problem.compatible(kinds & (tiles != t) | (tiles == s)) for t in np.unique(leaving).tolist()}
    return np.array([fits[t] for t in leaving.tolist()])

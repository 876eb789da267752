"""The descent heuristic: the best fixed tile and greedy's schedule, improved move by move (stage T4).

Integer programs start from its answer.
"""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from tilewright.attention.schedule import greedy
from tilewright.attention.schedule.problem import SLACK, Choice, Ints, Problem
from tilewright.core.errors import InfeasibleError

# ASSUME: this many groups of regions (of similar ones where there are more classes) and, after them, this many moves of
# classes find the improvements that exist. They bound the time, to one second for patterns of 65,537 tokens.
GROUPS, MOVES = 64, 100
# A move is worth at least this share of the objective.
WORTH = 1e-5
# Above this many classes the linkage takes too much memory for the precision it adds: 8 bytes for each pair.
LINKAGE_LIMIT = 8192


def assign(problem: Problem, objective: str) -> Choice:
    """Tile and round of each region, ``(int [B], int [B])``.

    The descent begins at each of the `starts`. A move takes all regions of one tile and round, or those of one class
    among them, to a different tile or round. The best move is made while the objective falls. Raises
    `InfeasibleError` where no start keeps the limits. This does not prove that no schedule exists.
    """
    first, member = problem.classes
    few = member if len(first) <= GROUPS else _similar(problem)
    found: list[Choice] = []
    for tile, rounds in starts(problem):
        for label in (np.zeros_like(few), few):
            tile, rounds = _descend(problem, objective, label, tile, rounds)
        found.append((tile, rounds))
    best = min(found, key=lambda choice: problem.value(choice[0], choice[1], objective))
    return best if few is member else _descend(problem, objective, member, *best)


def starts(problem: Problem) -> list[Choice]:
    """Greedy's assignment where it finds rounds for it, and those of each tile `alone`.

    Raises the `InfeasibleError` of greedy where there is none.
    """
    found = alone(problem)
    try:
        return [greedy.assign(problem), *found]
    except InfeasibleError:
        if not found:
            raise
    return found


def alone(problem: Problem) -> list[Choice]:
    """Greedy's assignment for each tile that all regions fit, where greedy finds rounds for it."""
    found = []
    for s in np.flatnonzero(problem.allowed.all(axis=0)):
        allowed = problem.allowed & (np.arange(problem.n_tiles) == s)
        with suppress(InfeasibleError):
            found.append(greedy.assign(replace(problem, allowed=allowed)))
    return found


def _similar(problem: Problem) -> Ints:
    """int [B]: `GROUPS` groups of regions, of similar classes: by the tree that merges classes pair by pair, smallest
    error first (Ward's criterion)."""
    from scipy.cluster.hierarchy import fcluster, linkage

    first, member = problem.classes
    load = np.where(problem.allowed, problem.load_us, np.inf)[first]
    regret = load - load.min(axis=1, keepdims=True)
    allowed = np.isfinite(regret)
    needs = (problem.counts[first] > 0) & allowed[:, problem.tile_of]
    # ASSUME: what matters of a tile is whether a launch can pay for its regret, its load beyond the least: regrets near
    # that count in full, larger ones by their logarithm. The weights were chosen by the bound on irregular problems of
    # 600 and 2,048 regions.
    launch = problem.launch_us.mean() or 1.0
    regret = np.where(allowed, regret, 2 * regret[allowed].max()) * np.sqrt(np.bincount(member))[:, None]
    features = np.hstack([np.log1p(3 * regret / launch), 0.75 * needs * problem.launch_us / launch])
    bucket = np.arange(len(features))
    if len(features) > LINKAGE_LIMIT:
        # ASSUME: neighbours in the order of their features are similar enough to be merged beforehand.
        rank = np.lexsort(features.T[::-1])
        bucket[rank] = np.arange(len(features)) * LINKAGE_LIMIT // len(features)
    _, one = np.unique(bucket, return_index=True)
    label = fcluster(linkage(features[one], "ward"), GROUPS, "maxclust")
    return np.unique(label, return_inverse=True)[1][bucket][member]


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
    limits, n_tiles, n_rounds = problem.limits, problem.n_tiles, problem.limits.rounds
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


def _compatible(problem, held, s, leaving):
    """bool [G]: whether tile `s` may join those `held` (bool [S]) by a round that the tile `leaving` [G] leaves."""
    tiles = np.arange(len(held))
    fits = {t: problem.compatible(held & (tiles != t) | (tiles == s)) for t in np.unique(leaving).tolist()}
    return np.array([fits[t] for t in leaving.tolist()])

"""The descent heuristic: the best fixed option and greedy's schedule, improved move by move (stage T4).

Integer programs start from its answer.
"""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from tilewright.attention.schedule import greedy
from tilewright.attention.schedule._region_classes import Merges, exact
from tilewright.attention.schedule.problem import SLACK, Problem
from tilewright.core.errors import InfeasibleError

# ASSUME: this many groups of regions (of similar ones where there are more classes) and, after them, this many moves of
# classes find the improvements that exist. They bound the time, to one second for patterns of 65,537 tokens.
GROUPS, MOVES = 64, 100
# A move is worth at least this share of the objective.
WORTH = 1e-5


def assign(problem: Problem, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Option and round of each region, ``(int [B], int [B])``.

    The descent begins at each of the `starts`. A move takes all regions of one option and round, or those of one class
    among them, to a different option or round. The best move is made while the objective falls. Raises
    `InfeasibleError` where no start keeps the limits. This does not prove that no schedule exists.
    """
    classes = exact(problem)
    few = classes if len(classes.size) <= GROUPS else Merges(problem, classes).cut(GROUPS)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for option, rounds in starts(problem, objective):
        for label in (np.zeros_like(few.member), few.member):
            option, rounds = _descend(problem, objective, label, option, rounds)
        found.append((option, rounds))
    best = min(found, key=lambda choice: problem.value(choice[0], choice[1], objective))
    return best if few is classes else _descend(problem, objective, classes.member, *best)


def starts(problem: Problem, objective: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Greedy's assignment where it finds rounds for it, and those of each option `alone`; and where tiles have several
    options, the answer of descent with the first of each tile alone.

    Raises the `InfeasibleError` of greedy where there is none.
    """
    found, refused = [], []
    try:
        found.append(greedy.assign(problem))
    except InfeasibleError as error:
        refused.append(error)
    found += alone(problem)
    if problem.has_splits:
        with suppress(InfeasibleError):
            only, first = problem.first_options()
            option, rounds = assign(only, objective)
            found.append((first[option], rounds))
    if not found:
        raise refused[0]
    return found


def alone(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Greedy's assignment for each option that all regions fit, where greedy finds rounds for it."""
    fixed = (problem.allowed & (np.arange(problem.n_options) == o) for o in range(problem.n_options))
    found = []
    for allowed in (own for own in fixed if own.any(axis=1).all()):
        with suppress(InfeasibleError):
            found.append(greedy.assign(replace(problem, allowed=allowed)))
    return found


def _descend(problem, objective, label, option, rounds):
    """The assignment after the best moves; regions of one `label` (int [B]) move together."""
    option, rounds = option.copy(), rounds.copy()
    value = problem.value(option, rounds, objective)
    for _ in range(MOVES):
        moved, o, r, after = _best_move(problem, objective, label, option, rounds)
        if not after < value * (1 - WORTH):
            break
        option[moved], rounds[moved], value = o, r, after
    return option, rounds


def _best_move(problem, objective, label, option, rounds):
    """``(regions bool [B], option, round, value)`` of the move after which the objective is least; value inf: none."""
    limits, n_options, n_rounds = problem.limits, problem.n_options, problem.limits.rounds
    keys = (label * n_options + option) * n_rounds + rounds
    key, first, group = np.unique(keys, return_index=True, return_inverse=True)
    own_option, own_round, every = option[first], rounds[first], np.arange(len(key))
    # Of each group [G]: work items, units, options that all of it may take; and whether its option goes with it.
    size = np.bincount(group)
    order, begin = np.argsort(group, kind="stable"), np.cumsum(size) - size
    counts, units, refused = (
        np.add.reduceat(x[order], begin) for x in (problem.counts, problem.units, ~problem.allowed)
    )
    allowed = refused == 0
    regions = np.zeros((n_rounds, n_options))
    np.add.at(regions, (rounds, option), 1)
    last = regions[own_round, own_option] == size
    table = problem.table(option, rounds)
    held = np.bincount(rounds, problem.units[np.arange(len(option)), option], n_rounds)
    left = table[own_round] - np.where(problem.option_of == own_option[:, None], counts, 0)
    costs, left_cost = problem.costs_us(table, objective), problem.costs_us(left, objective)
    best = np.inf, 0, 0, 0
    for r in range(n_rounds):
        stays = own_round == r
        for o in range(n_options):
            possible = allowed[:, o] & ~(stays & (own_option == o))
            more = units[:, o] - np.where(stays, units[every, own_option], 0)
            possible &= held[r] + more <= limits.occupancy * SLACK
            possible &= _compatible(problem, regions[r] > 0, o, np.where(stays & last, own_option, o))
            if not possible.any():
                continue
            joined = np.where(stays[:, None], left, table[r]) + np.where(problem.option_of == o, counts, 0)
            after = np.tile(costs, (len(key), 1))
            after[every, own_round] = left_cost
            after[:, r] = problem.costs_us(joined, objective)
            values = np.where(possible, after.sum(axis=1) if objective == "sum" else after.max(axis=1), np.inf)
            g = int(values.argmin())
            best = min(best, (float(values[g]), g, o, r))
    value, g, o, r = best
    return group == g, o, r, value


def _compatible(problem, held, o, leaving):
    """bool [G]: whether option `o` may join those `held` (bool [O]) by a round that the option `leaving` [G] leaves."""
    options = np.arange(len(held))
    fits = {t: problem.compatible(held & (options != t) | (options == o)) for t in np.unique(leaving).tolist()}
    return np.array([fits[t] for t in leaving.tolist()])

"""Polishing turns the answer of a merged model into an exact assignment.

The rounds of the regions, the tile kinds of the rounds and their launches are given. Then the best choice for each
region is the option of its least load (C4, C6). A merged class hides what its members need beyond what they share. So
launches are added where a region has none; then they are added and dropped one by one while the objective falls.
"""

import numpy as np

from tilewright.attention.schedule.problem import Problem


def assign(problem: Problem, rounds: np.ndarray, launched: np.ndarray, held: np.ndarray, objective: str) -> np.ndarray:
    """Option of each region, int [B].

    rounds: int [B], round of each region. launched: bool [L, R], launches of the model. held:
    bool [S, R], tile kinds that a round may hold; each region must be allowed on a tile of its round.
    """
    load = np.where(problem.allowed & held[problem.tile_of][:, rounds].T, problem.load_us, np.inf)
    needs = problem.counts > 0
    launched = launched & held[problem.launch_tile]

    def missing(launched, weight):
        return (needs & ~launched[problem.launch_of][:, rounds].T) @ (problem.of_option * weight[:, None])

    def choose(launched):
        usable = np.where(missing(launched, np.ones(len(needs.T))) == 0, load, np.inf)
        return usable.argmin(axis=1), usable.min(axis=1) < np.inf

    launched = launched.copy()
    _, served = choose(launched)
    for b in np.flatnonzero(~served):
        o = (load[b] / problem.limits.lanes + missing(launched, problem.launch_us)[b]).argmin()
        launched[problem.launch_of[needs[b] & problem.of_option[:, o]], rounds[b]] = True
    option, _ = choose(launched)
    best, improved = problem.value(option, rounds, objective), True
    while improved:
        improved = False
        for n, r in zip(*np.nonzero(held[problem.launch_tile]), strict=True):
            trial = launched.copy()
            trial[n, r] ^= True
            candidate, served = choose(trial)
            value = problem.value(candidate, rounds, objective) if served.all() else np.inf
            if value < best * (1 - 1e-9) and problem.feasible(candidate, rounds):
                option, launched, best, improved = candidate, trial, value, True
    return option

"""The best paths for budgets by a model that no solver takes: a local search that begins where programs end.

Of all budgets together, and of all bases: a neighbour of the best path of one budget may be the best of another.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from tilewright.networks.path import Path
from tilewright_study.planning import block_sets
from tilewright_study.planning.accuracy import Losses
from tilewright_study.planning.latency import Latency
from tilewright_study.planning.program import SAME, SAME_US, Proposal
from tilewright_study.planning.surrogate import Surrogate

NAME = "searched"


def improved(
    times: Mapping[Path, Latency],
    seen: Mapping[Path, Losses | Surrogate],
    plans: Sequence[Mapping[float, Proposal | None]],
) -> dict[float, Proposal | None]:
    """The best proposal that is found for each budget of `plans`, as `program.plan` returns them: none that is
    predicted to see less than theirs.

    times, seen: models of each base. Of each budget's best path those are tried that differ in one block or two, and
    those that skip the same blocks of another base, until no budget has a better one.
    """
    begin = perf_counter()
    budgets = np.array(sorted({budget for plan in plans for budget in plan}))
    best, held = np.full(len(budgets), -np.inf), [None] * len(budgets)
    fresh: dict[Path, list] = {base: [] for base in times}
    for proposal in (proposal for plan in plans for proposal in plan.values() if proposal is not None):
        fresh[block_sets.base_of(proposal.path)].append(block_sets.skips(proposal.path)[None])
    spread: set = set()
    tried: dict[Path, set] = {base: set() for base in times}
    while any(fresh.values()):
        for base, asked in fresh.items():
            skips = _untried(asked, tried[base])
            if len(skips):
                met = np.searchsorted(budgets, times[base].base_us - skips @ times[base].saved_us - SAME_US)
                _take(base, skips, met, seen[base].accuracies(skips), best, held)
        fresh = {base: [] for base in times}
        for base, skips in filter(None, held):
            if (base, skips.tobytes()) not in spread:
                spread.add((base, skips.tobytes()))
                fresh[base].append(_neighbours(skips))
                for other in fresh.keys() - {base}:
                    if block_sets.free(other) == block_sets.free(base):
                        fresh[other].append(skips[None])
    seconds = (perf_counter() - begin) / len(budgets)
    found: dict = {}
    for budget, accuracy, choice in zip(budgets.tolist(), best.tolist(), held, strict=True):
        path = choice and block_sets.with_skips(*choice)
        found[budget] = path and Proposal(path, times[choice[0]].predict(path), accuracy, NAME, seconds)
    return found


def _untried(asked, tried):
    """The rows of `asked`, arrays of skips, that are not in `tried`, and are from now on: bool [paths, blocks]."""
    rows = {row.tobytes(): row for part in asked for row in part}
    new = [row for key, row in rows.items() if key not in tried]
    tried.update(rows)
    return np.array(new, dtype=bool)


def _take(base, skips, met, accuracies, best, held):
    """Let each budget hold what sees most of what it had and of a base's `skips`; met: the first budget each meets."""
    order = np.lexsort((-accuracies, met))
    places, firsts = np.unique(met[order], return_index=True)
    of_place, top = dict(zip(places.tolist(), order[firsts].tolist(), strict=True)), None
    for place in range(len(best)):
        at = of_place.get(place)
        if at is not None and (top is None or accuracies[at] > accuracies[top]):
            top = at
        if top is not None and accuracies[top] > best[place] + SAME:
            best[place], held[place] = accuracies[top], (base, skips[top])


def _neighbours(skips):
    """bool [paths, blocks]: those that differ in one block or in two."""
    each = np.eye(len(skips), dtype=bool)
    first, second = np.triu_indices(len(skips), 1)
    return skips ^ np.vstack((each, each[first] ^ each[second]))

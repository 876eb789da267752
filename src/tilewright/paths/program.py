"""Which blocks of a base to skip so that a budget of time is met at the least predicted loss: an integer program.

``min sum a_i d_i + sum b_ij y_ij`` with ``sum delta_i d_i >= T_base - budget``, ``y_ij = d_i d_j`` by three rows, and d
binary. Programs go to the solvers of stage T4; ``exhaustive`` asks the same of all sets of blocks, where these can be
listed, and ``greedy`` skips one block after the other. Of several optima, the one with fewer skips is taken, then the
one whose text comes first, so that plans are reproducible.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from tilewright import milp
from tilewright.core import registry
from tilewright.core.errors import SolverError
from tilewright.milp import Model
from tilewright.networks.path import Path
from tilewright.paths import exhaustive, space
from tilewright.paths.accuracy import Losses
from tilewright.paths.latency import Latency

# Losses beyond the least that count as the least, and microseconds that count as none.
SAME, SAME_US = 1e-9, 1e-6
# Blocks whose order is decided by one program: numbers of skips times 2 ** 16 and weights of 1 stand in one objective.
AT_ONCE = 16
# Parts that budgets are planned in, for each core: from one budget to the next of its part most of what was found stays
# the best, and parts take unlike times. More than so many in all solve what a neighbour has solved: with the recorded
# table of B2 and 48 budgets 83 programs in one part, 108 in 16, 192 in 48.
PARTS = 3
MOST_PARTS = 16


@dataclass(frozen=True)
class Proposal:
    """A path of a base for a budget. us, accuracy: as predicted. solver: that found it, in so many seconds."""

    path: Path
    us: float
    accuracy: float
    solver: str
    seconds: float


def propose(latency: Latency, losses: Losses, budget_us: float, solver: str, *, without=(), time_limit_s: float = 10.0):
    """The `Proposal` of a base for a budget, or None where no set of skips meets it.

    without: paths that are not to be proposed again (no-good cuts). Raises `SolverError` where a solver gives up.
    """
    if solver == "exhaustive":
        return _listed(exhaustive.Sets(latency, losses), budget_us, without)
    found = _optimal(latency, losses, budget_us, solver, without, time_limit_s)
    return found and _earliest(found, latency, losses, budget_us, without, time_limit_s)


def _listed(sets, budget_us, without=()):
    """The `Proposal` of `Sets` for a budget."""
    begin = perf_counter()
    need = sets.latency.base_us - budget_us - SAME_US
    skips = sets.least(need, [space.skips(path) for path in without], same=SAME)
    return _proposal(sets.latency, sets.losses, skips, "exhaustive", begin)


def _optimal(latency, losses, budget_us, solver, without, time_limit_s):
    """One `Proposal` of those that lose least; greedy's is the only one that greedy has."""
    begin = perf_counter()
    cut, need = [space.skips(path) for path in without], latency.base_us - budget_us
    if solver == "greedy":
        skips = greedy(latency.saved_us, losses, need, cut)
    else:
        point = _point(_met(latency, losses, need, cut), solver, time_limit_s)
        skips = None if point is None else point[: len(latency.saved_us)] > 0.5
    return _proposal(latency, losses, skips, solver, begin)


def _earliest(found, latency, losses, budget_us, without, time_limit_s):
    """Of the proposals that lose as little as `found`, that of the fewest skips, and of those the earliest text."""
    if found.solver == "greedy":
        return found
    begin = perf_counter() - found.seconds
    blocks, skips = len(latency.saved_us), space.skips(found.path)
    program = _met(latency, losses, latency.base_us - budget_us, [space.skips(path) for path in without])
    bounded = _with_row(program, program.cost, float(losses.loss(skips)) + float(program.cost[-1]) + SAME)
    for lo in range(0, blocks, AT_ONCE):
        places = np.arange(lo, min(lo + AT_ONCE, blocks))
        # A 0 comes before a 1 in a path's text, so that skips of early blocks come first. The number of skips outweighs
        # them, the constant keeps the objective above zero.
        order = np.zeros(len(program.cost))
        if not lo:
            order[:blocks] = 2.0**AT_ONCE
        order[places] -= 2.0 ** (AT_ONCE - 1 - np.arange(len(places)))
        order[-1] = 2.0**AT_ONCE
        point = _point(_with_cost(bounded, order), found.solver, time_limit_s)
        bounded = _with_row(bounded, order, float(np.round(order @ point)))
    return _proposal(latency, losses, point[:blocks] > 0.5, found.solver, begin)


def _met(latency, losses, need_us, cut):
    """The `model` of a need. One that only rounding keeps from being met is met."""
    return model(latency.saved_us, losses, need_us - SAME_US, cut)


def _proposal(latency, losses, skips, solver, begin):
    """The `Proposal` of skips that were looked for since `begin`; None for none."""
    if skips is None:
        return None
    path = space.with_skips(losses.base, skips)
    return Proposal(path, latency.predict(path), losses.predict(path), solver, perf_counter() - begin)


def plan(models, budgets_us, solver: str, *, time_limit_s: float = 10.0) -> dict[float, Proposal | None]:
    """The best proposal of several bases for each budget, None where none meets it.

    models: pairs of `Latency` and `Losses`, one a base. Each core takes neighbouring budgets.
    """
    budgets = sorted(set(budgets_us), reverse=True)
    if solver == "exhaustive":
        sets = [exhaustive.Sets(*model) for model in models]
        return {budget: best(_listed(each, budget) for each in sets) for budget in budgets}
    if solver == "greedy":
        steps = [list(_greedily(latency.saved_us, losses)) for latency, losses in models]
        return {budget: best(map(partial(_stepped, budget), models, steps)) for budget in budgets}
    return _in_parts(lambda part: _planned(models, part, solver, time_limit_s), budgets)


def _planned(models, budgets_us, solver, time_limit_s):
    """`plan` of budgets that fall: what met the one before and meets this one stays the best of its base, and no base
    gets better than it was, which saves most programs. Which of several optima is taken is asked of the best base."""
    found: dict = {}
    latest: dict[Any, Any] = {}
    taken: dict = {}
    for budget in budgets_us:
        made: dict = {}
        # Those that were best come first: of the others, what was worse before need not be solved again.
        for place in sorted(range(len(models)), key=lambda at: -latest[at].accuracy if latest.get(at) else np.inf):
            held = latest.get(place)
            again = place not in latest or (held is not None and not _meets(held, budget))
            if again and held and (leading := best(made.values())) and held.accuracy < leading.accuracy - SAME:
                continue
            if again:
                held = latest[place] = _optimal(*models[place], budget, solver, (), time_limit_s)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
            if held is not None:
                made[place] = held
        top = best(made.values())
        for place in [place for place, held in made.items() if top and held.accuracy >= top.accuracy - SAME]:
            if taken.get(place) is not latest[place]:
                taken[place] = latest[place] = _earliest(latest[place], *models[place], budget, (), time_limit_s)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
            made[place] = latest[place]
        found[budget] = best(made.values())
    return found


def runners_up(models, plans, solver: str, *, time_limit_s: float = 10.0) -> dict[float, Proposal | None]:
    """The best proposal beside that of each budget, of the same base; `plans` as `plan` returns them."""
    by_base = {losses.base: (times, losses) for times, losses in models}
    if solver == "exhaustive":
        firsts = {budget: plans[budget] for budget in sorted(plans, reverse=True)}
        sets = {base: exhaustive.Sets(*by_base[base]) for base in {space.base_of(p.path) for p in firsts.values() if p}}
        return {
            budget: first and _listed(sets[space.base_of(first.path)], budget, [first.path])
            for budget, first in firsts.items()
        }

    def beside(budgets):
        found: dict = {}
        before = (None, None)
        for budget in budgets:
            first = plans[budget]
            if first is None:
                found[budget] = None
                continue
            path, held = before
            if path != first.path or (held is not None and not _meets(held, budget)):
                own = by_base[space.base_of(first.path)]
                held = propose(*own, budget, solver, without=[first.path], time_limit_s=time_limit_s)
            found[budget], before = held, (first.path, held)
        return found

    return _in_parts(beside, sorted(plans, reverse=True))


def _in_parts(work, budgets):
    """``work(part)`` of parts of `budgets`, a dict by budget, joined. Solvers let other threads run."""
    cores = len(os.sched_getaffinity(0))
    parts = max(1, min(PARTS * cores, MOST_PARTS, len(budgets)))
    ends = np.linspace(0, len(budgets), parts + 1).round().astype(int)
    with ThreadPoolExecutor(cores) as pool:
        made = pool.map(work, [budgets[lo:hi] for lo, hi in pairwise(ends)])
        return {budget: proposal for part in made for budget, proposal in part.items()}


def _meets(proposal, budget_us):
    return proposal.us <= budget_us + SAME_US


def best(proposals) -> Proposal | None:
    """The proposal of the highest predicted accuracy: fewer skips, then the earlier text, where several are equal."""
    found = [proposal for proposal in proposals if proposal is not None]
    if not found:
        return None
    top = max(proposal.accuracy for proposal in found)
    equal = [proposal for proposal in found if proposal.accuracy >= top - SAME]
    return min(equal, key=lambda proposal: (int(space.skips(proposal.path).sum()), str(proposal.path)))


def greedy(saved_us, losses: Losses, need_us: float, without=()):
    """Skips, one after the other, of the block that loses least for a microsecond saved; None where that fails."""
    return _first(_greedily(saved_us, losses), saved_us, need_us, without)


def _first(steps, saved_us, need_us, without=()):
    """The first of `steps`, each bool [blocks], that saves enough and is none of `without`; None for none."""
    cuts = {tuple(cut) for cut in without}
    return next((skips for skips in steps if saved_us @ skips >= need_us - SAME_US and tuple(skips) not in cuts), None)


def _greedily(saved_us, losses):
    """What `greedy` skips, bool [blocks], step by step from nothing: the same steps for all budgets."""
    skips = np.zeros(len(saved_us), dtype=bool)
    while True:
        yield skips.copy()
        before, rates = float(losses.loss(skips)), {}
        for block in np.flatnonzero(~skips & (saved_us > 0)):
            more = skips.copy()
            more[block] = True
            rates[block] = (float(losses.loss(more)) - before) / saved_us[block]
        if not rates:
            return
        skips[min(rates, key=lambda place: rates[place])] = True


def _stepped(budget_us, model, steps):
    """The `Proposal` of greedy's `steps` for a budget."""
    (latency, losses), begin = model, perf_counter()
    skips = _first(steps, latency.saved_us, latency.base_us - budget_us)
    return _proposal(latency, losses, skips, "greedy", begin)


def model(saved_us, losses: Losses, need_us: float, without=()) -> Model:
    """The program in the record that solvers take: skips, then products of pairs, then a constant of 1.

    The constant's cost keeps every objective above zero, as `Solution.gap` assumes.
    """
    blocks, pairs = len(saved_us), len(losses.pairs)
    columns = blocks + pairs + 1
    constant = -float(np.minimum(losses.single, 0).sum() + np.minimum(losses.pair, 0).sum()) + 1.0
    rows = [(dict(enumerate(saved_us)), need_us, np.inf)]
    for number, (i, j) in enumerate(losses.pairs):
        y = blocks + number
        # The least loss presses a product down where it costs, up where it pays: the other bounds never bind.
        if losses.pair[number] > 0:
            rows.append(({y: 1.0, i: -1.0, j: -1.0}, -1.0, np.inf))
        else:
            rows += [({y: -1.0, i: 1.0}, 0.0, np.inf), ({y: -1.0, j: 1.0}, 0.0, np.inf)]
    rows += [_no_good(cut) for cut in without]
    return _record(
        np.concatenate((losses.single, losses.pair, [constant])),
        rows,
        np.concatenate((np.zeros(columns - 1), [1.0])),
        np.arange(columns) < blocks,
        (*(f"skip_{i}" for i in range(blocks)), *(f"both_{i}_{j}" for i, j in losses.pairs), "constant"),
    )


def _no_good(skips):
    """The row that `skips` breaks, and nothing else: at least one block differs."""
    signs = np.where(skips, -1.0, 1.0)
    return dict(enumerate(signs)), 1.0 - float(np.sum(skips)), np.inf


def _record(cost, rows, lower, integers, names):
    start = np.cumsum([0, *(len(row) for row, _, _ in rows)])
    column = [place for row, _, _ in rows for place in sorted(row)]
    value = [row[place] for row, _, _ in rows for place in sorted(row)]
    return Model(
        cost=np.asarray(cost, dtype=np.float64),
        start=start.astype(np.int32),
        column=np.array(column, dtype=np.int32),
        value=np.array(value, dtype=np.float64),
        row_lower=np.array([low for _, low, _ in rows], dtype=np.float64),
        row_upper=np.array([high for _, _, high in rows], dtype=np.float64),
        lower=np.asarray(lower, dtype=np.float64),
        upper=np.ones(len(cost)),
        integrality=integers,
        names=names,
    )


def _point(program, solver, time_limit_s):
    """The optimum, its binaries rounded, or None where there is none. Raises `SolverError` otherwise."""
    member = registry.member(milp.__name__, "solver", solver, milp.NAMES)
    found = member.solve(program, time_limit_s=time_limit_s, gap=0.0, seed=0, threads=1)
    if found.status == "infeasible":
        return None
    if found.status != "optimal":
        raise SolverError(f"{solver}: expected the optimum of a program of paths, found none in {time_limit_s} s")
    blocks = int(program.integrality.sum())
    x = np.array(found.x)
    x[:blocks] = np.round(x[:blocks])
    return x


def _with_cost(program, cost):
    return Model(**(vars(program) | {"cost": cost}))


def _with_row(program, row, most):
    """`program` with ``row @ x <= most``."""
    column = np.flatnonzero(row).astype(np.int32)
    fields = vars(program) | {
        "start": np.append(program.start, program.start[-1] + len(column)).astype(np.int32),
        "column": np.append(program.column, column).astype(np.int32),
        "value": np.append(program.value, row[column]),
        "row_lower": np.append(program.row_lower, -np.inf),
        "row_upper": np.append(program.row_upper, most),
    }
    return Model(**fields)

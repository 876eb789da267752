"""Which blocks of a base to skip so that a budget of time is met at the least predicted loss: an integer program.

``min sum a_i d_i + sum b_ij y_ij`` with ``sum delta_i d_i >= T_base - budget``, ``y_ij = d_i d_j`` by three rows, and d
binary. Programs go to the solvers of stage T4; ``exhaustive`` asks the same of all sets of blocks, where these can be
listed.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from tilewright import milp
from tilewright.core import registry
from tilewright.core.errors import SolverError
from tilewright.milp import Model
from tilewright.networks.path import Path
from tilewright_study.planning import block_sets
from tilewright_study.planning.accuracy import Losses
from tilewright_study.planning.exhaustive import Sets
from tilewright_study.planning.latency import Latency

# Losses beyond the least that count as the least, and microseconds that count as none.
SAME, SAME_US = 1e-9, 1e-6
# Of all sets of blocks instead of a solver.
EXHAUSTIVE = "exhaustive"


@dataclass(frozen=True)
class Proposal:
    """A path of a base for a budget. us, accuracy: as predicted. solver: that found it, in so many seconds."""

    path: Path
    us: float
    accuracy: float
    solver: str
    seconds: float


def propose(
    latency: Latency, losses: Losses, budget_us: float, solver: str, *, time_limit_s: float = 10.0
) -> Proposal | None:
    """The `Proposal` of a base for a budget, or None where no set of skips meets it.

    Raises `SolverError` where a solver gives up.
    """
    return _of_base((latency, losses), [budget_us], solver, time_limit_s)[budget_us]


def plan(
    models: Sequence[tuple[Latency, Losses]], budgets_us: Iterable[float], solver: str, *, time_limit_s: float = 10.0
) -> dict[float, Proposal | None]:
    """The best proposal of several bases for each budget, None where none meets it.

    models: of each base. Bases share the cores: solvers let other threads run.
    """
    budgets = sorted(set(budgets_us), reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        of_bases = [*pool.map(lambda model: _of_base(model, budgets, solver, time_limit_s), models)]
    return {budget: best(found[budget] for found in of_bases) for budget in budgets}


def _of_base(model, budgets_us, solver, time_limit_s):
    """``{budget: Proposal or None}`` of budgets that fall: what meets the next one, too, stays the best."""
    latency, losses = model
    skips_for = _skips_for(latency, losses, solver, time_limit_s)
    found: dict[float, Proposal | None] = {}
    held = None
    for budget in budgets_us:
        if not found or (held is not None and held.us > budget + SAME_US):
            begin = perf_counter()
            # A need that only rounding keeps from being met is met.
            skips = skips_for(latency.base_us - budget - SAME_US)
            held = None if skips is None else _proposal(latency, losses, skips, solver, begin)
        found[budget] = held
    return found


def _skips_for(latency, losses, solver, time_limit_s) -> Callable:
    """``skips_for(need_us)``: what loses least of all that saves so much, bool [blocks], or None."""
    if solver == EXHAUSTIVE:
        return partial(Sets(latency, losses).least, same=SAME)
    return lambda need_us: _optimum(model(latency.saved_us, losses, need_us), solver, time_limit_s)


def _proposal(latency, losses, skips, solver, begin):
    path = block_sets.with_skips(losses.base, skips)
    return Proposal(path, latency.predict(path), losses.predict(path), solver, perf_counter() - begin)


def best(proposals: Iterable[Proposal | None]) -> Proposal | None:
    """The proposal of the highest predicted accuracy: fewer skips, then the earlier text, where several are equal."""
    found = [proposal for proposal in proposals if proposal is not None]
    if not found:
        return None
    top = max(proposal.accuracy for proposal in found)
    equal = [proposal for proposal in found if proposal.accuracy >= top - SAME]
    return min(equal, key=lambda proposal: (int(block_sets.skips(proposal.path).sum()), str(proposal.path)))


def model(saved_us: np.ndarray, losses: Losses, need_us: float) -> Model:
    """The program in the record that solvers take: skips, then products of pairs, then a constant of 1.

    The constant's cost keeps every objective above zero, as `Solution.gap` assumes.
    """
    blocks, pairs = len(saved_us), len(losses.pairs)
    columns = blocks + pairs + 1
    constant = -float(np.minimum(losses.single, 0).sum() + np.minimum(losses.pair, 0).sum()) + 1.0
    rows: list[tuple[dict[int, float], float]] = [(dict(enumerate(saved_us)), need_us)]
    for number, (i, j) in enumerate(losses.pairs):
        y = blocks + number
        # The least loss presses a product down where it costs, up where it pays: the other bounds never bind.
        if losses.pair[number] > 0:
            rows.append(({y: 1.0, i: -1.0, j: -1.0}, -1.0))
        else:
            rows += [({y: -1.0, i: 1.0}, 0.0), ({y: -1.0, j: 1.0}, 0.0)]
    return Model(
        cost=np.concatenate((losses.single, losses.pair, [constant])),
        start=np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int32),
        column=np.array([place for row, _ in rows for place in sorted(row)], dtype=np.int32),
        value=np.array([row[place] for row, _ in rows for place in sorted(row)], dtype=np.float64),
        row_lower=np.array([least for _, least in rows], dtype=np.float64),
        row_upper=np.full(len(rows), np.inf),
        lower=np.concatenate((np.zeros(columns - 1), [1.0])),
        upper=np.ones(columns),
        integrality=np.arange(columns) < blocks,
    )


def _optimum(program, solver, time_limit_s):
    """The skips of the optimum, bool [blocks], or None where there is none. Raises `SolverError` otherwise."""
    member = registry.member(milp.__name__, "solver", solver, milp.NAMES)
    found = member.solve(program, time_limit_s=time_limit_s, gap=0.0, seed=0, threads=1)
    if found.status == "infeasible":
        return None
    if found.status != "optimal":
        raise SolverError(f"{solver}: expected the optimum of a program of paths, found none in {time_limit_s} s")
    return np.array(found.x)[: int(program.integrality.sum())] > 0.5

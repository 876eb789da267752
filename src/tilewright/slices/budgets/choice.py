"""One share of the keys for each head, so that the error is least under a limit of time: a multiple-choice knapsack.

``min sum e_ij x_ij`` with ``sum_j x_ij = 1`` for each head i, ``sum t_ij x_ij <= limit`` and x binary. Errors add up as
those of heads do that have nothing to do with each other. Solvers are those of `tilewright.milp`; beside them are
``greedy``, which buys the largest fall of the error per time, and ``single``, the best share for all heads alike.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from tilewright import milp
from tilewright.core import registry
from tilewright.core.errors import ConfigError, SolverError

NAMES = (*milp.NAMES, "greedy", "single")
# What a total of times may exceed a limit by, relative: what solvers hold rows to.
SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Choice:
    """One share for each head: `chosen` numbers of shares, int [...], as errors and times are laid out.

    error, us: sums. status, gap: of a solver; others have ``chosen`` and infinity. seconds: that it took.
    """

    chosen: np.ndarray
    error: float
    us: float
    solver: str
    status: str
    gap: float
    seconds: float


def choose(
    errors: np.ndarray, us: np.ndarray, limit_us: float, solver: str = "highs", *, time_limit_s: float = 30.0
) -> Choice:
    """The `Choice` of least error whose time is at most a limit.

    errors, us: float64 [..., shares], by head and share; the time of a head ascends with the share. Raises
    `ConfigError` for a limit that nothing meets and for arrays that are none, and `SolverError` where a solver finds
    nothing.
    """
    registry.check("solver", solver, NAMES)
    errors, us = np.asarray(errors, dtype=np.float64), np.asarray(us, dtype=np.float64)
    if errors.shape != us.shape or not errors.size or not (np.isfinite(errors) & np.isfinite(us)).all():
        raise ConfigError(f"errors, times: expected finite numbers of one shape, found {errors.shape} and {us.shape}")
    if min(errors.min(), us.min()) < 0:
        raise ConfigError("errors, times: expected numbers of at least 0, found less")
    flat_errors, flat_us = (x.reshape(-1, x.shape[-1]) for x in (errors, us))
    least = float(flat_us.min(1).sum())
    if not least <= limit_us * (1 + SLACK):
        raise ConfigError(f"limit: expected at least the {least:.6g} us of the smallest shares, found {limit_us:.6g}")
    begin, status, gap = perf_counter(), "chosen", np.inf
    if solver == "single":
        chosen = _single(flat_errors, flat_us, limit_us)
        if chosen is None:
            raise ConfigError(f"limit: expected one that a single share for all heads meets, found {limit_us:.6g} us")
    else:
        chosen = _greedy(flat_errors, flat_us, limit_us)
    if solver in milp.NAMES:
        chosen, status, gap = _solved(flat_errors, flat_us, limit_us, chosen, solver, time_limit_s)
    error, total = (float(_taken(x, chosen).sum()) for x in (flat_errors, flat_us))
    return Choice(chosen.reshape(errors.shape[:-1]), error, total, solver, status, gap, perf_counter() - begin)


def violations(chosen: np.ndarray, errors: np.ndarray, us: np.ndarray, limit_us: float) -> list[str]:
    """What is wrong with numbers of shares, whatever chose them; an empty list where nothing is."""
    chosen = np.asarray(chosen)
    if chosen.shape != errors.shape[:-1] or chosen.dtype.kind not in "iu":
        return [f"expected integers of shape {errors.shape[:-1]}, found {chosen.dtype} of {chosen.shape}"]
    if chosen.min() < 0 or chosen.max() >= errors.shape[-1]:
        return [f"expected numbers of {errors.shape[-1]} shares, found {chosen.min()} to {chosen.max()}"]
    # Added up one by one: nothing of what chose them is used.
    total = sum(float(us[(*place, chosen[place])]) for place in np.ndindex(chosen.shape))
    return [] if total <= limit_us * (1 + SLACK) else [f"expected at most {limit_us:.6g} us, found {total:.6g}"]


def model(errors: np.ndarray, us: np.ndarray, limit_us: float) -> milp.Model:
    """The program in the record that solvers take: errors and us [heads, shares], a variable for each.

    Times are in limits, so that all rows are of one size, and errors in the mean of a head.
    """
    heads, shares = errors.shape
    count = heads * shares
    return milp.Model(
        cost=errors.ravel() / (errors.mean() or 1.0),
        start=np.array([*range(0, count + 1, shares), 2 * count], dtype=np.int32),
        column=np.tile(np.arange(count, dtype=np.int32), 2),
        value=np.concatenate((np.ones(count), us.ravel() / (limit_us or 1.0))),
        row_lower=np.append(np.ones(heads), -np.inf),
        row_upper=np.ones(heads + 1),
        lower=np.zeros(count),
        upper=np.ones(count),
        integrality=np.ones(count, dtype=bool),
    )


def _taken(x, chosen):
    return np.take_along_axis(x, chosen[:, None], 1)[:, 0]


def _single(errors, us, limit_us):
    """The number of the best share for all heads alike, for each head; None where none meets the limit."""
    fits = us.sum(0) <= limit_us * (1 + SLACK)
    best = np.where(fits, errors.sum(0), np.inf).argmin()
    return np.full(len(errors), best) if fits[best] else None


def _greedy(errors, us, limit_us):
    """From the cheapest shares, the largest fall of the error per time as long as one fits; no worse than `_single`."""
    chosen, left = us.argmin(1), limit_us * (1 + SLACK) - us.min(1).sum()
    while True:
        fall, more = _taken(errors, chosen)[:, None] - errors, us - _taken(us, chosen)[:, None]
        rate = np.where((fall > 0) & (more <= left), fall / np.maximum(more, 1e-30), 0.0)
        head, share = np.unravel_index(rate.argmax(), rate.shape)
        if rate[head, share] <= 0:
            break
        left -= more[head, share]
        chosen[head] = share
    single = _single(errors, us, limit_us)
    if single is not None and _taken(errors, single).sum() < _taken(errors, chosen).sum():
        return single
    return chosen


def _solved(errors, us, limit_us, start, solver, time_limit_s):
    """``(chosen, status, gap)`` of a solver that starts from a choice; never worse than that."""
    program = model(errors, us, limit_us)
    point = np.zeros(errors.shape)
    np.put_along_axis(point, start[:, None], 1.0, 1)
    member = registry.member(milp.__name__, "solver", solver, milp.NAMES)
    found = member.solve(program, time_limit_s=time_limit_s, gap=1e-6, seed=0, threads=1, start=point.ravel())
    if found.status == "infeasible":
        raise SolverError(f"{solver}: expected a choice of shares, found the program infeasible")
    if found.x is None:
        return start, found.status, np.inf
    chosen = np.asarray(found.x).reshape(errors.shape).argmax(1)
    # Solvers hold rows to within a tolerance of theirs.
    if violations(chosen, errors, us, limit_us) or _taken(errors, chosen).sum() > _taken(errors, start).sum():
        return start, found.status, found.gap
    return chosen, found.status, found.gap

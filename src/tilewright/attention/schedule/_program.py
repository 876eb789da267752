"""The integer program of a scheduling problem, and the way back from its answer (stage T4).

Variables, for class c, option o (a tile and a split length), tile s, launch l and round r:
    n[c,o,r]: regions of class c that run with option o in round r; integer, and binary where a class is one region.
    w[l,r]: round r holds launch l. y[o,r]: it holds option o. z[s,r]: it holds tile s. u[r]: it is used. All binary.
        Where every tile has one option, z is y.
    T[r]: duration of round r in microseconds; top: the longest of them (objective ``paper`` only). e[r]: part of it for
        which the lanes are filled and emptied; only where a round may hold several options, else it follows from y.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tilewright.attention.schedule import _polish
from tilewright.attention.schedule._region_classes import Merges, RegionClasses, exact
from tilewright.attention.schedule.problem import Problem
from tilewright.core.errors import SolverError
from tilewright.milp import Model


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of each variable: n [C, O, R] (-1 where C2 excludes the option), w [L, R], y [O, R], z [S, R], u [R], e
    [R] or none, T [R]; top: T or -1."""

    n: np.ndarray
    w: np.ndarray
    y: np.ndarray
    z: np.ndarray
    u: np.ndarray
    e: np.ndarray
    t: np.ndarray
    top: int


class _Rows:
    """Collects sparse rows block by block."""

    def __init__(self):
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.bounds: list[tuple[np.ndarray, np.ndarray]] = []
        self.count = 0

    def add(self, row: ArrayLike, column: ArrayLike, value: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> None:
        """Add ``max(row) + 1`` rows of the entries (row, column, value), broadcast against each other."""
        row, column, value = np.broadcast_arrays(row, column, value)
        if not row.size:
            return
        n = int(row.max()) + 1
        self.parts.append((row.ravel() + self.count, column.ravel(), value.ravel().astype(float)))
        self.bounds.append((np.broadcast_to(lower, n).astype(float), np.broadcast_to(upper, n).astype(float)))
        self.count += n

    def pairs(self, left: ArrayLike, left_value: ArrayLike, right: ArrayLike, right_value: ArrayLike) -> None:
        """Add rows ``left_value * x[left] + right_value * x[right] <= 0``, element by element."""
        left, left_value, right, right_value = map(np.ravel, np.broadcast_arrays(left, left_value, right, right_value))
        row = np.tile(np.arange(len(left)), 2)
        self.add(row, np.r_[left, right], np.r_[left_value, right_value], -np.inf, 0.0)

    def compressed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(start, column, value)`` of `Model`."""
        row, column, value = map(np.concatenate, zip(*self.parts, strict=True))
        order = np.lexsort((column, row))
        row, column = row[order], column[order]
        # Entries of one place are added, as for a tile that conflicts with itself.
        first = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(column, prepend=-1))
        value = np.add.reduceat(value[order], first)
        start = np.searchsorted(row[first], np.arange(self.count + 1))
        return start.astype(np.int32), column[first].astype(np.int32), value


def fit(problem: Problem, objective: str, budget: tuple[int, int] | None) -> tuple[RegionClasses, Model, Columns]:
    """The model of `problem` over its exact classes, or over as many merged ones as the model has room for.

    budget: ``(variables, constraints)``, the most that the model may have, or None. Raises `SolverError` when
    not even the fewest classes fit.
    """
    classes = exact(problem)
    model, columns = build(problem, classes, objective)
    if budget is None or _fits(model, budget):
        return classes, model, columns
    tree, low, high = Merges(problem, classes), 1, len(classes.size)
    best, smallest = None, model.size
    while low < high:
        middle = (low + high) // 2
        classes = tree.cut(middle)
        model, columns = build(problem, classes, objective)
        if _fits(model, budget):
            best, low = (classes, model, columns), middle + 1
        else:
            smallest, high = model.size, middle
    if best is None:
        raise SolverError(
            f"the smallest model of this problem has {smallest['variables']:,} variables and "
            f"{smallest['constraints']:,} constraints; the size budget allows {budget[0]:,} and {budget[1]:,}: "
            "use fewer tiles or rounds"
        )
    return best


def _fits(model, budget):
    return model.size["variables"] <= budget[0] and model.size["constraints"] <= budget[1]


def build(problem: Problem, classes: RegionClasses, objective: str) -> tuple[Model, Columns]:
    """Return ``(Model, Columns)`` of `problem` over `classes` for the objective ``sum`` or ``paper``."""
    limits, rounds = problem.limits, problem.limits.rounds
    columns = _columns(problem, classes, objective)
    n, w, y, z, u, t = columns.n, columns.w, columns.y, columns.z, columns.u, columns.t
    width, every = _width(columns), np.arange(rounds)
    c, option = np.nonzero(classes.allowed)
    chosen = n[c, option]  # [choices, R]
    rows = _Rows()
    # C1: each region once. Its choices excluded by C2 have no column.
    rows.add(c[:, None], chosen, 1.0, classes.size, classes.size)
    # C3: a choice launches what it needs, a launch belongs to a tile kind, a kind to a used round.
    choice, shape = _links(problem, classes)
    rows.pairs(chosen[choice], 1.0, w[problem.launch_of[shape]], -classes.size[c[choice], None].astype(float))
    rows.pairs(w, 1.0, z[problem.launch_tile], -1.0)
    if z is not y:
        # Options of one tile may share all of their launches: what one costs beside them needs a row of its own.
        paid = problem.tile_us[option] > 0
        rows.pairs(chosen[paid], 1.0, y[option[paid]], -classes.size[c[paid], None].astype(float))
    rows.pairs(z, 1.0, u[None, :], -1.0)
    if limits.max_tile_kinds < len(problem.tiles):
        rows.add(every, z, 1.0, -np.inf, limits.max_tile_kinds)
    # C4: a round lasts as long as its longest item, and as its load over the lanes, filled and emptied.
    rows.pairs(w, _launched_alone_us(problem)[:, None], t[None, :], -1.0)
    share = classes.load_us[c, option, None] / limits.lanes
    uneven, uneven_us = y, np.repeat(problem.tile_us, rounds)
    if len(columns.e):
        # As the option does it that takes longest for it, which is no less than the mean of all that are there.
        rows.pairs(y, problem.tile_us[:, None], columns.e, -1.0)
        mean = uneven_us / _most_options(problem)
        rows.add(
            np.r_[np.tile(every, len(y)), every], np.r_[y.ravel(), columns.e], np.r_[mean, -np.ones(rounds)], -np.inf, 0
        )
        uneven, uneven_us = columns.e[None, :], np.ones(rounds)
    rows.add(
        np.r_[np.tile(every, len(chosen)), np.tile(every, len(uneven)), every],
        np.r_[chosen.ravel(), uneven.ravel(), t],
        np.r_[np.broadcast_to(share, chosen.shape).ravel(), uneven_us, -np.ones(rounds)],
        -np.inf,
        0.0,
    )
    if classes.form == "merged":
        # The envelopes of C4 undercount; the least loads, added up exactly, and the regrets must be paid all
        # the same.
        regret = np.broadcast_to(classes.regret_us[c, option, None] / limits.lanes, chosen.shape)
        work = -classes.base_us.sum() / limits.lanes
        costs = np.r_[regret.ravel(), uneven_us, -np.ones(rounds)]
        rows.add(0, np.r_[chosen.ravel(), uneven.ravel(), t], costs, -np.inf, work)
    # C5: envelopes of the tile kinds of a round.
    for name, need in problem.envelope.items():
        if need.sum() > limits.envelope[name]:
            rows.add(every, z, need[:, None], -np.inf, limits.envelope[name])
    # C6: occupancy of the items of a round.
    units = np.broadcast_to(classes.units[c, option, None], chosen.shape)
    if (classes.size @ np.where(classes.allowed, classes.units, 0.0).max(axis=1)) > limits.occupancy:
        rows.add(every, chosen, units, -np.inf, limits.occupancy)
    # C7: conflicting tiles share no round.
    for a, b in problem.conflicts:
        rows.add(np.tile(every, 2), np.r_[z[a], z[b]], 1.0, -np.inf, 1.0)
    # Rounds are interchangeable: the longest comes first, unused ones last.
    if limits.fork_us:
        # A round that is used holds a tile: the first of its tiles costs no fork.
        tiles = len(problem.tiles)
        rows.add(
            np.r_[np.tile(every, tiles), every],
            np.r_[z.ravel(), u],
            np.r_[-np.ones(z.size), np.ones(rounds)],
            -np.inf,
            0,
        )
    rows.pairs(t[1:], 1.0, t[:-1], -1.0)
    rows.pairs(u[1:], 1.0, u[:-1], -1.0)
    if columns.top >= 0:
        rows.pairs(t, 1.0, columns.top, -1.0)

    cost, upper = np.zeros(width), np.ones(width)
    if objective == "sum":
        cost[w], cost[t] = problem.each_launch_us[:, None], 1.0
        cost[z], cost[u] = limits.fork_us, limits.round_us - limits.fork_us
    else:
        cost[columns.top] = 1.0
    upper[chosen] = classes.size[c, None]
    real = min(columns.e.min(initial=width), t.min())
    upper[real:] = np.inf
    integrality = np.ones(width, bool)
    integrality[real:] = False
    row_lower, row_upper = map(np.concatenate, zip(*rows.bounds, strict=True))
    names = _names(columns)
    return Model(cost, *rows.compressed(), row_lower, row_upper, np.zeros(width), upper, integrality, names), columns


def encode(
    problem: Problem, classes: RegionClasses, columns: Columns, option: np.ndarray, rounds: np.ndarray
) -> np.ndarray:
    """The point x of an assignment (option and round of each region), its rounds renumbered longest first."""
    counts = problem.table(option, rounds)
    duration = problem.round_us(counts)
    rank = np.argsort(-duration, kind="stable")
    x = np.zeros(_width(columns))
    new = np.argsort(rank)
    np.add.at(x, columns.n[classes.member, option, new[rounds]], 1.0)
    present = (counts[rank] > 0).T
    for columns_of, group in (
        (columns.w, problem.launch_of),
        (columns.y, problem.option_of),
        (columns.z, problem.tile_of[problem.option_of]),
    ):
        np.maximum.at(x, columns_of[group], present)
    x[columns.u] = present.any(axis=0)
    if len(columns.e):
        x[columns.e] = (x[columns.y] * problem.tile_us[:, None]).max(axis=0)
    x[columns.t] = duration[rank]
    if columns.top >= 0:
        x[columns.top] = duration.max()
    return x


def decode(
    problem: Problem, classes: RegionClasses, columns: Columns, x: np.ndarray, objective: str
) -> tuple[np.ndarray, np.ndarray]:
    """Option and round of each region, ``(int [B], int [B])``, from an answer `x`.

    Members of an exact class are interchangeable: any of them may take any place of the class. Members of a *merged*
    class differ. The answer then says how many of them run in each round and what the round launches;
    `_polish.assign` chooses their options.
    """
    rounds_n, options_n = problem.limits.rounds, problem.n_options
    number = np.where(columns.n >= 0, np.rint(x[columns.n]), 0).astype(np.int64)
    place = np.tile(np.arange(options_n * rounds_n), len(classes.size))
    chosen = np.empty(problem.n_regions, np.int64)
    chosen[np.argsort(classes.member, kind="stable")] = np.repeat(place, number.ravel())
    option, rounds = chosen // rounds_n, chosen % rounds_n
    if classes.form == "merged":
        option = _polish.assign(problem, rounds, x[columns.w] > 0.5, x[columns.z] > 0.5, objective)
    return option, rounds


def _columns(problem, classes, objective):
    rounds, tiles, options = problem.limits.rounds, len(problem.tiles), problem.n_options
    start = 0

    def take(*shape):
        nonlocal start
        taken = np.arange(start, start + int(np.prod(shape))).reshape(shape)
        start += taken.size
        return taken

    n = np.full((*classes.allowed.shape, rounds), -1)
    n[classes.allowed] = take(int(classes.allowed.sum()), rounds)
    w, z = take(problem.n_launches, rounds), take(tiles, rounds)
    y = z if options == tiles else take(options, rounds)
    u, e = take(rounds), take(rounds if problem.tile_us.any() and _most_options(problem) > 1 else 0)
    t = take(rounds)
    return Columns(n, w, y, z, u, e, t, start if objective == "paper" else -1)


def _most_options(problem):
    """Options that a round may hold."""
    of_tiles = np.sort(np.bincount(problem.tile_of, minlength=len(problem.tiles)))[::-1]
    return int(of_tiles[: problem.limits.max_tile_kinds].sum())


def _width(columns):
    return max(int(columns.t.max()), columns.top) + 1


def _links(problem, classes):
    """Pairs (choice, shape): the choices are the allowed (class, option) in order."""
    c, option = np.nonzero(classes.allowed)
    return np.nonzero(classes.needs[c] & (problem.option_of == option[:, None]))


def _launched_alone_us(problem):
    """float [L]: the longest item of each launch, alone; of several options, the shortest of theirs."""
    alone_us = np.full(problem.n_launches, np.inf)
    np.minimum.at(alone_us, problem.launch_of, problem.alone_us)
    return alone_us


def _names(columns):
    names = np.empty(_width(columns), object)
    for name in ("n", "w", "z", "y", "u", "e", "t"):
        place = getattr(columns, name)
        for index in zip(*np.nonzero(place >= 0), strict=True):
            names[place[index]] = f"{name}[{','.join(map(str, index))}]"
    if columns.top >= 0:
        names[columns.top] = "top"
    return tuple(names)

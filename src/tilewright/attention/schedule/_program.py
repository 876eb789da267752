"""The integer program of a scheduling problem, and the way back from its answer (stage T4).

Variables, for class c of regions, tile s, shape k and round r:
    n[c,s,r]: regions of class c that run with tile s in round r; integer, and binary where a class is one region.
    w[k,r]: round r launches shape k. z[s,r]: it holds tile s. u[r]: it is used. All binary.
    T[r]: duration of round r in microseconds; top: the longest of them (objective ``paper`` only). e[r]: part of it for
        which the lanes are filled and emptied; only where a round may hold several tiles, else it follows from z.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewright.attention.schedule.problem import Choice, Ints, Problem
from tilewright.milp import Model


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of each variable: n [C, S, R] (-1 where C2 excludes the tile), w [K, R], z [S, R], u [R], e [R] or none,
    T [R]; top: T or -1."""

    n: Ints
    w: Ints
    z: Ints
    u: Ints
    e: Ints
    t: Ints
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
        start = np.searchsorted(row[order], np.arange(self.count + 1))
        return start.astype(np.int32), column[order].astype(np.int32), value[order]


def build(problem: Problem, objective: str) -> tuple[Model, Columns]:
    """Return ``(Model, Columns)`` of `problem` over its classes of regions for the objective ``sum`` or ``paper``."""
    limits, rounds = problem.limits, problem.limits.rounds
    first, member = problem.classes
    size, allowed = np.bincount(member), problem.allowed[first]
    columns = _columns(problem, objective)
    n, w, z, u, t = columns.n, columns.w, columns.z, columns.u, columns.t
    width, every = _width(columns), np.arange(rounds)
    c, tile = np.nonzero(allowed)
    chosen = n[c, tile]  # [choices, R]
    rows = _Rows()
    # C1: each region once. Its choices excluded by C2 have no column.
    rows.add(c[:, None], chosen, 1.0, size, size)
    # C3: a choice launches the shapes that it needs, a launch belongs to a tile kind, a kind to a used round.
    choice, shape = np.nonzero((problem.counts[first[c]] > 0) & (problem.tile_of == tile[:, None]))
    rows.pairs(chosen[choice], 1.0, w[shape], -size[c[choice], None].astype(float))
    rows.pairs(w, 1.0, z[problem.tile_of], -1.0)
    rows.pairs(z, 1.0, u[None, :], -1.0)
    if limits.max_tile_kinds < problem.n_tiles:
        rows.add(every, z, 1.0, -np.inf, limits.max_tile_kinds)
    # C4: a round lasts as long as its longest item, and as its load over the lanes, filled and emptied.
    rows.pairs(w, problem.alone_us[:, None], t[None, :], -1.0)
    share = problem.load_us[first][c, tile, None] / limits.lanes
    uneven, uneven_us = z, np.repeat(problem.tile_us, rounds)
    if len(columns.e):
        # As the tile does it that takes longest for it, which is no less than the mean of all that are there.
        rows.pairs(z, problem.tile_us[:, None], columns.e, -1.0)
        mean = uneven_us / _most_kinds(problem)
        rows.add(
            np.r_[np.tile(every, len(z)), every], np.r_[z.ravel(), columns.e], np.r_[mean, -np.ones(rounds)], -np.inf, 0
        )
        uneven, uneven_us = columns.e[None, :], np.ones(rounds)
    rows.add(
        np.r_[np.tile(every, len(chosen)), np.tile(every, len(uneven)), every],
        np.r_[chosen.ravel(), uneven.ravel(), t],
        np.r_[np.broadcast_to(share, chosen.shape).ravel(), uneven_us, -np.ones(rounds)],
        -np.inf,
        0.0,
    )
    # C5: envelopes of the tile kinds of a round.
    for name, need in problem.envelope.items():
        if need.sum() > limits.envelope[name]:
            rows.add(every, z, need[:, None], -np.inf, limits.envelope[name])
    # C6: occupancy of the items of a round.
    units = problem.units[first]
    if (size @ np.where(allowed, units, 0.0).max(axis=1)) > limits.occupancy:
        rows.add(every, chosen, np.broadcast_to(units[c, tile, None], chosen.shape), -np.inf, limits.occupancy)
    # Rounds are interchangeable: the longest comes first, unused ones last.
    rows.pairs(t[1:], 1.0, t[:-1], -1.0)
    rows.pairs(u[1:], 1.0, u[:-1], -1.0)
    if columns.top >= 0:
        rows.pairs(t, 1.0, columns.top, -1.0)

    cost, upper = np.zeros(width), np.ones(width)
    if objective == "sum":
        cost[w], cost[t], cost[u] = problem.launch_us[:, None], 1.0, limits.round_us
    else:
        cost[columns.top] = 1.0
    upper[chosen] = size[c, None]
    real = min(columns.e.min(initial=width), t.min())
    upper[real:] = np.inf
    integrality = np.ones(width, bool)
    integrality[real:] = False
    row_lower, row_upper = map(np.concatenate, zip(*rows.bounds, strict=True))
    return Model(cost, *rows.compressed(), row_lower, row_upper, np.zeros(width), upper, integrality), columns


def encode(problem: Problem, columns: Columns, tile: Ints, rounds: Ints) -> NDArray[np.float64]:
    """The point x of an assignment (tile and round of each region), its rounds renumbered longest first."""
    counts = problem.table(tile, rounds)
    duration = problem.round_us(counts)
    rank = np.argsort(-duration, kind="stable")
    x = np.zeros(_width(columns))
    new = np.argsort(rank)
    _, member = problem.classes
    np.add.at(x, columns.n[member, tile, new[rounds]], 1.0)
    present = (counts[rank] > 0).T
    x[columns.w] = present
    np.maximum.at(x, columns.z[problem.tile_of], present)
    x[columns.u] = present.any(axis=0)
    if len(columns.e):
        x[columns.e] = (x[columns.z] * problem.tile_us[:, None]).max(axis=0)
    x[columns.t] = duration[rank]
    if columns.top >= 0:
        x[columns.top] = duration.max()
    return x


def decode(problem: Problem, columns: Columns, x: NDArray[np.floating]) -> Choice:
    """Tile and round of each region, ``(int [B], int [B])``, from an answer `x`.

    Members of a class are interchangeable: any of them may take any place of the class.
    """
    _, member = problem.classes
    number = np.where(columns.n >= 0, np.rint(x[columns.n]), 0).astype(np.int64)
    place = np.tile(np.arange(problem.n_tiles * problem.limits.rounds), len(columns.n))
    chosen = np.empty(problem.n_regions, np.int64)
    chosen[np.argsort(member, kind="stable")] = np.repeat(place, number.ravel())
    return np.divmod(chosen, problem.limits.rounds)


def _columns(problem, objective):
    rounds, allowed = problem.limits.rounds, problem.allowed[problem.classes[0]]
    start = 0

    def take(*shape):
        nonlocal start
        taken = np.arange(start, start + int(np.prod(shape))).reshape(shape)
        start += taken.size
        return taken

    n = np.full((*allowed.shape, rounds), -1)
    n[allowed] = take(int(allowed.sum()), rounds)
    w, z, u = take(len(problem.tile_of), rounds), take(problem.n_tiles, rounds), take(rounds)
    e = take(rounds if problem.tile_us.any() and _most_kinds(problem) > 1 else 0)
    return Columns(n, w, z, u, e, take(rounds), start if objective == "paper" else -1)


def _most_kinds(problem):
    """Tiles that a round may hold."""
    return min(problem.limits.max_tile_kinds, problem.n_tiles)


def _width(columns):
    return max(int(columns.t.max()), columns.top) + 1

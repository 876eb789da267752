"""Start cycles of all statements: a linear program of differences that keeps the fewest words alive.

With the strides of `rates`, iteration i of s runs at ``strides·i + start``. A read of p by c is legal if the word is
there: ``start_c - start_p >= gap``. The matrix is totally unimodular, so HiGHS answers in whole numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.program import Program


@dataclass(frozen=True)
class Edge:
    """A read. low, high: the least and largest cycles from the write to the read, both starting at 0."""

    statement: str
    read: int
    buffer: str
    low: int
    high: int


@dataclass(frozen=True)
class Schedule:
    """Strides of the loops and start cycle of every input and statement."""

    strides: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    edges: tuple[Edge, ...]
    last_cycle: int

    def distance(self, edge: Edge) -> tuple[int, int]:
        """Least and largest cycles from write to read."""
        shift = self.starts[edge.statement] - self.starts[edge.buffer]
        return edge.low + shift, edge.high + shift

    def times(self, name: str, extents: Sequence[int]) -> np.ndarray:
        """int64, of the shape `extents`: the cycle of each iteration of a statement, or of each word of an input."""
        grid = np.indices(extents, dtype=np.int64, sparse=True)
        steps = sum((g * k for g, k in zip(grid, self.strides[name], strict=True)), np.zeros(extents, np.int64))
        return steps + self.starts[name]


def written(program: Program, strides: dict[str, tuple[int, ...]], name: str) -> tuple[tuple[int, ...], int]:
    """``(strides, offset)``: word a of buffer `name` is there at ``strides·a + offset`` after its statement starts."""
    for s in program.statements:
        if s.name == name:
            tail = sum(k * (e - 1) for k, e in zip(strides[name][s.rank :], s.extents[s.rank :], strict=True))
            return strides[name][: s.rank], tail
    return strides[name], 0


def finished(program: Program, strides: dict[str, tuple[int, ...]], name: str) -> int:
    """Cycles from the start of the writes of a buffer to its last word."""
    steps, offset = written(program, strides, name)
    return offset + sum(k * (e - 1) for k, e in zip(steps, program.buffers[name].shape, strict=True))


def gaps(program: Program, strides: dict[str, tuple[int, ...]]) -> list[Edge]:
    """The edge of every read."""
    found: dict[tuple, tuple[int, int]] = {}
    edges = []
    for s in program.statements:
        grid, now = s.grid, sum(s.grid[n] * k for n, k in zip(s.loops, strides[s.name], strict=True))
        for k, read in enumerate(s.reads):
            theirs, offset = written(program, strides, read.buffer)
            asked = s.needed[k]
            key = s.loops, s.extents, strides[s.name], read.indices, theirs, offset, asked is None or asked.tobytes()
            if key not in found:
                waits = now - sum(i.evaluate(grid) * step for i, step in zip(read.indices, theirs, strict=True))
                waits = s.asked(k, waits)
                found[key] = int(waits.min()) - offset, int(waits.max()) - offset
            edges.append(Edge(s.name, k, read.buffer, *found[key]))
    return edges


def schedule(
    program: Program,
    strides: dict[str, tuple[int, ...]],
    slack: Mapping[str, int] | None = None,
    whole: Mapping[str, int] | None = None,
) -> Schedule:
    """The start cycles that keep the fewest words alive: of each buffer the largest cycles from write to read, summed.

    slack: least cycles from write to read of a buffer whose distances vary, as the memory needs them. whole: of such
    buffers, least cycles from the start of the writes to that of a read, whatever it reads. Raises `ProgramError` where
    HiGHS finds no answer.
    """
    edges = gaps(program, strides)
    names = [*program.inputs, *(s.name for s in program.statements)]
    column = {n: j for j, n in enumerate(names)}
    alive = {n: len(names) + j for j, n in enumerate(sorted({e.buffer for e in edges}))}
    rows, bounds = np.zeros((2 * len(edges), len(names) + len(alive))), np.zeros(2 * len(edges))
    for k, e in enumerate(edges):
        least = (0 if slack is None or e.low == e.high else slack[e.buffer]) - e.low
        if whole is not None and e.low != e.high:
            least = max(least, whole[e.buffer])
        # A difference of starts is at least this, and with the largest distance no more than what is alive.
        rows[2 * k, column[e.statement]] -= 1
        rows[2 * k, column[e.buffer]] += 1
        rows[2 * k + 1] = -rows[2 * k]
        rows[2 * k + 1, alive[e.buffer]] = -1
        bounds[2 * k], bounds[2 * k + 1] = -least, -e.high
    # Starts break ties only: their weight is less than that of one cycle of one buffer.
    cost = np.concatenate([np.full(len(names), 1e-4 / max(1, len(names))), np.ones(len(alive))])
    answer = linprog(cost, A_ub=rows, b_ub=bounds, bounds=(0, None), method="highs")
    if answer.status:
        raise ProgramError(f"the schedule has no solution: {answer.message}")
    starts = {n: round(answer.x[column[n]]) for n in names}
    last = max([0, *(finished(program, strides, n) + starts[n] for n in program.outputs)])
    return Schedule(strides, starts, tuple(edges), last)

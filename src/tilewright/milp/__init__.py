"""Solvers of the neutral `Model`, one module each; adding one is a file and a name.

A module offers ``available() -> bool`` (its package is installed here) and
``solve(model, *, time_limit_s, gap, seed, threads, start=None, log=None) -> Solution``. start: a feasible point or
None. log: called with each line of progress.

A solver without a licence, or with one that is too small for the model, raises `SolverUnavailableError`; so does an
optional solver without its package. Each solver maps its statuses by a table; a status that the table does not hold
raises `SolverError`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NAMES = ("highs", "gurobi")


@dataclass(frozen=True, eq=False)
class Model:
    """Minimise ``cost @ x`` with ``row_lower <= rows @ x <= row_upper`` and ``lower <= x <= upper``.

    A solver sees nothing else. There are m rows and n columns.

    start: int32 [m + 1], column: int32, value: float64: row i holds ``value[start[i]:start[i+1]]`` in the columns
        ``column[start[i]:start[i+1]]``, which ascend.
    integrality: bool [n], which variables are integers.
    """

    cost: np.ndarray
    start: np.ndarray
    column: np.ndarray
    value: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integrality: np.ndarray

    @property
    def rows(self) -> "csr_array":
        """The rows as a `scipy.sparse.csr_array` [m, n], for solvers that take one. SciPy is imported only here."""
        from scipy.sparse import csr_array

        return csr_array((self.value, self.column, self.start), shape=(len(self.row_lower), len(self.cost)))

    @property
    def size(self) -> dict[str, int]:
        """``{"variables", "integers", "constraints", "nonzeros"}``."""
        return {
            "variables": len(self.cost),
            "integers": int(self.integrality.sum()),
            "constraints": len(self.row_lower),
            "nonzeros": len(self.value),
        }


@dataclass(frozen=True, eq=False)
class Solution:
    """The answer of a solver.

    x: float [n] or None. status: ``optimal`` (within the gap), ``feasible`` (a limit was reached), ``infeasible`` or
        ``unsolved`` (a limit was reached without a point). bound: proven lower bound. gap: relative to the objective,
        inf without a point. seconds: wall time.
    """

    x: np.ndarray | None
    status: str
    objective: float
    bound: float
    gap: float
    seconds: float


def relative_gap(objective: float, bound: float) -> float:
    """``(objective - bound) / objective``, 0 for an objective of 0."""
    return max(0.0, objective - bound) / objective if objective > 0 else 0.0

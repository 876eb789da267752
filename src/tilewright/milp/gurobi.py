"""Gurobi. The package from PyPI carries a licence for small models; a full licence lifts the limit."""

from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter

import numpy as np

from tilewright.core.errors import SolverError, SolverUnavailableError
from tilewright.milp import Model, Solution, relative_gap

# Most variables and most linear constraints of the licence that comes with the package (gurobipy 13, measured).
FREE_SIZE = 2000
# GRB.Error.NO_LICENSE and GRB.Error.SIZE_LIMIT_EXCEEDED.
NO_LICENCE, TOO_LARGE = 10009, 10010
STATUSES = {
    "OPTIMAL": "optimal",
    "INFEASIBLE": "infeasible",
    # Costs and variables are never negative, so that a model cannot be unbounded.
    "INF_OR_UNBD": "infeasible",
    "TIME_LIMIT": "feasible",
}
_REMEDY = "use --solver highs, or install a full Gurobi licence"


def available() -> bool:
    """True when the package is installed."""
    return find_spec("gurobipy") is not None


def solve(
    model: Model,
    *,
    time_limit_s: float,
    gap: float,
    seed: int,
    threads: int,
    start: np.ndarray | None = None,
    log: Callable[[str], None] | None = None,
) -> Solution:
    """Solve `model`; see the package's contract."""
    if not available():
        raise SolverUnavailableError(
            "the solver 'gurobi' needs the package gurobipy, which is not installed: "
            "pip install gurobipy, or use --solver highs"
        )
    try:
        import gurobipy as gp
    except ImportError as error:
        raise SolverUnavailableError(f"gurobipy cannot be imported: {error}: use --solver highs") from error

    try:
        with gp.Env(empty=True) as env:
            env.setParam("OutputFlag", int(log is not None))
            env.setParam("LogToConsole", 0)
            env.start()
            with gp.Model(env=env) as program:
                for name, value in (("TimeLimit", time_limit_s), ("MIPGap", gap), ("Seed", seed), ("Threads", threads)):
                    program.setParam(name, value)
                return _run(gp, program, model, start, log)
    except gp.GurobiError as error:
        kind = SolverUnavailableError if error.errno in (NO_LICENCE, TOO_LARGE) else SolverError
        raise kind(_explain(error, model)) from error


def _run(gp, program, model, start, log):
    kinds = np.where(model.integrality, gp.GRB.INTEGER, gp.GRB.CONTINUOUS)
    x = program.addMVar(len(model.cost), lb=model.lower, ub=model.upper, obj=model.cost, vtype=kinds)
    # Row by row: a matrix would have to be one of scipy, whose import takes longer.
    variables, columns, values = x.tolist(), model.column.tolist(), model.value.tolist()
    equal = model.row_lower == model.row_upper
    for rows, sense, side in (
        (equal, "=", model.row_upper),
        (~equal & np.isfinite(model.row_upper), "<", model.row_upper),
        (~equal & np.isfinite(model.row_lower), ">", model.row_lower),
    ):
        for i in np.flatnonzero(rows):
            entries = slice(model.start[i], model.start[i + 1])
            program.addLConstr(gp.LinExpr(values[entries], [variables[j] for j in columns[entries]]), sense, side[i])
    if start is not None:
        x.Start = start

    def progress(program, where):
        if where == gp.GRB.Callback.MESSAGE and log:
            log(program.cbGet(gp.GRB.Callback.MSG_STRING).rstrip())

    begin = perf_counter()
    program.optimize(progress)
    seconds = perf_counter() - begin
    names = {getattr(gp.GRB.Status, name): name for name in dir(gp.GRB.Status) if name.isupper()}
    found = names.get(program.Status, str(program.Status))
    if found not in STATUSES:
        raise SolverError(f"gurobi ended with status {found}; known: {', '.join(STATUSES)}")
    status = STATUSES[found]
    if status == "infeasible":
        return Solution(None, status, np.inf, np.inf, np.inf, seconds)
    if not program.SolCount:
        return Solution(None, "unsolved", np.inf, program.ObjBound, np.inf, seconds)
    objective, bound = program.ObjVal, program.ObjBound
    return Solution(np.asarray(x.X), status, objective, bound, relative_gap(objective, bound), seconds)


def _explain(error, model):
    variables, constraints = model.size["variables"], model.size["constraints"]
    if error.errno == TOO_LARGE:
        return (
            f"the model has {variables:,} variables and {constraints:,} constraints; Gurobi's size-limited licence "
            f"allows {FREE_SIZE:,} of each: {_REMEDY}"
        )
    if error.errno == NO_LICENCE:
        return (
            f"gurobi found no valid licence ({error}) for {variables:,} variables and {constraints:,} constraints: "
            f"{_REMEDY}"
        )
    return f"gurobi failed with error {error.errno}: {error}"

"""HiGHS, the embedded default (Huangfu and Hall, 2018; MIT licence, no size limit)."""

from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter

import numpy as np

from tilewright.core.errors import SolverError
from tilewright.milp import Model, Solution, relative_gap

STATUSES = {
    "kOptimal": "optimal",
    "kInfeasible": "infeasible",
    # Costs and variables are never negative, so that a model cannot be unbounded.
    "kUnboundedOrInfeasible": "infeasible",
    "kTimeLimit": "feasible",
}


def available() -> bool:
    """True when the package is installed."""
    return find_spec("highspy") is not None


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
        raise SolverError("the solver 'highs' needs the package highspy, which is not installed: pip install highspy")
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("log_to_console", False)
    if log:
        highs.setOptionValue("output_flag", True)
        highs.cbLogging.subscribe(lambda event: log(event.message.rstrip()))
    for option, value in (
        ("time_limit", float(time_limit_s)),
        ("mip_rel_gap", float(gap)),
        ("random_seed", int(seed)),
        ("threads", int(threads)),
    ):
        highs.setOptionValue(option, value)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost, model.lower, model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = model.start, model.column, model.value
    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    lp.integrality_ = [kinds[int(i)] for i in model.integrality]
    highs.passModel(lp)
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = list(start)
        highs.setSolution(point)
    begin = perf_counter()
    highs.run()
    seconds = perf_counter() - begin

    found = highs.getModelStatus().name
    if found not in STATUSES:
        raise SolverError(f"highs ended with status {found}; known: {', '.join(STATUSES)}")
    status, info = STATUSES[found], highs.getInfo()
    if status == "infeasible":
        return Solution(None, status, np.inf, np.inf, np.inf, seconds)
    objective, bound = info.objective_function_value, info.mip_dual_bound
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Solution(None, "unsolved", np.inf, bound, np.inf, seconds)
    x = np.asarray(highs.getSolution().col_value)
    return Solution(x, status, objective, bound, relative_gap(objective, bound), seconds)

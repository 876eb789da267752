"""Schedules: which tile covers each region, in which round, and in what order (stage T4).

`Schedule` is the contract between the solvers, the checker and the executors: an executor runs its work list as it stands.
"""

from dataclasses import dataclass

import numpy as np

KIND = "schedule"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """An ordered work list with its prediction and its proof.

    Work, one entry per work item in execution order (I items):
        tile: int16 [I], index into `tiles`. block: int32 [I]. run_lo, run_hi: int64 [I], runs of the tile's blocks file.
        cls: int32 [I], shape class of the tile's `work.items`. split: bool [I]. round: int16 [I], ascending.
        slot: int16 [I] and start_us: float64 [I], the predicted placement (list scheduling, longest first).
    tiles: tile names; blocks_ids, blocks_paths, profile_paths: one per tile. A schedule need not use all of them.
    solver: greedy, highs or gurobi. status: optimal, feasible (limit reached) or heuristic. form: how regions were modelled
        (``classes`` or ``regions``). objective: ``sum`` or ``paper`` (the maximum over rounds).
    predicted_us: makespan recomputed from the work list. objective_us, bound_us, gap: of the model as solved.
    lower_bounds: named bounds on any schedule, in microseconds (work, longest, ...).
    model_size: ``{"variables", "integers", "constraints", "nonzeros"}``; solve_s: wall time in the solver.
    """

    graph_id: str
    tiles: tuple[str, ...]
    blocks_ids: tuple[str, ...]
    blocks_paths: tuple[str, ...]
    profile_paths: tuple[str, ...]
    split_keys: int | None
    slots: int
    solver: str
    status: str
    form: str
    objective: str
    predicted_us: float
    objective_us: float
    bound_us: float
    gap: float
    lower_bounds: dict[str, float]
    model_size: dict[str, int]
    solve_s: float
    device_id: str
    tile: np.ndarray
    block: np.ndarray
    run_lo: np.ndarray
    run_hi: np.ndarray
    cls: np.ndarray
    split: np.ndarray
    round: np.ndarray
    slot: np.ndarray
    start_us: np.ndarray

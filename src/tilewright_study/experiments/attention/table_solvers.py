"""The solvers side by side on every problem: objective, bound, gap, time and size, beside the greedy prediction.

Both solvers on every scheduling problem of the study: objective, proven bound and gap, time and size of the model,
beside the greedy prediction. Objectives tie where the optimum is proven; assignments need not.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "status": ("status", ""),
    "variables": ("variables", ",.0f"),
    "constraints": ("constraints", ",.0f"),
    "objective_us": ("objective (µs)", ",.1f"),
    "bound_us": ("bound (µs)", ",.1f"),
    "gap": ("gap", ".2%"),
    "solve_s": ("time (s)", ".2f"),
    "predicted_us": ("predicted (µs)", ",.1f"),
    "greedy_us": ("greedy predicted (µs)", ",.1f"),
    "gain": ("predicted gain on greedy", "+.2%"),
    "reason": ("why skipped", ""),
}
_NUMBERS = (
    *("predicted_us", "solve_s", "objective_us", "bound_us", "gap"),
    *("variables", "integers", "constraints", "nonzeros"),
)


def needs(config):
    """Schedules of every tile set that leaves a choice, by every solver."""
    return _select.schedules(config)


def table(inputs):
    """One row per schedule; ``gain`` is ``1 - predicted / greedy``, above zero where the solver is better.

    A solver that could not run has the status ``skipped``, the reason, and no numbers.
    """
    import numpy as np
    import pandas as pd

    from tilewright_study import schedules

    rows = []
    for path, plan in _read.by_kind(inputs, schedule=schedules.read)["schedule"].items():
        model, order = path.parts[-3:-1]
        row = {"model": model, "reorder": order, "tiles": path.stem.rpartition(".")[0]}
        row |= {name: getattr(plan, name, "") for name in ("solver", "status", "objective", "reason")}
        rows.append(row | dict.fromkeys(_NUMBERS, np.nan) | ({} if plan.status == "skipped" else _numbers(plan)))
    frame = pd.DataFrame(rows)
    key = ["model", "reorder", "tiles"]
    greedy = frame[frame["solver"] == "greedy"].set_index(key)["predicted_us"].rename("greedy_us")
    frame = frame.join(greedy, on=key)
    return frame.assign(gain=1 - frame["predicted_us"] / frame["greedy_us"])


def _numbers(plan):
    found = {"predicted_us": plan.predicted_us, "solve_s": plan.solve_s}
    found |= {f"lower_{name}_us": bound for name, bound in plan.lower_bounds.items()}
    if plan.status == "heuristic":
        # A heuristic solves no model: it has no objective, bound or gap.
        return found
    return found | {name: getattr(plan, name) for name in ("objective_us", "bound_us", "gap")} | plan.model_size

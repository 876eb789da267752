"""The solvers side by side on every problem: objective, bound, gap, time and size, beside the greedy prediction."""

from tilewright.study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "status": ("status", ""),
    "form": ("form", ""),
    "variables": ("variables", ",.0f"),
    "constraints": ("constraints", ",.0f"),
    "objective_us": ("objective (µs)", ",.1f"),
    "bound_us": ("bound (µs)", ",.1f"),
    "gap": ("gap", ".2%"),
    "solve_s": ("time (s)", ".2f"),
    "predicted_us": ("predicted (µs)", ",.1f"),
    "greedy_us": ("greedy predicted (µs)", ",.1f"),
    "gain": ("predicted gain on greedy", "+.2%"),
}


def needs(config):
    """Schedules of every tile set that leaves a choice, by every solver."""
    return _select.schedules(config)


def table(inputs):
    """One row per schedule; ``gain`` is ``1 - predicted / greedy``, above zero where the solver is better."""
    import numpy as np
    import pandas as pd

    from tilewright import schedule

    rows = []
    for path, plan in _read.by_kind(inputs, schedule=schedule.load)["schedule"].items():
        model, order = path.parts[-3:-1]
        heuristic = plan.status == "heuristic"
        row = {"model": model, "reorder": order, "tiles": path.stem.rpartition(".")[0], "solver": plan.solver}
        row |= {name: getattr(plan, name) for name in ("status", "form", "objective", "predicted_us", "solve_s")}
        # A heuristic solves no model: it has no objective, bound or gap of its own.
        row |= {name: np.nan if heuristic else getattr(plan, name) for name in ("objective_us", "bound_us", "gap")}
        size = {} if heuristic else plan.model_size
        row |= {name: size.get(name, np.nan) for name in ("variables", "integers", "constraints", "nonzeros")}
        row |= {f"lower_{name}_us": bound for name, bound in plan.lower_bounds.items()}
        rows.append(row)
    frame = pd.DataFrame(rows)
    key = ["model", "reorder", "tiles"]
    greedy = frame[frame["solver"] == "greedy"].set_index(key)["predicted_us"].rename("greedy_us")
    frame = frame.join(greedy, on=key)
    return frame.assign(gain=1 - frame["predicted_us"] / frame["greedy_us"])

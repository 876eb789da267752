"""Schedules lane by lane as predicted: which tile runs where and when, and what the launches between cost.

The greedy and the ILP schedule of one workload and order over the lanes of the device, as predicted. Each bar is one
work item, coloured by its tile; black is the cost of launches, white an idle lane; dashed lines begin a round.
"""

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study.figures import _style
from tilewright_study.tables import _read, _select

# Above this many items in a panel, lines between them would be all that is seen.
_MOST_EDGES = 600


def needs(config):
    """The schedules of one workload and order under the tile set that policies are compared on, and their profiles."""
    if not _select.drawn(config, [config.figures.gantt_workload]):
        return []
    name, solvers = _select.method(config)
    place = f"{config.figures.gantt_workload}/{config.figures.gantt_order}"
    plans = [f"results/schedules/{place}/{name}.{solver}.json" for solver in solvers]
    return plans + [f"results/profiling/{place}/{tile}.json" for tile in config.tile_sets[name]]


def draw(inputs):
    """One panel per schedule on a common time axis, one row per lane; solvers that found the same one share it. Notes
    name those that were skipped.

    Raises `ArtifactError` for a schedule whose profiles are not among the inputs.
    """
    from matplotlib.patches import Patch

    from tilewright.attention import profile, schedule

    files = _read.by_kind(inputs, schedule=schedule.read, profile=profile.load)
    profiles = {found.blocks_id: found for found in files["profile"].values()}
    skipped = [plan for plan in files["schedule"].values() if plan.status == "skipped"]
    plans = {path: plan for path, plan in files["schedule"].items() if plan not in skipped}
    for path, plan in plans.items():
        missing = [name for name, blocks in zip(plan.tiles, plan.blocks_ids, strict=True) if blocks not in profiles]
        if missing:
            raise ArtifactError(f"{path}: expected the profiles of its tiles among the inputs, missing {missing}")
    groups = _alike(plans.values())
    lanes, rows = max((plan.lanes for plan in plans.values()), default=1), max(1, len(groups))
    drawn = _style.figure(10.5, rows * (0.9 + min(0.34 * lanes, 3.2)) + 1.1)
    panels = drawn.subplots(rows, 1, squeeze=False, sharex=True)[:, 0]
    used = set()
    for axes, group in zip(panels, groups, strict=False):
        used |= _panel(axes, group, [profiles[blocks] for blocks in group[0].blocks_ids])
    panels[-1].set_xlabel("predicted time (ms)")
    model, order = next(iter(files["schedule"])).parts[-3:-1]
    handles = [Patch(color=_style.tile_colour(name), label=f"tile {name}") for name in sorted(used)]
    handles.append(Patch(color=_style.INK, label="launch"))
    _style.head(drawn, f"{model}, order {_style.order_name(order)}: schedules over {lanes} lanes", handles)
    _style.notes(
        drawn,
        [
            "A bar is one work item; white within a row is an idle lane; dashed lines begin a round. The prediction "
            "shares a round's load evenly over the lanes, so that the last bar of this placement may end later.",
            *(f"{_style.SOLVER_NAMES.get(plan.solver, plan.solver)} was skipped: {plan.reason}." for plan in skipped),
        ],
    )
    return drawn


def _alike(plans):
    """Lists of schedules that place the same items in the same lanes at the same times."""
    groups = {}
    for plan in plans:
        placed = (plan.tile, plan.block, plan.run_lo, plan.lane, plan.start_us)
        key = tuple(plan.tiles), tuple(plan.blocks_ids), plan.lanes, *(each.tobytes() for each in placed)
        groups.setdefault(key, []).append(plan)
    return list(groups.values())


def _panel(axes, group, profiles):
    """Draw the one schedule of a group; returns the names of the tiles that it uses."""
    plan = group[0]
    latency = plan.latencies_us(profiles)
    held = _held(plan, np.array([profile.launch_us for profile in profiles]))
    edge = 0.4 if len(latency) <= _MOST_EDGES else 0.0
    for t in np.unique(plan.tile):
        here = plan.tile == t
        axes.barh(
            plan.lane[here],
            latency[here] / 1e3,
            left=plan.start_us[here] / 1e3,
            height=0.78,
            color=_style.tile_colour(plan.tiles[t]),
            edgecolor="white",
            linewidth=edge,
        )
    for lane in range(plan.lanes):
        _launches(axes, plan, lane, latency, held)
    for start in np.unique(plan.round)[1:]:
        axes.axvline(plan.start_us[plan.round == start].min() / 1e3, color=_style.DENSE, linestyle="--", linewidth=0.8)
    few = plan.lanes <= 16
    axes.set_yticks(
        range(plan.lanes) if few else [0, plan.lanes - 1],
        [f"lane {s}" for s in (range(plan.lanes) if few else (0, plan.lanes - 1))],
    )
    axes.set_ylim(plan.lanes - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_title(
        f"{', '.join(map(_named, group))}: {plan.predicted_us / 1e3:.3f} ms predicted, "
        f"{len(latency):,} items, rounds: {len(np.unique(plan.round))}",
        loc="left",
    )
    return {plan.tiles[t] for t in np.unique(plan.tile)}


def _named(plan):
    """The solver of a schedule, and what it proved."""
    proof = "" if plan.status == "heuristic" else f", gap {plan.gap:.2%}"
    return f"{_style.SOLVER_NAMES.get(plan.solver, plan.solver)} ({plan.status}{proof})"


def _held(plan, launch_us):
    """float [I]: what the launches of an item's round have cost until it starts, its own included."""
    shape = np.stack([plan.round, plan.tile, plan.shape])
    first = np.r_[True, (shape[:, 1:] != shape[:, :-1]).any(axis=0)]
    total = np.cumsum(np.where(first, launch_us[plan.tile], 0.0))
    begin = np.searchsorted(plan.round, plan.round)
    return total - total[begin] + launch_us[plan.tile[begin]]


def _launches(axes, plan, lane, latency, held):
    """The waits of one lane for launches: gaps before items, at a round's start no longer than its launches so far."""
    mine = np.flatnonzero(plan.lane == lane)
    mine = mine[np.argsort(plan.start_us[mine], kind="stable")]
    if not len(mine):
        return
    start, rounds = plan.start_us[mine], plan.round[mine]
    end = np.concatenate(([0.0], (start + latency[mine])[:-1]))
    gap = np.maximum(0.0, start - end)
    fresh = np.concatenate(([True], rounds[1:] != rounds[:-1]))
    gap[fresh] = np.minimum(gap[fresh], held[mine][fresh])
    axes.barh(np.full(len(mine), lane), gap / 1e3, left=(start - gap) / 1e3, height=0.78, color=_style.INK, linewidth=0)

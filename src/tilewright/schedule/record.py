"""The schedule as a value and as a file."""

from dataclasses import dataclass, fields

import numpy as np

from tilewright import artifacts
from tilewright.errors import ArtifactError

KIND = "schedule"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """An ordered work list with its prediction and its proof.

    Work, one entry per work item in execution order (I items):
        tile: int16 [I], index into `tiles`. block: int32 [I]. run_lo, run_hi: int64 [I], runs of the tile's
            blocks file.
        cls: int32 [I], shape class of the tile's `work.items`. split: bool [I]. round: int16 [I], ascending.
        slot: int16 [I] and start_us: float64 [I], the predicted placement (list scheduling, longest first).
    tiles: tile names; blocks_ids, blocks_paths, profile_paths: one per tile. A schedule need not use all of
        them.
    solver: greedy, highs or gurobi. status: optimal (proven within the gap asked for), feasible (not proven)
        or heuristic.
    form: how regions were modelled: ``regions``, ``classes`` (alike regions together) or ``merged`` (nearly
        alike ones, which makes the bound weaker, never wrong); merge_error: share of the objective that the
        merged model did not count.
    objective: ``sum`` or ``paper`` (the maximum over rounds).
    predicted_us: makespan recomputed from the work list. objective_us: the objective asked for, of this work
        list. bound_us: proven by the solver (by `lower_bounds` for greedy). gap: what lies between the two,
        relative to the objective.
    lower_bounds: named bounds on any schedule, in microseconds (work, longest, ...).
    model_size: ``{"variables", "integers", "constraints", "nonzeros"}``, zeros for greedy; solve_s: wall time
        in the solver.
    note: what a reader should know of how this schedule came about, or empty.
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
    merge_error: float = 0.0
    note: str = ""

    @property
    def n_items(self):
        """Work items in the list."""
        return len(self.tile)

    @property
    def launches(self):
        """Batched launches: distinct (round, tile, shape class)."""
        return len(np.unique(np.stack([self.round, self.tile, self.cls]), axis=1).T)

    def latencies_us(self, profiles):
        """float64 [I]: predicted latency of each item, from the `profiles` of the tiles, in the order of `tiles`."""
        latency = np.zeros(self.n_items)
        for t, profile in enumerate(profiles):
            here = self.tile == t
            latency[here] = np.array([shape.latency_us for shape in profile.classes])[self.cls[here]]
        return latency

    def summary(self):
        """One table row: who solved what, how well, how large and how long."""
        names = ("solver", "status", "form", "objective", "objective_us", "bound_us", "gap", "predicted_us")
        return {
            **{name: getattr(self, name) for name in names},
            **self.model_size,
            "seconds": self.solve_s,
            "items": self.n_items,
            "launches": self.launches,
            "tiles": " ".join(self.tiles[t] for t in np.unique(self.tile)),
            "rounds": len(np.unique(self.round)),
            "merge_error": self.merge_error,
            "note": self.note,
        }


COLUMNS = {
    "tile": np.int16,
    "block": np.int32,
    "run_lo": np.int64,
    "run_hi": np.int64,
    "cls": np.int32,
    "split": bool,
    "round": np.int16,
    "slot": np.int16,
    "start_us": np.float64,
}


def save(path, schedule, made_by=None):
    """Write a schedule as JSON, its work list by columns."""
    body = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.name not in COLUMNS}
    work = {name: getattr(schedule, name).tolist() for name in COLUMNS}
    artifacts.write_json(path, KIND, VERSION, {**body, "work": work}, made_by)


def load(path):
    """Read a schedule that `save` wrote. Raises `ArtifactError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    try:
        columns = {name: np.asarray(document["work"][name], dtype) for name, dtype in COLUMNS.items()}
        values = {f.name: document[f.name] for f in fields(Schedule) if f.name not in COLUMNS}
        for name in ("tiles", "blocks_ids", "blocks_paths", "profile_paths"):
            values[name] = tuple(values[name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"{path}: expected a complete schedule file, found {error!r}") from error
    if len(lengths := {len(column) for column in columns.values()}) != 1:
        raise ArtifactError(f"{path}: expected columns of one length, found {sorted(lengths)}")
    return Schedule(**values, **columns)


def verify_inputs(schedule, blocks, profiles=None):
    """Raise `ArtifactError` unless `schedule` was made for these `blocks` ``{tile: Blocks}`` and `profiles`
    ``{tile: Profile}``."""
    for name, expected in zip(schedule.tiles, schedule.blocks_ids, strict=True):
        if name not in blocks:
            raise ArtifactError(f"the schedule needs blocks of the tiles {schedule.tiles}, found {sorted(blocks)}")
        cover = blocks[name]
        if cover.graph_id != schedule.graph_id:
            raise ArtifactError(
                f"the schedule was made for graph {schedule.graph_id}, found blocks of graph {cover.graph_id}"
            )
        if cover.id != expected:
            raise ArtifactError(f"tile {name}: the schedule was made for blocks {expected}, found {cover.id}")
        if profiles is None:
            continue
        if name not in profiles:
            raise ArtifactError(f"the schedule needs profiles of the tiles {schedule.tiles}, found {sorted(profiles)}")
        profile = profiles[name]
        if profile.blocks_id != expected:
            raise ArtifactError(
                f"tile {name}: the schedule was made for blocks {expected}, found a profile of {profile.blocks_id}"
            )
        if profile.device_id != schedule.device_id:
            raise ArtifactError(
                f"tile {name}: the schedule was made for device {schedule.device_id}, "
                f"found a profile of {profile.device_id}"
            )

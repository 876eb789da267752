"""The schedule as a value and as a file."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tilewright.attention.blocks import Blocks, work
from tilewright.attention.profile import Profile
from tilewright.core import artifacts, contents
from tilewright.core.contents import Amount, Count, Finite, Size
from tilewright.core.errors import ArtifactError

KIND = "schedule"
VERSION = 3

# What runs in place of a form of `attention.native`, and what stands before the name of such a form.
TILES, TORCH = "tiles", "torch:"


@dataclass(frozen=True, eq=False)
class Schedule:
    """An ordered work list with its prediction and its proof.

    Work, one entry per work item in execution order (I items):
        tile: int16 [I], index into `tiles`. block: int32 [I]. run_lo, run_hi: int64 [I], runs of the tile's
            blocks file.
        shape: int32 [I], that of the tile's `attention.blocks.work.items`. split: bool [I].
        round: int16 [I], ascending.
        lane: int16 [I] and start_us: float64 [I], the predicted placement (list scheduling, longest first).
    tiles: tile names; blocks_ids, blocks_paths, profile_paths: one per tile. A schedule need not use all of
        them.
    split_keys: the length at which long blocks are split.
    solver: greedy, descent, highs or gurobi. status: optimal (proven within the gap asked for), feasible (not
        proven) or heuristic.
    objective: ``sum`` or ``paper`` (the maximum over rounds).
    runs: ``tiles``, or ``torch:`` and a form of `attention.native`, which executors run in place of the work list.
    predicted_us: of what runs. own_us: makespan recomputed from the work list, None where that is `predicted_us`.
        torch_us: timed microseconds of the forms that were compared, by name.
    objective_us: the objective of this work list. bound_us: lower bound that the solver proved; for a heuristic the
        greatest of `lower_bounds`. gap: objective less bound, relative to the objective.
    lower_bounds: named bounds on any schedule of these tiles, in microseconds (work, longest, ...).
    model_size: ``{"variables", "integers", "constraints", "nonzeros"}``, zeros for heuristics. solve_s: seconds of
        the search and of the heuristic that it starts from.
    note: a remark on how the schedule was found, or empty.
    """

    graph_id: str
    tiles: tuple[str, ...]
    blocks_ids: tuple[str, ...]
    blocks_paths: tuple[str, ...]
    profile_paths: tuple[str, ...]
    split_keys: Size | None
    lanes: Size
    solver: str
    status: str
    objective: str
    predicted_us: Amount
    objective_us: Amount
    bound_us: Finite
    gap: Finite
    lower_bounds: dict[str, Finite]
    model_size: dict[str, Count]
    solve_s: Amount
    device_id: str
    tile: np.ndarray
    block: np.ndarray
    run_lo: np.ndarray
    run_hi: np.ndarray
    shape: np.ndarray
    split: np.ndarray
    round: np.ndarray
    lane: np.ndarray
    start_us: np.ndarray
    note: str = ""
    runs: str = TILES
    own_us: Amount | None = None
    torch_us: dict[str, Amount] | None = None

    @property
    def tiles_us(self) -> float:
        """Predicted makespan of the work list, whatever runs."""
        return self.predicted_us if self.own_us is None else self.own_us

    @property
    def form(self) -> str | None:
        """The form of `attention.native` that runs, None for tiles."""
        return None if self.runs == TILES else self.runs.removeprefix(TORCH)

    @property
    def n_items(self) -> int:
        """Work items in the list."""
        return len(self.tile)

    @property
    def launches(self) -> int:
        """Batched launches: distinct (round, tile, shape)."""
        return len(np.unique(np.stack([self.round, self.tile, self.shape]), axis=1).T)

    @property
    def left(self) -> float:
        """At most this share of the objective is left to gain by any choice of these tiles and rounds, as the profiles
        predict them."""
        return max(0.0, self.gap)


def choose(schedule: Schedule, torch_us: Mapping[str, float]) -> Schedule:
    """`schedule` with the fastest of its work list and the forms of torch's attention, microseconds by name, as what
    runs."""
    own_us, best = schedule.tiles_us, min(torch_us, key=lambda name: torch_us[name], default=None)
    known = dict(torch_us) or None
    if best is None or torch_us[best] >= own_us:
        return replace(schedule, runs=TILES, predicted_us=own_us, own_us=None, torch_us=known)
    return replace(schedule, runs=TORCH + best, predicted_us=torch_us[best], own_us=own_us, torch_us=known)


COLUMNS: dict[str, Any] = {
    "tile": np.int16,
    "block": np.int32,
    "run_lo": np.int64,
    "run_hi": np.int64,
    "shape": np.int32,
    "split": bool,
    "round": np.int16,
    "lane": np.int16,
    "start_us": np.float64,
}
_PER_TILE = ("blocks_ids", "blocks_paths", "profile_paths")


def save(path: str | Path, schedule: Schedule, made_by: dict | None = None) -> None:
    """Write a `Schedule` as JSON, its work list by columns."""
    body = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.name not in COLUMNS}
    work = {name: getattr(schedule, name).tolist() for name in COLUMNS}
    artifacts.write_json(path, KIND, VERSION, {**body, "work": work}, made_by)


# The document's fields: those of `Schedule`, its columns as lists of what JSON has for their dtypes.
_Facts = msgspec.defstruct(
    "_Facts",
    [
        (f.name, f.type) if f.default is MISSING else (f.name, f.type, f.default)
        for f in fields(Schedule)
        if f.name not in COLUMNS
    ],
)
_JSON = {"b": list[bool], "i": list[int], "f": list[Finite]}
_Work = msgspec.defstruct("_Work", [(name, _JSON[np.dtype(dtype).kind]) for name, dtype in COLUMNS.items()])


def load(path: str | Path) -> Schedule:
    """Read a `Schedule` that `save` wrote, checking its contents. Raises `ArtifactError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    facts = contents.fields(path, KIND, document, _Facts)
    lists = contents.fields(path, KIND, document.get("work"), _Work)
    try:
        columns = {name: np.array(getattr(lists, name), dtype) for name, dtype in COLUMNS.items()}
    except OverflowError as error:
        raise ArtifactError(f"{path}: expected numbers of the columns' types, found: {error}") from error
    if len(lengths := {len(column) for column in columns.values()}) != 1:
        raise ArtifactError(f"{path}: expected columns of one length, found {sorted(lengths)}")
    values: dict[str, Any] = {name: getattr(facts, name) for name in facts.__struct_fields__} | columns
    found = Schedule(**values)
    each = {len(set(found.tiles)), len(found.tiles), *(len(getattr(found, name)) for name in _PER_TILE)}
    contents.expect(path, len(each) == 1, f"different tiles, and as many of {', '.join(_PER_TILE)}", found.tiles)
    timed = (found.torch_us or {}).get(found.form or "")
    expected = "tiles, or a form of torch's attention with its time and that of the tiles"
    contents.expect(path, found.runs == TILES or None not in (timed, found.own_us), expected, repr(found.runs))
    contents.within(path, "tile", found.tile, 0, len(found.tiles) - 1)
    contents.within(path, "lane", found.lane, 0, found.lanes - 1)
    contents.within(path, "start_us", found.start_us, 0, np.inf)
    contents.within(path, "round", found.round, 0, np.iinfo(np.int16).max)
    contents.within(path, "steps of round", np.diff(found.round), 0, np.inf)
    return found


def verify_inputs(
    schedule: Schedule, blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile] | None = None
) -> None:
    """Raise `ArtifactError` unless `schedule` was made for these `blocks` and `profiles`, each by tile."""
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


def verify_work(schedule: Schedule, blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile]) -> None:
    """Raise `ArtifactError` unless the work list holds the `work.items` of `blocks`.

    Their shapes must be those of `profiles`. Each region that has keys must stand on one tile and in one round.
    """
    first = next(iter(blocks.values()))
    placed = np.full(first.n_regions, -1)
    for t, name in enumerate(schedule.tiles):
        cover, profile = blocks[name], profiles[name]
        _expect(np.array_equal(cover.region_ptr, first.region_ptr), name, "the regions of the other tiles")
        _expect(profile.split_keys == schedule.split_keys, name, f"a profile at the split length {schedule.split_keys}")
        items = work.items(cover, schedule.split_keys)
        shapes = [(shape.rows, shape.runs, shape.masked, shape.split) for shape in profile.shapes]
        _expect(shapes == items.forms, name, "a profile of the shapes of its blocks")
        mine = np.flatnonzero(schedule.tile == t)
        contents.within(f"tile {name}", "block", schedule.block[mine], 0, cover.n_blocks - 1)
        region, rounds = cover.region[schedule.block[mine]], schedule.round[mine]
        _expect((placed[region] < 0).all(), name, "each region on one tile")
        placed[region] = rounds
        _expect((placed[region] == rounds).all(), name, "each region in one round")
        mine = mine[np.lexsort((schedule.run_lo[mine], schedule.block[mine]))]
        theirs = np.isin(cover.region[items.block], region)
        for column in ("block", "run_lo", "run_hi", "shape", "split"):
            same = np.array_equal(getattr(schedule, column)[mine], getattr(items, column)[theirs])
            _expect(same, name, f"{column} of the work items of its regions")
    _expect((placed[first.region[first.runs > 0]] >= 0).all(), schedule.tiles, "every region that has keys")


def _expect(holds, tile, expected):
    contents.expect(f"the work list, tile {tile}", holds, expected, "others")

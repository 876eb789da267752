"""Files of schedules as the workflow has them: in place of one, why its solver could not run; and their facts (T4)."""

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from tilewright.attention import schedule as records
from tilewright.core import artifacts, contents


@dataclass(frozen=True)
class Skipped:
    """What a file holds in place of a `Schedule` whose solver could not run on the machine, and the reason.

    The other fields are those of `Schedule`.
    """

    graph_id: str
    tiles: tuple[str, ...]
    blocks_ids: tuple[str, ...]
    blocks_paths: tuple[str, ...]
    profile_paths: tuple[str, ...]
    solver: str
    objective: str
    device_id: str
    reason: str
    status: Literal["skipped"] = "skipped"


def save(path, schedule, made_by=None):
    """Write a `Schedule` or a `Skipped`."""
    if isinstance(schedule, Skipped):
        artifacts.write_json(path, records.KIND, records.VERSION, asdict(schedule), made_by)
    else:
        records.save(path, schedule, made_by)


def read(path):
    """Read what `save` wrote, checking its contents. Raises `ArtifactError`."""
    document = artifacts.read_json(path, records.KIND, records.VERSION)
    if document.get("status") == "skipped":
        return contents.fields(path, records.KIND, document, Skipped)
    return records.load(path)


def summary(schedule):
    """One table row: who solved what, how well, how large and how long; or who was skipped, and why."""
    if isinstance(schedule, Skipped):
        return {name: getattr(schedule, name) for name in ("solver", "status", "objective", "reason")}
    names = ("solver", "status", "objective", "objective_us", "bound_us", "gap", "predicted_us")
    return {
        **{name: getattr(schedule, name) for name in names},
        **schedule.model_size,
        "seconds": schedule.solve_s,
        "items": schedule.n_items,
        "launches": schedule.launches,
        "runs": schedule.runs,
        "own_us": schedule.tiles_us,
        "tiles": " ".join(schedule.tiles[t] for t in np.unique(schedule.tile)),
        "left": schedule.left,
        "rounds": len(np.unique(schedule.round)),
        "note": schedule.note,
    }

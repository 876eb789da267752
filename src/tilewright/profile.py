"""Latency and resources of a tile on one device, per shape class of its work items (stage T3)."""

from dataclasses import dataclass

KIND = "profile"
VERSION = 1


@dataclass(frozen=True)
class ShapeClass:
    """One measured shape (see `work.WorkItems`).

    rows, runs, masked, split: the padded shape. items: how many work items of the blocks have it.
    latency_us: time one item of this class occupies one slot, all heads, amortised over a full batch (p50); p20_us, p80_us
        likewise. repetitions, rse: how often it was timed and the relative standard error reached.
    resources: named needs of one item, e.g. ``working_set_bytes``. occupancy: units of `Limits.occupancy` that one item takes.
    """

    rows: int
    runs: int
    masked: bool
    split: bool
    items: int
    latency_us: float
    p20_us: float
    p80_us: float
    repetitions: int
    rse: float
    resources: dict[str, float]
    occupancy: float


@dataclass(frozen=True)
class Profile:
    """What T3 measured for one blocks file on one device.

    launch_us: fixed cost of one batched launch of this tile (one per shape class present in a round).
    classes: in the order of `work.items(blocks, split_keys)`.
    device: `hardware` description; device_id: digest of what makes two devices differ for timing.
    """

    tile: str
    blocks_id: str
    graph_id: str
    heads: int
    head_dim: int
    dtype: str
    split_keys: int | None
    launch_us: float
    classes: tuple[ShapeClass, ...]
    device: dict
    device_id: str

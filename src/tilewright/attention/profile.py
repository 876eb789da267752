"""Latency and resources of a tile on one device, per shape of its work items (stage T3)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tilewright import devices
from tilewright.core import artifacts, contents
from tilewright.core.contents import Amount, Count, Size
from tilewright.core.errors import ArtifactError

if TYPE_CHECKING:
    from tilewright.attention.blocks.work import WorkItems
    from tilewright.core.timing import Timing

KIND = "profile"
VERSION = 6
Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True)
class ItemShape:
    """One shape (see `work.WorkItems`) and its costs.

    rows, runs, masked, split: the padded shape. items: how many work items of the blocks have it.
    latency_us: time one item of this shape occupies one lane, all heads, amortised over a full batch (p50); p20_us,
        p80_us likewise. repetitions, rse: how often it was timed and the relative standard error reached; where it is
        predicted, 0 and the median relative error of the predictions.
    alone_us: time one item takes when no other runs, which is the least that a round with it takes. A lane that takes
        items one after another has it equal to `latency_us`; a multiprocessor works on several at a time.
    resources: named needs of one item, e.g. ``working_set_bytes``. occupancy: units of `Limits.occupancy` that one item
        takes.
    """

    rows: Size
    runs: Size
    masked: bool
    split: bool
    items: Size
    latency_us: Amount
    alone_us: Amount
    p20_us: Amount
    p80_us: Amount
    repetitions: Count
    rse: Amount
    resources: dict[str, Amount]
    occupancy: Amount


@dataclass(frozen=True)
class Profile:
    """What T3 measured, or a calibration predicts, for one blocks file on one device.

    source: which of the two.
    launch_us: fixed cost of one batched launch of this tile (one per shape present in a round).
    tile_us: what a round that fills the lanes with this tile takes beside its load, whatever its shapes: until all
        lanes are busy, and from when the first has run out of items.
    shapes: in the order of `attention.blocks.work.items(blocks, split_keys)`.
    device: description by `devices`; device_id: digest of what makes two devices differ for timing.
    torch_us: what a call takes by torch's own attention in place of tiles, by the forms of `attention.native` that were
        timed; None where none was.
    """

    tile: str
    source: Literal["measured", "predicted"]
    blocks_id: str
    graph_id: str
    heads: Size
    head_dim: Size
    dtype: Dtype
    split_keys: Size | None
    launch_us: Amount
    tile_us: Amount
    shapes: tuple[ItemShape, ...]
    device: dict
    device_id: str
    torch_us: dict[str, Amount] | None = None


def item_shape(items: "WorkItems", shape: int, timing: "Timing", **measured: Any) -> ItemShape:
    """The `ItemShape` of shape `shape` of `items` (`work.WorkItems`) with what was `measured` of it."""
    return ItemShape(
        rows=int(items.shape_rows[shape]),
        runs=int(items.shape_runs[shape]),
        masked=bool(items.shape_masked[shape]),
        split=bool(items.shape_split[shape]),
        items=int(items.counts[shape]),
        repetitions=timing.repetitions,
        rse=timing.rse,
        **measured,
    )


def fitted(
    shapes: Sequence[ItemShape], *, whole_us: float, load_us: float, lanes: int
) -> tuple[float, list[ItemShape]]:
    """``(tile_us, shapes)``: the costs of `shapes` changed such that a round of all items takes `whole_us`.

    Shapes that were timed one by one add up to something else than a launch of all: items of different shapes run side
    by side. whole_us: of all items, less the costs of launch and round. load_us: the part of it that grows with the
    items; the latencies are scaled to it and keep their ratios. The rest is `tile_us`. Where the load is more than the
    whole, the latencies are scaled down to that and `tile_us` is zero. No item takes longer alone than all do.
    """
    load_us = min(load_us, whole_us)
    scale = float(load_us * lanes) / sum(shape.items * shape.latency_us for shape in shapes)
    found = []
    for shape in shapes:
        times = {name: scale * getattr(shape, name) for name in ("latency_us", "p20_us", "p80_us")}
        found.append(replace(shape, alone_us=float(min(shape.alone_us, whole_us)), **times))
    return float(whole_us - load_us), found


def save(path: str | Path, profile: Profile, made_by: dict | None = None) -> None:
    """Write a profile as JSON."""
    artifacts.write_json(path, KIND, VERSION, asdict(profile), made_by)


class _Device(msgspec.Struct):
    kind: str
    name: str
    versions: dict[str, str | None]


def load(path: str | Path) -> Profile:
    """Read a profile that `save` wrote, checking its contents. Raises `ArtifactError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    profile = contents.fields(path, KIND, document, Profile)
    kind = contents.fields(path, KIND, profile.device, _Device).kind
    contents.expect(path, kind in devices.NAMES, f"a device of one of the kinds {', '.join(devices.NAMES)}", kind)
    if profile.device_id != devices.device_id(profile.device):
        raise ArtifactError(f"{path}: the device described is not {profile.device_id}: the file was altered")
    return profile

"""Latency and resources of a tile on one device, per shape class of its work items (stage T3)."""

from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

from tilewright import targets
from tilewright.core import artifacts, contents, registry
from tilewright.core.contents import Amount, Count, Size
from tilewright.core.errors import ArtifactError, DeviceError

KIND = "profile"
VERSION = 3
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ShapeClass:
    """One measured shape (see `work.WorkItems`).

    rows, runs, masked, split: the padded shape. items: how many work items of the blocks have it.
    latency_us: time one item of this class occupies one slot, all heads, amortised over a full batch (p50); p20_us,
        p80_us likewise. repetitions, rse: how often it was timed and the relative standard error reached.
    alone_us: time one item takes when no other runs, which is the least that a round with it takes. A slot that takes
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
    """What T3 measured for one blocks file on one device.

    launch_us: fixed cost of one batched launch of this tile (one per shape class present in a round).
    tile_us: what a round that fills the slots with this tile takes beside its load, whatever its classes: until all
        slots are busy, and from when the first has run out of items.
    classes: in the order of `blocks.work.items(blocks, split_keys)`.
    device: `hardware` description; device_id: digest of what makes two devices differ for timing.
    """

    tile: str
    blocks_id: str
    graph_id: str
    heads: Size
    head_dim: Size
    dtype: Literal[DTYPES]
    split_keys: Size | None
    launch_us: Amount
    tile_us: Amount
    classes: tuple[ShapeClass, ...]
    device: dict
    device_id: str


def measure(blocks, *, device="cpu", heads=None, head_dim=None, dtype=None, split_keys=None, seed=0, budget_s=0.5):
    """Time every shape class of the work items of `blocks` with the executor of `device`; return the `Profile`.

    heads, head_dim: default those of the blocks' model. budget_s: seconds that the timed calls may take together,
    about. How a class is timed stands with the device's probe, see `targets.probe`.

    Raises `DeviceError` for a device that is not there, `UnknownNameError` for the dtype and `ArtifactError` for blocks
    whose model does not tell its heads when none are given.
    """
    description = targets.describe(device)
    dtype = dtype or DTYPES[0]
    registry.check("dtype", dtype, DTYPES)
    sizes = {name: _size(blocks, name, value) for name, value in (("heads", heads), ("head_dim", head_dim))}
    options = {**sizes, "dtype": dtype, "split_keys": split_keys}
    launch_us, tile_us, classes = targets.probe(device).measure(blocks, **options, seed=seed, budget_s=budget_s)
    return Profile(
        tile=blocks.tile.name,
        blocks_id=blocks.id,
        graph_id=blocks.graph_id,
        **options,
        launch_us=launch_us,
        tile_us=tile_us,
        classes=tuple(classes),
        device=description,
        device_id=targets.device_id(description),
    )


def shape_class(items, cls, timing, **measured):
    """The `ShapeClass` of class `cls` of `items` (`work.WorkItems`) with what was `measured` of it."""
    return ShapeClass(
        rows=int(items.class_rows[cls]),
        runs=int(items.class_runs[cls]),
        masked=bool(items.class_masked[cls]),
        split=bool(items.class_split[cls]),
        items=int(items.counts[cls]),
        repetitions=timing.repetitions,
        rse=timing.rse,
        **measured,
    )


def check(profile, blocks, device="cpu"):
    """Raise `ArtifactError` unless `profile` is of `blocks`, `DeviceError` unless its times hold on this `device`."""
    if profile.blocks_id != blocks.id:
        raise ArtifactError(
            f"tile {profile.tile}: expected a profile of blocks {blocks.id}, found one of {profile.blocks_id}"
        )
    if targets.differing(profile.device, targets.describe(device)):
        raise elsewhere(profile, device)


def elsewhere(profile, device):
    """The `DeviceError` for a profile that was made on another device than this `device`."""
    return DeviceError(
        f"tile {profile.tile}: expected a profile made on this device ({_short(targets.describe(device))}), found one "
        f"made on {_short(profile.device)}; profile the blocks again here"
    )


def save(path, profile, made_by=None):
    """Write a profile as JSON."""
    artifacts.write_json(path, KIND, VERSION, asdict(profile), made_by)


class _Device(msgspec.Struct):
    kind: Literal[tuple(targets.KINDS)]
    name: str
    versions: dict[str, str | None]


def load(path):
    """Read a profile that `save` wrote, checking its contents. Raises `ArtifactError`."""
    profile = contents.fields(path, KIND, artifacts.read_json(path, KIND, VERSION), Profile)
    contents.fields(path, KIND, profile.device, _Device)
    if profile.device_id != targets.device_id(profile.device):
        raise ArtifactError(f"{path}: the device described is not {profile.device_id}: the file was altered")
    return profile


def _size(blocks, name, value):
    value = blocks.meta.get(name) if value is None else value
    if value is None:
        raise ArtifactError(
            f"{name}: the blocks' model does not tell; expected it as an argument, e.g. --{name.replace('_', '-')} 3"
        )
    return int(value)


def _short(device):
    return f"{device.get('name')}, {device.get('threads')} threads, {device.get('versions')}"

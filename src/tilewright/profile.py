"""Latency and resources of a tile on one device, per shape class of its work items (stage T3)."""

from dataclasses import asdict, dataclass, fields

from tilewright import artifacts, hardware, registry
from tilewright.errors import ArtifactError, DeviceError

KIND = "profile"
VERSION = 2


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

    rows: int
    runs: int
    masked: bool
    split: bool
    items: int
    latency_us: float
    alone_us: float
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
    tile_us: what a round that fills the slots with this tile takes beside its load, whatever its classes: until all
        slots are busy, and from when the first has run out of items.
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
    tile_us: float
    classes: tuple[ShapeClass, ...]
    device: dict
    device_id: str


DTYPES = ("float32", "float16", "bfloat16")


def measure(blocks, *, device="cpu", heads=None, head_dim=None, dtype=None, split_keys=None, seed=0, budget_s=0.5):
    """Time every shape class of the work items of `blocks` with the executor of `device`; return the `Profile`.

    heads, head_dim: default those of the blocks' model. budget_s: seconds that the timed calls may take together,
    about. How a class is timed stands with the device's probe, see `hardware.probe`.

    Raises `DeviceError` for a device that is not there, `UnknownNameError` for the dtype and `ArtifactError` for blocks
    whose model does not tell its heads when none are given.
    """
    description = hardware.describe(device)
    dtype = dtype or DTYPES[0]
    registry.check("dtype", dtype, DTYPES)
    sizes = {name: _size(blocks, name, value) for name, value in (("heads", heads), ("head_dim", head_dim))}
    options = {**sizes, "dtype": dtype, "split_keys": split_keys}
    launch_us, tile_us, classes = hardware.probe(device).measure(blocks, **options, seed=seed, budget_s=budget_s)
    return Profile(
        tile=blocks.tile.name,
        blocks_id=blocks.id,
        graph_id=blocks.graph_id,
        **options,
        launch_us=launch_us,
        tile_us=tile_us,
        classes=tuple(classes),
        device=description,
        device_id=hardware.device_id(description),
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
    """Raise `ArtifactError` unless `profile` is of `blocks`, `DeviceError` unless it was made on this `device`."""
    if profile.blocks_id != blocks.id:
        raise ArtifactError(
            f"tile {profile.tile}: expected a profile of blocks {blocks.id}, found one of {profile.blocks_id}"
        )
    here = hardware.describe(device)
    if profile.device_id != hardware.device_id(here):
        raise DeviceError(
            f"tile {profile.tile}: expected a profile made on this device ({_short(here)}), found one made on "
            f"{_short(profile.device)}; profile the blocks again here"
        )


def save(path, profile, made_by=None):
    """Write a profile as JSON."""
    artifacts.write_json(path, KIND, VERSION, asdict(profile), made_by)


def load(path):
    """Read a profile that `save` wrote. Raises `ArtifactError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    try:
        values = {f.name: document[f.name] for f in fields(Profile)}
        values["classes"] = tuple(ShapeClass(**shape) for shape in values["classes"])
        if values["device_id"] != hardware.device_id(values["device"]):
            raise ArtifactError(f"{path}: the device described is not {values['device_id']}: the file was altered")
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: expected a complete profile file, found {error!r}") from error
    return Profile(**values)


def _size(blocks, name, value):
    value = blocks.meta.get(name) if value is None else value
    if value is None:
        raise ArtifactError(
            f"{name}: the blocks' model does not tell; expected it as an argument, e.g. --{name.replace('_', '-')} 3"
        )
    return int(value)


def _short(device):
    return f"{device.get('name')}, {device.get('threads')} threads, {device.get('versions')}"

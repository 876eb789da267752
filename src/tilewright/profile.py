"""Latency and resources of a tile on one device, per shape class of its work items (stage T3)."""

from dataclasses import asdict, dataclass, fields

import numpy as np

from tilewright import artifacts, hardware
from tilewright.errors import ArtifactError, DeviceError, UnknownNameError

KIND = "profile"
VERSION = 1


@dataclass(frozen=True)
class ShapeClass:
    """One measured shape (see `work.WorkItems`).

    rows, runs, masked, split: the padded shape. items: how many work items of the blocks have it.
    latency_us: time one item of this class occupies one slot, all heads, amortised over a full batch (p50); p20_us,
        p80_us likewise. repetitions, rse: how often it was timed and the relative standard error reached.
    resources: named needs of one item, e.g. ``working_set_bytes``. occupancy: units of `Limits.occupancy` that one item
        takes.
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


DTYPES = ("float32", "float16", "bfloat16")

# A timing stops at this relative standard error of its mean.
RSE = 0.03
MIN_REPS = 10
# Classes that the cost of a launch is found from.
LAUNCH_CLASSES = 4


def measure(blocks, *, device="cpu", heads=None, head_dim=None, dtype=None, split_keys=None, seed=0, budget_s=0.5):
    """Time every shape class of the work items of `blocks` with the executor of `device`; return the `Profile`.

    heads, head_dim: default those of the blocks' model. budget_s: seconds that the timed calls may take together,
    about; a class whose launch is too long for its share is timed on part of it.

    A class is timed with all slots busy, each with the whole launch. The cost of a launch is that of its first chunk:
    what one item alone costs beyond an item's share in a larger chunk; taken off the slots' time here, it comes back as
    `launch_us` of all slots. What every call does for all rows (handing out jobs, bringing tokens into place and
    results back) is charged to the items by their rows, the merging of split rows to their parts.

    Raises `DeviceError` for a device that is not there, `UnknownNameError` for the dtype and `ArtifactError` for blocks
    whose model does not tell its heads when none are given.
    """
    description = hardware.describe(device)
    dtype = dtype or DTYPES[0]
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    heads, head_dim = (_size(blocks, *pair) for pair in (("heads", heads), ("head_dim", head_dim)))
    # Here, so that those who only read profiles need not load torch.
    from tilewright.kernels.torch_probe import Probe

    probe = Probe(blocks, heads=heads, head_dim=head_dim, dtype=dtype, split_keys=split_keys, seed=seed)
    slots, items = hardware.limits(description).slots, probe.items
    share_s = budget_s / (items.n_classes + LAUNCH_CLASSES + 2)
    handing_us = _time(probe.handing(), share_s).p50_us
    passage_us = (_time(probe.passage(), share_s).p50_us + handing_us) / blocks.shape[0]
    chunk_us = _chunk_us(probe, handing_us, share_s)
    classes = []
    for cls in range(items.n_classes):
        timing, n_items, merging_us = _time_class(probe, cls, share_s)
        common_us = slots * (passage_us * probe.passing_rows(cls) + merging_us / n_items)
        p20, p50, p80 = (
            # A launch may be over sooner than a chunk was found to cost elsewhere; its items still take some time.
            max(us - handing_us - chunk_us, us / 10) / n_items + common_us
            for us in (timing.p20_us, timing.p50_us, timing.p80_us)
        )
        resources, occupancy = probe.resources(cls)
        classes.append(
            ShapeClass(
                rows=int(items.class_rows[cls]),
                runs=int(items.class_runs[cls]),
                masked=bool(items.class_masked[cls]),
                split=bool(items.class_split[cls]),
                items=int(items.counts[cls]),
                latency_us=p50,
                p20_us=p20,
                p80_us=p80,
                repetitions=timing.repetitions,
                rse=timing.rse,
                resources=resources,
                occupancy=occupancy,
            )
        )
    return Profile(
        tile=blocks.tile.name,
        blocks_id=blocks.id,
        graph_id=blocks.graph_id,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        split_keys=split_keys,
        launch_us=chunk_us / slots,
        classes=tuple(classes),
        device=description,
        device_id=hardware.device_id(description),
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


def _time(call, seconds):
    from tilewright.timing import time_call

    return time_call(call, min_reps=MIN_REPS, max_seconds=seconds, rse_target=RSE, warmups=1)


def _time_class(probe, cls, seconds):
    """``(timing, items, merging_us)`` of the launch of class `cls`, or of as many chunks as `seconds` allow."""
    from tilewright.kernels.torch_probe import head

    launch = probe.launch(cls)
    first, _ = probe.call(head(launch, 1))
    chunk_s = _time(first, 0).p20_us / 1e6
    n_chunks = max(1, min(len(launch.chunks), int(seconds / (MIN_REPS + 1) / chunk_s)))
    launch = head(launch, n_chunks)
    call, n_items = probe.call(launch)
    merging_us = _time(probe.merging(launch), seconds / 10).p50_us if launch.split else 0.0
    return _time(call, seconds), n_items, merging_us


def _chunk_us(probe, handing_us, seconds):
    """Cost of a chunk beyond its items: the median over the largest classes of what one item costs more than others."""
    from tilewright.kernels.torch_probe import head

    costs = []
    for cls in np.argsort(-probe.items.counts, kind="stable")[:LAUNCH_CLASSES].tolist():
        (alone, _), (several, n) = probe.call(probe.launch(cls, 1)), probe.call(head(probe.launch(cls), 1))
        if n > 1:
            alone_us, several_us = (_time(call, seconds / 2).p50_us - handing_us for call in (alone, several))
            costs.append(alone_us - (several_us - alone_us) / (n - 1))
    return float(max(np.median(costs), 0.0)) if costs else 0.0


def _size(blocks, name, value):
    value = blocks.meta.get(name) if value is None else value
    if value is None:
        raise ArtifactError(
            f"{name}: the blocks' model does not tell; expected it as an argument, e.g. --{name.replace('_', '-')} 3"
        )
    return int(value)


def _short(device):
    return f"{device.get('name')}, {device.get('threads')} threads, {device.get('versions')}"

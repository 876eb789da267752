"""Profiles of blocks, measured on this device (stage T3) or predicted for it, and whether one still holds here."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright import devices
from tilewright.attention import backends, native
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.profile import DTYPES, ItemShape, Profile
from tilewright.attention.units import Units
from tilewright.core import artifacts, caches, contents, registry
from tilewright.core.contents import Amount
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.core.provenance import sha256_file
from tilewright.graph import Graph

# Runs from which on tiles are predicted side by side.
LARGE = 1 << 17
# Of times that are kept. Where they spread more than this about their medians, someone else uses the device: they serve
# one plan.
KIND, VERSION, MOST_SPREAD = "times", 1, 0.3
# Times of this process, by what they hold for.
_TIMES = caches.Recent(256)


def measure(
    blocks: Blocks,
    *,
    device: str = "cpu",
    heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    split_keys: int | None = None,
    seed: int = 0,
    budget_s: float = 0.5,
) -> Profile:
    """Time every shape of the work items of `blocks` with the executor of `device`; return the `Profile`.

    heads, head_dim: default those of the blocks' model. split_keys: see `blocks.work.items`. budget_s: about how many
    seconds the timed calls take together. How a class is timed: see the probe of the device, `backends.probe`.

    Raises `DeviceError` for a device that is not there, `UnknownNameError` for the dtype and `ArtifactError` for blocks
    whose model does not state heads or head_dim where they are not given.
    """
    options = _options(blocks, heads, head_dim, dtype)
    costs = backends.probe(device).measure(blocks, **options, split_keys=split_keys, seed=seed, budget_s=budget_s)
    return _profile("measured", blocks, device, options, split_keys, costs)


def expected(
    blocks_by_tile: dict[str, Blocks],
    *,
    device: str = "cpu",
    seed: int = 0,
    bias_heads: int | None = None,
    **sizes: Any,
) -> dict[str, Profile]:
    """The `Profile` of each of the blocks, by tile: predicted on a `device` that has a cost model, else measured, or as
    it was when items of these shapes were measured before.

    A cost model that is not calibrated for this device is so first. bias_heads: heads with a bias of their own, None
    without a bias; what is measured leaves it out. sizes: heads, head_dim, dtype and split_keys as `measure` takes
    them. Raises as `measure` does.
    """
    if not backends.predicts(device):
        return {name: _kept(each, device, seed, **sizes) for name, each in blocks_by_tile.items()}
    # All tiles are of one pattern.
    split_keys = sizes.pop("split_keys", None)
    options = _options(next(iter(blocks_by_tile.values())), **sizes)
    model, chosen = backends.cost_model(device), [each.tile for each in blocks_by_tile.values()]
    calibrations = backends.calibration(device).of(chosen, options["head_dim"], options["dtype"])

    def predicted(name):
        each, more = blocks_by_tile[name], {"calibration": calibrations[name], "bias_heads": bias_heads}
        costs = model.predict(each, **options, split_keys=split_keys, **more)
        return _profile("predicted", each, device, options, split_keys, costs)

    # What is large is read by compiled functions and copied, which runs side by side.
    large = sum(len(each.run_mask) for each in blocks_by_tile.values()) >= LARGE
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if large else 1) as pool:
        return dict(zip(blocks_by_tile, pool.map(predicted, blocks_by_tile), strict=True))


@dataclass(frozen=True)
class Times:
    """What a probe measured. made_for: a digest of the device and the shapes, see `_made_for`."""

    made_for: str
    launch_us: Amount
    tile_us: Amount
    shapes: tuple[ItemShape, ...]


def _kept(blocks, device, seed, split_keys=None, **sizes):
    """What `measure` returns, from memory or a file where the same was measured before, else written there."""
    options = _options(blocks, **sizes)
    made_for = _made_for(blocks, device, options, split_keys)
    path = caches.folder() / KIND / f"{made_for}.json"
    found = next(iter(_TIMES.get(made_for)), None) or _read(path, made_for)
    if found is None:
        # Two processes that measure at a time would measure each other.
        with caches.locked(caches.folder() / KIND / "lock"):
            found = _read(path, made_for)
            if found is None:
                measured = measure(blocks, device=device, seed=seed, split_keys=split_keys, **options)
                found = Times(made_for, measured.launch_us, measured.tile_us, measured.shapes)
                if _spread(found.shapes) <= MOST_SPREAD:
                    with caches.keeping("times of a plan's items"):
                        artifacts.write_json(path, KIND, VERSION, asdict(found))
    _TIMES.add(made_for, found)
    return _profile("measured", blocks, device, options, split_keys, (found.launch_us, found.tile_us, found.shapes))


def _made_for(blocks, device, options, split_keys):
    """What times of the items of `blocks` hold for: their shapes, the sizes, this device and the code that runs.

    ASSUME: which rows and keys an item has does not matter.
    """
    items = work.items(blocks, split_keys)
    shapes = [*map(str, items.forms)], items.counts.tolist(), blocks.shape, blocks.tile.name, split_keys
    device_id = devices.device_id(devices.describe(device))
    stated = json.dumps([*shapes, options, device_id, _code(device)], sort_keys=True)
    return hashlib.sha256(stated.encode()).hexdigest()[:32]


@cache
def _code(device):
    """A digest of the code that items run and are timed by on a `device`."""
    folders = {Path(str(module.__file__)).parent for module in (backends.probe(device), devices.facts(device))}
    files = sorted(path for folder in folders for path in folder.glob("*.py"))
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


def _read(path, made_for):
    """The `Times` of a file, or None where it has none for this."""
    try:
        found = contents.fields(path, KIND, artifacts.read_json(path, KIND, VERSION), Times)
    except ArtifactError:
        return None
    return found if found.made_for == made_for else None


def _spread(shapes):
    return float(np.median([(each.p80_us - each.p20_us) / each.latency_us for each in shapes])) if shapes else 0.0


def beside_torch(
    profiles: dict[str, Profile],
    graph: Graph,
    *,
    heads: int,
    seed: int = 0,
    units: Units | None = None,
    bias: Any = None,
) -> dict[str, Profile]:
    """`profiles` of tiles of `graph` on this device with the times of torch's own attention beside them.

    heads: of q, k and v. What cannot be faster than the best tile alone is not timed, see `native.times`.
    """
    one = next(iter(profiles.values()))
    lanes = devices.limits(one.device).lanes
    least_us = min(
        sum(shape.items * shape.latency_us / lanes + of.launch_us for shape in of.shapes) for of in profiles.values()
    )
    sizes: dict[str, Any] = {"heads": heads, "head_dim": one.head_dim, "dtype": one.dtype, "device": one.device["kind"]}
    torch_us = native.times(graph, **sizes, units=units, bias=bias, own_us=least_us, seed=seed)
    return {name: replace(of, torch_us=torch_us) for name, of in profiles.items()}


def _options(blocks, heads=None, head_dim=None, dtype=None):
    """Arguments of a probe, with those of the blocks' model for what is None."""
    dtype = dtype or DTYPES[0]
    registry.check("dtype", dtype, DTYPES)
    sizes = {name: _size(blocks, name, value) for name, value in (("heads", heads), ("head_dim", head_dim))}
    return {**sizes, "dtype": dtype}


def _profile(source, blocks, device, options, split_keys, costs):
    """A `Profile`. costs: ``(launch_us, tile_us, shapes)``."""
    description, (launch_us, tile_us, shapes) = devices.describe(device), costs
    return Profile(
        tile=blocks.tile.name,
        source=source,
        blocks_id=blocks.id,
        graph_id=blocks.graph_id,
        **options,
        split_keys=split_keys,
        launch_us=launch_us,
        tile_us=tile_us,
        shapes=tuple(shapes),
        device=description,
        device_id=devices.device_id(description),
    )


def elsewhere(profile: Profile, device: str) -> DeviceError:
    """The `DeviceError` for a profile that was made on another device than this `device`."""
    return DeviceError(
        f"tile {profile.tile}: expected a profile made on this device ({_short(devices.describe(device))}), found one "
        f"made on {_short(profile.device)}; profile the blocks again here"
    )


def _size(blocks, name, value):
    value = blocks.meta.get(name) if value is None else value
    if value is None:
        raise ArtifactError(f"{name}: the file of blocks does not state it; add it, e.g. --{name.replace('_', '-')} 3")
    return int(value)


def _short(device):
    return f"{device.get('name')}, {device.get('threads')} threads, {device.get('versions')}"

"""What a device is and what it allows (stages T3 to T5). Nothing about a device is a default argument elsewhere.

A kind of device is a folder with a module ``facts``. Contract of that module; importing it needs no torch:
    ``describe() -> dict``: JSON-able facts of the device of this process, its ``kind`` among them. Raises `DeviceError`
        without one.
    ``IDENTITY``: the facts that make two devices differ for timing, versions of packages by their names. ``MACHINE``:
        those of them that a saved plan is bound to; where others differ it runs, maybe not at the speed predicted.
    ``limits(device) -> dict``: slots, per_block, envelope, occupancy, max_tile_kinds, rounds and round_us of
        `Limits`, from the facts alone.
    ``EXECUTOR``, ``PROBE``: names of the modules that run schedules on it (``prepare``) and time shape classes
        (``measure``), see `executor` and `probe`.
    ``PACKED``: name of the module that runs packed batches on it, see `targets.packed_lists`.
    ``TILES``, ``SPLIT_KEYS``: what plans choose from, and the longest key range of a work item, unless told otherwise.
    ``FEWEST_ROWS``: of a tile.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.targets.cpu import facts as cpu
from tilewright.targets.cuda import facts as cuda

# The facts of each kind that has a profile provider and an executor.
KINDS = {"cpu": cpu, "cuda": cuda}


@dataclass(frozen=True)
class Limits:
    """The limits that a schedule must respect; symbols are those of the published constraints C2 to C7.

    slots: work items that run side by side (C4, load).
    per_block: most of each named resource that one item may take (C2), e.g. ``{"working_set_bytes": 1 << 20}``.
    envelope: most of each named resource that the tile kinds of one round may take together (C5), each kind counting
        with the largest need among its items.
    occupancy: most occupancy units that the items of one round may take together (C6).
    max_tile_kinds: tile kinds in one round (C3, kappa).
    conflicts: pairs of tile names that may not share a round (C7).
    rounds: most rounds that a schedule may use.
    round_us: cost of one more round (a barrier), on top of its launches.
    """

    slots: int
    per_block: dict[str, float]
    envelope: dict[str, float]
    occupancy: float
    max_tile_kinds: int
    conflicts: tuple[tuple[str, str], ...] = field(default=())
    rounds: int = 1
    round_us: float = 0.0


def describe(kind):
    """Facts of the device of this process, a JSON-able dict with its ``kind``. Raises `DeviceError` for a kind that is
    not known or not there."""
    return json.loads(_described(_known(kind)))


def device_id(device):
    """Short digest of what makes two devices (as `describe` gives them) differ for timing."""
    return hashlib.sha256(json.dumps(_identity(device), sort_keys=True).encode()).hexdigest()[:16]


def differing(device, other):
    """Names of the facts in which two devices (as `describe` gives them) differ for timing."""
    one, two = _identity(device), _identity(other)
    return [name for name in one | two if one.get(name) != two.get(name)]


def _identity(device):
    facts = device.get("versions", {}) | device
    return {name: facts.get(name) for name in KINDS[_known(device.get("kind"))].IDENTITY}


def executor(kind):
    """The module whose ``prepare(schedule, blocks, *, heads, head_dim, dtype, **options)`` runs schedules on `kind`."""
    return import_module(KINDS[_known(kind)].EXECUTOR)


def probe(kind):
    """The module whose ``measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s)`` times shape classes
    on `kind`: it returns the cost of a launch and a `profile.ShapeClass` each."""
    return import_module(KINDS[_known(kind)].PROBE)


def modules(kind, *roles):
    """Dotted names of a kind's modules in `roles`, ``executor``, ``probe`` or ``packed``, for digests of code."""
    return [getattr(KINDS[_known(kind)], role.upper()) for role in roles]


def limits(device, *, rounds=None, max_tile_kinds=None, conflicts=()):
    """`Limits` of a described device for schedules of at most `rounds` rounds.

    rounds, max_tile_kinds (kappa of C3): by default the device's own; conflicts: of C7. Raises `DeviceError` for an
    unknown kind and `ArtifactError` for a description that lacks a fact.
    """
    kind = _known(device.get("kind"))
    try:
        facts = KINDS[kind].limits(device)
    except KeyError as missing:
        raise ArtifactError(f"the description of a {kind} device lacks {missing}; found {sorted(device)}") from None
    told = {"rounds": rounds, "max_tile_kinds": max_tile_kinds}
    facts |= {name: value for name, value in told.items() if value is not None}
    return Limits(**facts, conflicts=tuple(conflicts))


def _known(kind):
    if kind not in KINDS:
        raise DeviceError(f"no device of kind {kind!r} can be profiled or run on here; known: {', '.join(KINDS)}")
    return kind


@cache
def _described(kind):
    # As text, so that no caller can alter what the others see.
    return json.dumps(KINDS[kind].describe())

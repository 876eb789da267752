"""Devices: the kinds that schedules are made for and run on (stages T3 to T5).

A device is a folder ``devices/<name>`` with its ``facts.py``, a word in `NAMES`, and, of each operator that runs on it,
a folder ``<operator>/<name>`` with what the operator's ``backends`` asks for. Code outside these folders never asks for
a device by name: it asks for what its facts state. Nothing about a device is a default argument elsewhere. Contract of
the folder:

``facts.py``. Importing it needs no torch.
    ``describe() -> dict``: facts of the device of this process, JSON-able, its ``kind`` (the device's name), ``name``,
        ``threads`` and ``versions`` among them. Raises `DeviceError` where there is no such device.
    ``IDENTITY``: the facts that make two devices differ for timing, versions of packages by their names. ``MACHINE``:
        those of them that a saved plan is bound to. Where only others differ, the plan runs, maybe slower than
        predicted.
    ``seen() -> dict``: those of ``IDENTITY`` that this process can state without torch; of a device that is elsewhere,
        the versions alone.
    ``limits(device) -> dict``: lanes, per_block, envelope, occupancy, max_tile_kinds, rounds and round_us of `Limits`,
        from a description alone.
    ``TILES``, ``SPLIT_KEYS``: the tiles that a plan chooses from and the longest key range of a work item, by default.
    ``FEWEST_ROWS``: of a tile that the executor runs. ``MIXES``: bool, tiles of several kinds may share one plan.
    ``current() -> int | None``: the number of the device that torch computes on now; None where devices have no
        numbers.
    ``TORCH_DEVICE``: torch's name of the memory that q, k and v lie in: ``cpu`` or ``cuda``.
    ``CUDA``: bool, q, k and v are CUDA tensors: libraries that need an NVIDIA GPU run on them.
    ``GPU_TIMER``: bool, a call returns before its work is done, and CUDA events time it (`core.timing.time_gpu`). Where
        it is False the result is complete when the call returns, and the host's clock times it
        (`core.timing.time_call`).
    ``EXCLUSIVE``: bool, timed jobs start side by side and each holds a device through a lock while it runs on it. Where
        it is False the workflow runs one timed job at a time, on all cores.
    ``available() -> list``, ``claim(name)``, where ``EXCLUSIVE``: names of the devices that this process may use, the
        same in every process of the machine, and a function that makes one of them the only one that this process sees.
        Claim before torch uses a device. ``available`` raises `DeviceError` without any.
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tilewright.core.errors import ArtifactError, DeviceError

NAMES = ("cpu", "cuda")


@dataclass(frozen=True)
class Limits:
    """The limits that a schedule must respect; symbols are those of the published constraints C2 to C6, of which C4 and
    C6 are others here (docs/differences.md).

    lanes: work items that run side by side (C4, load).
    per_block: most of each named resource that one item may take (C2), e.g. ``{"working_set_bytes": 1 << 20}``.
    envelope: most of each named resource that the tile kinds of one round may take together (C5), each kind counting
        with the largest need among its items.
    occupancy: most occupancy units, such as bytes of memory, that the items of one round may take together (C6). As
        published, these are multiprocessors; here items queue for them.
    max_tile_kinds: tile kinds in one round (C3, kappa).
    rounds: most rounds that a schedule may use.
    round_us: cost of one more round (a barrier), on top of its launches.
    """

    lanes: int
    per_block: dict[str, float]
    envelope: dict[str, float]
    occupancy: float
    max_tile_kinds: int
    rounds: int = 1
    round_us: float = 0.0


def describe(kind: str) -> dict:
    """Facts of the device of this process, a JSON-able dict with its ``kind``, as they were when first asked for.

    Threads that torch is given later do not count. Raises `DeviceError` for a kind that is not known or not there.
    """
    return json.loads(_described(_known(kind)))


def device_id(device: dict) -> str:
    """Short digest of what makes two devices (as `describe` gives them) differ for timing."""
    return hashlib.sha256(json.dumps(_identity(device), sort_keys=True).encode()).hexdigest()[:16]


def differing(device: dict, other: dict) -> list[str]:
    """Names of the facts in which two devices (as `describe` gives them) differ for timing."""
    one, two = _identity(device), _identity(other)
    return [name for name in one | two if one.get(name) != two.get(name)]


def identity(kind: str, threads: int) -> str:
    """What makes two devices differ for timing, in words: of the device of this process, as far as it is known without
    torch, on `threads` of its threads where the device is the host's processor.

    Raises `DeviceError` for a kind that is not known.
    """
    seen = facts(kind).seen() | ({} if facts(kind).EXCLUSIVE else {"threads": threads})
    return ", ".join(f"{name} {value}" for name, value in seen.items())


def _identity(device):
    stated = device.get("versions", {}) | device
    return {name: stated.get(name) for name in facts(device.get("kind")).IDENTITY}


def facts(kind: str | None) -> ModuleType:
    """The module of a device's facts. Raises `DeviceError` for a kind that is not known."""
    return import_module(f"{__name__}.{_known(kind)}.facts")


def limits(device: dict, *, rounds: int | None = None, max_tile_kinds: int | None = None) -> Limits:
    """`Limits` of a described device for schedules of at most `rounds` rounds.

    rounds: by default the device's own. max_tile_kinds: kappa of C3; never more than the device's own. Raises
    `DeviceError` for an unknown kind and `ArtifactError` for a description that lacks a fact.
    """
    kind = device.get("kind")
    try:
        found = facts(kind).limits(device)
    except KeyError as missing:
        raise ArtifactError(f"the description of a {kind} device lacks {missing}; found {sorted(device)}") from None
    found |= {} if rounds is None else {"rounds": rounds}
    if max_tile_kinds is not None:
        found["max_tile_kinds"] = min(found["max_tile_kinds"], max_tile_kinds)
    return Limits(**found)


def has(kind: str, role: str) -> bool:
    """Whether a `module` is there. Raises `DeviceError` for a kind that is not known."""
    # Not by `find_spec`, which imports the operator, and torch with it.
    top, *place = _name(kind, role).split(".")
    return any(Path(folder, *place).with_suffix(".py").is_file() for folder in sys.modules[top].__path__)


def module(kind: str, role: str) -> ModuleType:
    """What an operator runs on `kind`; role: ``<operator>.<name>``, such as ``attention.executor``.

    Raises `DeviceError` for a kind that is not known.
    """
    return import_module(_name(kind, role))


def modules(kind: str, *roles: str) -> tuple[str, ...]:
    """Dotted names of a device's facts and of its modules in `roles`, a tuple; those that it does not have are left
    out.

    They are entered by name, which imports do not show: digests of code list them. Raises `DeviceError` for a kind that
    is not known.
    """
    return (f"{__name__}.{_known(kind)}.facts", *(_name(kind, role) for role in roles if has(kind, role)))


def offering(role: str) -> dict[str, str]:
    """Dotted names of the modules in a role, by the devices that have one."""
    return {kind: _name(kind, role) for kind in NAMES if has(kind, role)}


def _name(kind, role):
    operator, _, name = role.rpartition(".")
    return f"{__package__.partition('.')[0]}.{operator}.{_known(kind)}.{name}"


def _known(kind):
    if kind not in NAMES:
        raise DeviceError(f"device: expected a known kind, found {kind!r}; known: {', '.join(NAMES)}")
    return kind


@cache
def _described(kind):
    # As text, so that no caller can alter what the others see.
    return json.dumps(facts(kind).describe())

"""The forms in which a GPU runs a tile's kernel: what a calibration found fastest, else the default (stage T3).

`form_search` times the candidates of `config` and writes a file for each tile, type and head dim, on a GPU with a
driver, a torch, a triton and this code. It keeps one form, or two where short items with masks and long ones without
have different ones. Which of two a pattern takes is measured or predicted for its own items: a profile states the form
that it holds for, and a schedule those of its tiles: it runs with them wherever it is loaded. A schedule that states
none runs with the first of each tile on the GPU that it is on.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright import devices
from tilewright.attention.cuda import config
from tilewright.core import artifacts, caches, contents, provenance
from tilewright.core.contents import Amount
from tilewright.core.errors import ArtifactError, DeviceError

KIND = "form"
VERSION = 2
# Forms that a choice keeps, at most.
MOST = 2
# What the fastest form depends on beside the device.
CODE = tuple(
    f"tilewright.{name}"
    for name in (
        *(f"attention.cuda.{name}" for name in ("config", "tile_kernel", "tile_lists")),
        "attention.cuda.cost.form_search",
        "devices.cuda.online_softmax",
    )
)
# The facts of a device that a calibration holds for.
FACTS = ("name", "capability", "multiprocessors", "driver")

_LOG = logging.getLogger(__name__)
# By path, what this process has read or found. One process uses one form of a tile.
_HELD: dict = {}


@dataclass(frozen=True)
class Trial:
    """A candidate: its form, what became of it (``ok`` or why it was dropped), and what its launches took, if timed."""

    form: dict[str, int | str | None]
    status: str
    us: tuple[Amount, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The forms of one tile that were found fastest among `trials`, the first of which is the default.

    made_for: what it holds for, see `made_for`. forms: one, or `MOST`, distinct: first the one that is best over all
    launches, for where the pattern is not known.
    """

    made_for: dict[str, str | int | float | None]
    forms: tuple[dict[str, int | str | None], ...]
    trials: tuple[Trial, ...]


def of(tile, head_dim: int, dtype: torch.dtype):
    """The first of the forms `kept`, for a launch of which nothing else is known."""
    return kept(tile, head_dim, dtype)[0]


def kept(tile, head_dim: int, dtype: torch.dtype):
    """The forms of `tile` for programs of `head_dim` and torch's `dtype` on this GPU, a tuple of `KernelConfig`: those
    of its `Choice`, else the default alone.

    Raises `TileError` for a tile with too few rows.
    """
    device = _device()
    if device is None:
        return (config.for_tile(tile, head_dim, dtype),)
    stated = made_for(tile, head_dim, str(dtype).removeprefix("torch."))
    found = held(path_of(stated), stated)
    if found is None:
        return (config.for_tile(tile, head_dim, dtype, room(device)),)
    return tuple(map(config.read, found.forms))


def stated(tile, head_dim, dtype):
    """The forms `kept` as profiles state them, JSON-able dicts; dtype: a name."""
    return tuple(asdict(form) for form in kept(tile, head_dim, getattr(torch, dtype)))


def as_stated(form) -> dict:
    """A form as files state it: numbers, words and None by name."""
    return {name: int(value) if isinstance(value, bool) else value for name, value in asdict(form).items()}


def as_word(form):
    """A `KernelConfig` as one word, for the command line of a process; `from_word` reads it."""
    return ",".join(map(str, asdict(form).values()))


def from_word(word):
    """The `KernelConfig` that `as_word` wrote."""
    values: Any = (None if each == "None" else int(each) if each.isdigit() else each for each in word.split(","))
    return config.KernelConfig(*values)


def room(device):
    """What a described `device` has room for."""
    return config.Room(device["shared_bytes"], device["registers"])


def made_for(tile, head_dim: int, dtype):
    """What a choice holds for that is made now, a JSON-able dict; dtype: a name. Raises `DeviceError` without a GPU."""
    return here(CODE, tile, head_dim, dtype) | {"run": tile.run}


def here(code, tile, head_dim: int, dtype) -> dict:
    """What times of `tile`, or of whatever has rows, hold for that are taken on this GPU now, by the modules `code`; a
    JSON-able dict."""
    device = devices.describe("cuda")
    return {
        **{name: device[name] for name in FACTS},
        **{name: device["versions"][name] for name in ("torch", "triton")},
        "code": provenance.text_digest(*code),
        "dtype": dtype,
        "head_dim": head_dim,
        "rows": tile.rows,
    }


def path_of(stated):
    """The file of a choice that is `made_for` what is stated."""
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]
    name = "-".join(str(stated[each]) for each in ("dtype", "head_dim", "rows", "run"))
    return caches.folder() / KIND / f"{name}-{digest}.json"


def held(path, stated, say=False, read=config.read):
    """The `Choice` of a file; None where there is none that is `stated` so.

    say: look again where there was none, and log one line about a bad one. read: of a form, raises `ArtifactError`.
    """
    if path not in _HELD or (say and _HELD[path] is None):
        _HELD[path] = _read(path, stated, say, read) if caches.has(path) else None
    return _HELD[path]


def keep(path: str | Path, choice) -> None:
    """Use a `Choice` in this process, and write its file."""
    _HELD[path] = choice
    try:
        artifacts.write_json(path, KIND, VERSION, asdict(choice))
    except ArtifactError as error:
        _LOG.warning("the form serves this process alone: %s", error)


def _read(path, stated, say, read):
    try:
        found = contents.fields(path, KIND, artifacts.read_json(path, KIND, VERSION), Choice)
        others = [name for name in stated if found.made_for.get(name) != stated[name]]
        contents.expect(path, not others, "a choice for this device and code", f"another {', '.join(others)}")
        distinct = {read(form) for form in found.forms}
        contents.expect(
            path, 1 <= len(distinct) == len(found.forms) <= MOST, f"1 to {MOST} forms, distinct", found.forms
        )
        return found
    except ArtifactError as error:
        if say:
            _LOG.warning("%s: the form of a kernel is chosen anew: %s", path, error)
        return None


def _device():
    """Facts of the GPU; None without one, as under Triton's interpreter."""
    try:
        return devices.describe("cuda")
    except DeviceError:
        return None

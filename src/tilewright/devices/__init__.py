"""Targets: the kinds of device that schedules are made for and run on (stages T3 to T5).

A target is a folder ``targets/<name>`` and a word in `NAMES`. Code outside this package never asks for a target by
name: it asks for what the target's facts state. Nothing about a device is a default argument elsewhere. Contract of the
folder:

``facts.py``. Importing it needs no torch.
    ``describe() -> dict``: facts of the device of this process, JSON-able, its ``kind`` (the target's name), ``name``,
        ``threads`` and ``versions`` among them. Raises `DeviceError` where there is no such device.
    ``IDENTITY``: the facts that make two devices differ for timing, versions of packages by their names. ``MACHINE``:
        those of them that a saved plan is bound to. Where only others differ, the plan runs, maybe slower than
        predicted.
    ``seen() -> dict``: those of ``IDENTITY`` that this process can state without torch; of a device that is elsewhere,
        the versions alone.
    ``limits(device) -> dict``: lanes, per_block, envelope, occupancy, max_tile_kinds, rounds, round_us and fork_us of
        `Limits`, from a description alone.
    ``TILES``, ``SPLIT_KEYS``: the tiles that a plan chooses from and the longest key range of a work item, by default.
    ``FEWEST_ROWS``: of a tile that the executor runs.
    ``current() -> int | None``: the number of the device that torch computes on now; None where devices have no
        numbers.
    ``TORCH_DEVICE``: torch's name of the memory that q, k and v lie in: ``cpu`` or ``cuda``.
    ``CUDA``: bool, q, k and v are CUDA tensors: libraries that need an NVIDIA GPU run on them.
    ``GPU_TIMER``: bool, a call returns before its work is done, and CUDA events time it (`core.timing.time_gpu`). Where
        it is False the result is complete when the call returns, and the host's clock times it
        (`core.timing.time_call`).
    ``GRAPHS``: bool, a call may be captured in a CUDA graph, after a first call with such tensors.
    ``EXCLUSIVE``: bool, timed jobs start side by side and each holds a device through a lock while it runs on it. Where
        it is False the workflow runs one timed job at a time, on all cores.
    ``available() -> list``, ``claim(name)``, where ``EXCLUSIVE``: names of the devices that this process may use, the
        same in every process of the machine, and a function that makes one of them the only one that this process sees.
        Claim before torch uses a device. ``available`` raises `DeviceError` without any.

``probe.py``.
    ``measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s, known=None)``: times the shapes of
        ``attention.blocks.work.items(blocks, split_keys)`` in about `budget_s` seconds. Returns ``(launch_us, tile_us,
        shapes)``: two costs of `profile.Profile` and a `profile.ItemShape` each, in the order of the shapes. known:
        what a probe may keep, by form of its items, from one split length of the same blocks to the next.

``executor.py``.
    ``prepare(schedule, blocks, *, heads, head_dim, dtype, **options)``: an `Executor` of the schedule. blocks: ``{tile:
        Blocks}``. dtype: torch's. Options: ``row_order`` and ``col_order`` (``order[new] = old``, None for the natural
        order), ``ordered`` (q, k, v and the result have their tokens in that order), ``bias`` (see
        `attention.masks.as_bias`), ``scale`` (default ``head_dim ** -0.5``). Raises `ArtifactError` for blocks of another
        schedule, `PatternError` for an order, bias, head dim or scale that does not fit.
    An executor may have ``with_bias(table) -> Executor``: itself with other values of its bias, float32 [H, T] on the
        CPU. Without it executors are prepared anew for other values. Where the module states ``READS_TABLES = True``
        the table is of any float type and on the executor's device. Each call reads it there and waits for nothing, so
        that a capture in a CUDA graph sees the values of each replay.

``mask_cost.py``, optional.
    ``mask_cost(graph, row_ptr, head_dim)``: how many times as much work costs with the masks of these groups of rows as
        without. A target without it applies masks at no cost.

``forms.py``, optional: kernels that may be compiled in several forms. A target without it has one.
    ``stated(tile, head_dim, dtype)``: the forms of a tile on this device that a pattern may be fastest with, a tuple of
        JSON-able dicts. ``probe.measure`` takes one as ``form``. The executor takes it from ``Schedule.forms``, where a
        schedule states it, else the first.

``backward.py``, optional: ``gradients(executor, q, k, v, out, grad) -> (dq, dk, dv)`` of ``out = executor(q, k, v)``.
    Calls on a target without it that need a gradient are refused. Also, optional, of executors with a bias,
    ``gradients_with_bias(…) -> (dq, dk, dv, d_table)``: the last float32 [H, T], the sums over the pairs of each entry.
    Without it, calls that need a gradient of a bias are refused. ``TAKES_UNITS`` and ``BIAS_TAKES_UNITS``: True where
    these take several patterns in one plan (`attention.units`); refused without.

``packed.py``, optional: see `packed.lists`. A target without it runs no packed batches.

``slices.py``, optional: attention of groups of queries to lists of keys. A target without it runs no slices.
    ``Executor(layout, device)``, for a `slices.layout.Layout`. Tensors are those of `slices.layout.SliceLists`; nothing
    waits for the device. Its methods:
    ``from_mask(mask) -> (keys, counts, order, state)``: lists of the keys that bool [B or 1, H or 1, G, N_k] flags, the
        flags of a group side by side.
    ``pack(keys, counts) -> bits``, ``unpack(bits) -> (keys, counts, order, state)``: see `SliceLists.pack`.
    ``rank(counts) -> (order, state)``, what follows from the counts of lists made elsewhere.
    ``attend(lists, q, k, v, *, scale, out=None, with_lse=False) -> (out, lse or None)``: attention [B, H, N_q, D] and
        natural log-sum-exps, float32 [B, H, N_q]. lists: the four tensors. out: memory for the result, None for new.
        Groups without keys give zeros and -inf. All is NaN where ``state`` says that a list did not fit. Raises
        `PatternError` or `DeviceError` for tensors other than the layout's, or that need a gradient.

``maps.py``, optional: kernels for networks that make maps. A target without it runs torch's operators alone.
    ``FORMS``: ``{operator: forms}``, those worth timing. ``REFUSALS``: what is raised for a form that does not fit.
    ``copier(device) -> callable(out, x)``: copies x to out, contiguous tensors of one shape and type on that
        ``torch.device``, at the least cost for the host.
    ``decode(…, form)``, ``dwconv_gelu(…, form)``, ``patches(…, form)``, ``norm(…, form)``, ``norm_linear(…, form)``,
        ``attention(…, form)``, ``linear_add(…, form)``: what the operators of these names in `networks._maps` compute,
        with sums in float32. Raises `PatternError` for tensors of several types, or that need a gradient.

``scenes.py``, optional: a kernel that draws scenes. Without it they are drawn on the CPU.
    ``draw(arrays, texels, pixels) -> (pictures, labels, owners)``: what `tilewright_study.scenes.drawing.drawn` draws,
    uint8 [B, 3, H,
        W] and twice [B, H, W], before outlines are taken. arrays: of `tilewright_study.scenes.drawing.Listed`, NumPy's;
        texels: of `tilewright_study.scenes.drawing.texels`, on the device.

``slice_selection.py``, beside ``slices.py``: which keys such lists hold, see `slices.selection`.

``cost_model.py``, optional: plans are made, and orders compared, by its predictions; without it plans are made of what
    the probe measures.
    ``predict(blocks, *, heads, head_dim, dtype, split_keys, calibration, bias_heads)``: returns what ``probe.measure``
        does. bias_heads: heads with a bias of their own, None without a bias.

``calibration.py``, beside ``cost_model.py``: what its predictions are made of.
    ``of(tiles, head_dim, dtype, anew=False)``: ``{tile name: calibrations}``, one for each of the tile's `forms`, read
        from a file of this device or measured; anew: measured.
    ``summary(calibration)``: what a person wants to know of one, ``{name: text}``.
"""

import hashlib
import json
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from tilewright.core.errors import ArtifactError, DeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from tilewright.attention.blocks.tiles import Tile
    from tilewright.graph import Graph

NAMES = ("cpu", "cuda")
# Modules of a target that whole plans enter, from what their tiles cost to their gradients.
PLANNING = ("executor", "probe", "calibration", "cost_model", "forms", "mask_cost", "backward")
# Modules that a target may be without.
OPTIONAL = ("backward", "packed", "slices", "maps", "scenes", "calibration", "cost_model", "mask_cost", "forms")


@dataclass(frozen=True)
class Limits:
    """The limits that a schedule must respect; symbols are those of the published constraints C2 to C7, of which C4 and
    C6 are others here (docs/paper.md).

    lanes: work items that run side by side (C4, load).
    per_block: most of each named resource that one item may take (C2), e.g. ``{"working_set_bytes": 1 << 20}``.
    envelope: most of each named resource that the tile kinds of one round may take together (C5), each kind counting
        with the largest need among its items.
    occupancy: most occupancy units, such as bytes of memory, that the items of one round may take together (C6). As
        published, these are multiprocessors; here items queue for them.
    max_tile_kinds: tile kinds in one round (C3, kappa).
    conflicts: pairs of tile names that may not share a round (C7).
    rounds: most rounds that a schedule may use.
    round_us: cost of one more round (a barrier), on top of its launches.
    fork_us: cost of each tile kind of a round beyond the first, on top of its launches.
    """

    lanes: int
    per_block: dict[str, float]
    envelope: dict[str, float]
    occupancy: float
    max_tile_kinds: int
    conflicts: tuple[tuple[str, str], ...] = field(default=())
    rounds: int = 1
    round_us: float = 0.0
    fork_us: float = 0.0


class Executor(Protocol):
    """A prepared schedule. Call it with q [B, H, N_q, D] and k, v [B, H, N_k, D]; it returns attention [B, H, N_q, D].

    The result lies in memory as `devices.qkv.empty` makes it. A query without an allowed key gets zeros. A call raises
    `PatternError` or `DeviceError` for tensors other than planned, or that need a gradient. Several threads may call at
    the same time.
    """

    @property
    def launches(self) -> Sized:
        """The launches of one call."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks that are held between calls."""

    @property
    def executed(self) -> int:
        """Pairs of query and key that one head works through in a call, padding included."""

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that a call for `batch` entries holds beyond its arguments and `memory_bytes`, result included."""

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        """Attention over the pattern."""


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
    """The module of a target's facts. Raises `DeviceError` for a kind that is not known."""
    return _module(kind, "facts")


def executor(kind: str) -> ModuleType:
    """The module whose `prepare` runs schedules on `kind`. Raises `DeviceError` for a kind that is not known."""
    return _module(kind, "executor")


def probe(kind: str) -> ModuleType:
    """The module whose `measure` times shapes on `kind`. Raises `DeviceError` for a kind that is not known."""
    return _module(kind, "probe")


def packed(kind: str) -> ModuleType:
    """The module whose `Executor` runs packed batches on `kind`. Raises `DeviceError` where there is none."""
    if not runs_packed(kind):
        raise DeviceError(f"no packed batches run on a device of kind {kind!r}; known: {', '.join(packing())}")
    return _module(kind, "packed")


def slices(kind: str) -> ModuleType:
    """The module whose `Executor` runs slices on `kind`. Raises `DeviceError` where there is none."""
    if not runs_slices(kind):
        raise DeviceError(f"no slices run on a device of kind {kind!r}; known: {', '.join(slicing())}")
    return _module(kind, "slices")


def maps(kind: str) -> ModuleType | None:
    """The module of kernels on maps of `kind`, None where there is none. Raises `DeviceError` for an unknown kind."""
    return _module(kind, "maps") if _has(kind, "maps") else None


def scenes(kind: str) -> ModuleType | None:
    """The module that draws scenes on `kind`, None where there is none. Raises `DeviceError` for an unknown kind."""
    return _module(kind, "scenes") if _has(kind, "scenes") else None


def mask_cost(kind: str, graph: "Graph", row_ptr: "NDArray[np.int32]", head_dim: int) -> float:
    """How many times as much the work of `graph` in groups of rows `row_ptr` [G+1] costs on `kind` with its masks.

    Raises `DeviceError` for a kind that is not known.
    """
    return _module(kind, "mask_cost").mask_cost(graph, row_ptr, head_dim) if _has(kind, "mask_cost") else 1.0


def forms(kind: str, tile: "Tile", head_dim: int, dtype: str) -> tuple[dict[str, int | str | None] | None, ...]:
    """The forms in which `kind` runs `tile`: which is fastest depends on the pattern. None where there is one alone.

    Raises `DeviceError` for a kind that is not known and `TileError` for a tile that it does not run.
    """
    return _module(kind, "forms").stated(tile, head_dim, dtype) if _has(kind, "forms") else (None,)


def backward(kind: str) -> ModuleType:
    """The module whose `gradients` differentiates executors of `kind`, see `differentiates`."""
    return _module(kind, "backward")


def differentiates(kind: str) -> bool:
    """Whether executors of `kind` have a backward. Raises `DeviceError` for a kind that is not known."""
    return _has(kind, "backward")


def differentiates_bias(kind: str, several: bool = False) -> bool:
    """Whether executors of `kind` have a gradient of a bias; several: in plans of several patterns (`attention.units`).

    Raises `DeviceError` for a kind that is not known.
    """
    needed = "BIAS_TAKES_UNITS" if several else "gradients_with_bias"
    return differentiates(kind) and bool(getattr(backward(kind), needed, False))


def differentiates_units(kind: str) -> bool:
    """Whether the backward of `kind` takes several patterns in one plan, see `attention.units`."""
    return differentiates(kind) and getattr(backward(kind), "TAKES_UNITS", False)


def runs_packed(kind: str) -> bool:
    """Whether packed batches run on `kind`. Raises `DeviceError` for a kind that is not known."""
    return _has(kind, "packed")


def runs_slices(kind: str) -> bool:
    """Whether slices run on `kind`. Raises `DeviceError` for a kind that is not known."""
    return _has(kind, "slices")


def slicing() -> tuple[str, ...]:
    """Names of the targets that run slices."""
    return tuple(filter(runs_slices, NAMES))


def cost_model(kind: str) -> ModuleType:
    """The module whose `predict` tells what blocks cost on `kind`. Raises `DeviceError` where there is none."""
    return _predicting(kind, "cost_model")


def calibration(kind: str) -> ModuleType:
    """The module whose `of` tells what predictions are made of on `kind`. Raises `DeviceError` where there is none."""
    return _predicting(kind, "calibration")


def _predicting(kind, role):
    if not predicts(kind):
        known = ", ".join(filter(predicts, NAMES))
        raise DeviceError(f"a device of kind {kind!r} has no cost model to calibrate; known: {known}")
    return _module(kind, role)


def predicts(kind: str) -> bool:
    """Whether `kind` has a cost model. Raises `DeviceError` for a kind that is not known."""
    return _has(kind, "cost_model")


def packing() -> tuple[str, ...]:
    """Names of the targets that run packed batches."""
    return tuple(filter(runs_packed, NAMES))


def modules(kind: str, *roles: str) -> tuple[str, ...]:
    """Dotted names of a target's facts and of its modules in `roles` (``executor``, ``probe`` and `OPTIONAL`), a tuple.

    They are entered by name, which imports do not show: digests of code list them. Optional ones are left out where a
    target has none. Raises `DeviceError` for a kind that is not known.
    """
    there = (role for role in roles if role not in OPTIONAL or _has(kind, role))
    return tuple(_name(kind, role) for role in ("facts", *there))


def limits(
    device: dict,
    *,
    rounds: int | None = None,
    max_tile_kinds: int | None = None,
    conflicts: Iterable[tuple[str, str]] = (),
) -> Limits:
    """`Limits` of a described device for schedules of at most `rounds` rounds.

    rounds, max_tile_kinds (kappa of C3): by default the device's own; conflicts: of C7. Raises `DeviceError` for an
    unknown kind and `ArtifactError` for a description that lacks a fact.
    """
    kind = device.get("kind")
    try:
        found = facts(kind).limits(device)
    except KeyError as missing:
        raise ArtifactError(f"the description of a {kind} device lacks {missing}; found {sorted(device)}") from None
    stated = {"rounds": rounds, "max_tile_kinds": max_tile_kinds}
    found |= {name: value for name, value in stated.items() if value is not None}
    return Limits(**found, conflicts=tuple(conflicts))


def _known(kind):
    if kind not in NAMES:
        raise DeviceError(f"no device of kind {kind!r} can be profiled or run on here; known: {', '.join(NAMES)}")
    return kind


def _has(kind, role):
    return find_spec(_name(kind, role)) is not None


def _name(kind, role):
    return f"{__name__}.{_known(kind)}.{role}"


def _module(kind, role):
    return import_module(_name(kind, role))


@cache
def _described(kind):
    # As text, so that no caller can alter what the others see.
    return json.dumps(facts(kind).describe())

"""Slice lists of the keys that will matter, predicted from q and k on their device; the host never waits."""

import ast
import math
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.core import arguments
from tilewright.core.caches import Recent
from tilewright.core.errors import ConfigError, DeviceError, PatternError
from tilewright.core.operators import watched
from tilewright.slices import operators, predictors, selection
from tilewright.slices.attention import check_scale, check_tensors
from tilewright.slices.backends import SELECTIONS
from tilewright.slices.layout import (
    STEP,
    Layout,
    SliceLists,
    check_lengths,
    check_tokens,
    is_share,
    make_layout,
    share_of,
)
from tilewright.slices.predictors.given import of_function

# Keys of a list at least, unless fewer are asked for.
LEAST = 64


def predict(
    q: Tensor,
    k: Tensor,
    *,
    budget: float,
    by: str = "pooled",
    rows: int = 128,
    width: int = 1,
    mass: float | None = None,
    keep: float | Iterable[float] | None = None,
    threshold: float | None = None,
    always: Iterable[tuple[int, int]] = (),
    text: tuple[int, int] = (0, 0),
    lengths: Tensor | None = None,
    least: int | None = None,
    lse: Tensor | None = None,
    mask: Any = None,
    scale: float | None = None,
    **settings: Any,
) -> SliceLists:
    """List the keys that each group of queries is expected to attend to most.

    Parameters
    ----------
    q, k : Tensor
        [B, H, N_q, D] and [B, H, N_k, D], as `attend` takes them.
    budget : float
        Room for keys in a list, as a share of all keys in (0, 1]. Lists are never cut: where one of `mass` or
        `threshold` does not fit, every result is NaN, and `SliceLists.check` names the budget that holds all. A `keep`
        beyond the room is refused.
    by : str
        A predictor, see `tilewright.slices.predictors`.
    rows : int
        Queries of a group.
    width : int
        Shares are summed over aligned runs of so many keys, which are listed whole.
    mass : float, optional
        List the keys with the largest shares that make up this much of a group's attention.
    keep : float or iterable of float, optional
        List this share of all keys, those with the largest shares: one number, or one for each head. Beside `mass` or
        `threshold`, the most that they list.
    threshold : float, optional
        List the keys whose share is at least this much.
    always : iterable of (int, int)
        Ranges ``(first, end)`` of keys that all groups list, such as a first frame. They count towards the budget, and
        their shares towards `mass`.
    text : (int, int)
        Tokens at the beginning and at the end that are text. As queries they attend to all keys; as keys all groups
        list them.
    lengths : Tensor, optional
        Int [B], from 1 to N_k, on the device: only so many first keys of each batch entry count. A number out of range
        makes every result NaN.
    least : int, optional
        Keys of a list at least; `LEAST` by default.
    lse : Tensor, optional
        Log-sum-exps of dense attention, float32 [B, H, N_q], for ``by="column"``. None computes them.
    mask : Tensor or callable, optional
        Bool [B or 1, H or 1, G, N_k], or a mask function as FlexAttention takes it, for ``by="given"``.
    scale : float, optional
        Of the scores; the default is ``D ** -0.5``.
    **settings
        What the predictor lets a user choose, such as ``pool=32``.

    Returns
    -------
    SliceLists
        Of keys with equal shares `keep` lists the first. Shares are exact to an eighth of an octave.

    Raises
    ------
    UnknownNameError, ConfigError, PatternError
        For arguments that are unknown or out of range.
    DeviceError
        For a device without kernels, and for lists that do not fit its memory.

    Notes
    -----
    Groups whose shares are NaN make every result NaN; `SliceLists.check` names the group. On a GPU nothing waits, and
    calls may be captured in a CUDA graph after a first one.

    Examples
    --------
    >>> import torch
    >>> from tilewright import slices
    >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
    >>> lists = slices.predict(q, k, keep=0.25, budget=0.25)
    >>> slices.attend(q, k, v, lists).shape
    torch.Size([1, 2, 512, 64])
    """
    always, keep, key = _ranges(always), _keeps(keep), None
    check_tensors(q=q, k=k)
    # Lists are constants.
    q, k = (x.detach() if x.requires_grad else x for x in (q, k))
    for name, value in (("mass", mass), ("threshold", threshold)):
        if value is not None and not is_share(value):
            raise ConfigError(f"{name}: expected a number in (0, 1], found {arguments.shown(value)}")
    least = None if least is None else arguments.whole("least", least, least=0)
    arguments.of_kind(str, f"one of {', '.join(predictors.NAMES)}", by=by)
    if lse is None and mask is None and not watched(q):
        key = (budget, by, rows, width, mass, keep, threshold, always, text, least, scale, lengths is None)
        key += tuple(settings.items())
        if (lists := _again(key, q, k, lengths)) is not None:
            return lists
    check_tokens(q=q, k=k)
    batch, heads, queries, _ = q.shape
    layout = make_layout(batch, heads, queries, k.shape[2], rows=rows, budget=budget, width=width, text=text)
    lengths = None if lengths is None else check_lengths(lengths, q)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale)
    if callable(mask) and not isinstance(mask, Tensor):
        mask = of_function(mask, layout, q.device)
    of_text = ((0, layout.first), (layout.keys - layout.last, layout.keys))
    always = [*always, *(each for each in of_text if each[0] < each[1])]
    ranges = [number for first, end in always for number in (first, end)]
    # As text, since operators take no dict.
    stated = ";".join([f"{name}={value!r}" for name, value in arguments.plain(settings).items()])
    given = q, k, lse, mask, lengths, by, stated, mass, keep, threshold, ranges, least, scale
    if watched(q):
        return SliceLists(layout, *torch.ops.tilewright.slices_predict(*given, [*layout]), lengths=lengths)
    made, replay = _recorded(layout, *given)
    if replay is not None and key is not None:
        # Arguments that no dict takes go the usual way each time.
        with suppress(TypeError):
            _REPLAYS.add(key, (layout, replay))
    return SliceLists(layout, *made, lengths=lengths)


# Calls that were taken down, by their arguments but tensors: pairs of a layout and a replay, see `slices.selection`.
# Arguments, and layouts of tensors for each, that are kept.
_REPLAYS = Recent(256, 8)


def _ranges(always):
    """Ranges of keys as a tuple of pairs. Raises `ConfigError` for what are none."""
    ranges = arguments.each(always)
    if ranges is None:
        raise ConfigError(f"always: expected ranges (first, end) of keys, found {arguments.shown(always)}")
    return tuple(arguments.sizes("always", each, 2, least=0) for each in ranges)


def _keeps(keep):
    """Shares of the keys that are listed, a tuple of one or of one for each head. Raises `ConfigError` for others."""
    shares = None if keep is None else arguments.each(keep) or (keep,)
    if shares is not None and not all(map(is_share, shares)):
        raise ConfigError(f"keep: expected a number in (0, 1], or one for each head, found {arguments.shown(keep)}")
    return shares and tuple(map(float, shares))


def _again(key, q, k, lengths):
    """The lists of a call like one that was taken down; None where there was none."""
    try:
        known = _REPLAYS.get(key)
        inputs = (q, k) if lengths is None else (q, k, lengths)
        for layout, replay in known:
            if (made := replay(*inputs)) is not None:
                return SliceLists(layout, *made, lengths=lengths)
    except (TypeError, torch.OutOfMemoryError):
        # Arguments that no dict takes, and too little memory: the usual way says what is wrong.
        pass
    return None


class _Plan(NamedTuple):
    """What follows from the arguments but q and k: see `_planned`."""

    module: Any
    params: Any
    rule: selection.Rule
    parts: tuple[selection.Part, ...]


def _predict(layout, *given):
    return _recorded(layout, *given)[0]


def _recorded(layout, q, k, lse, mask, lengths, by, stated, mass, keep, threshold, ranges, least, scale):
    """``(keys, counts, order, state)``, and what makes them for other tensors of these layouts, or None."""
    plan = _planned(layout, q.shape[-1], by, stated, mass, keep and tuple(keep), threshold, tuple(ranges), least)
    tensors = _tensors(layout, q, plan, by, lse=lse, mask=mask)
    recorded = _recorder(q.device)

    def call(tape, q, k, lengths=None):
        given = {**tensors, **({"lengths": lengths} if "lengths" in plan.params.takes else {})}
        keys, counts = _allocated(layout, q.device)
        queries = q[:, :, layout.grouped]
        for part in plan.parts:
            cut = {name: _cut(layout, part, name, x) for name, x in given.items()}
            chosen = _selection(selection.part_layout(layout, part), q.device)
            inputs = _cut(layout, part, "q", queries), _cut(layout, part, "k", k)
            codes = plan.module.codes(chosen, *inputs, plan.params, scale=scale, **cut)
            lists = (_cut(layout, part, "lists", x) for x in (keys, counts))
            chosen.select(codes, selection.part_rule(plan.rule, part), *lists, _cut(layout, part, "lengths", lengths))
            # Before those of the next part are made.
            del codes
            if tape is not None:
                tape.settle(keys, counts)
        made = keys, counts, *operators.executor(layout, q.device).rank(counts)
        if tape is not None:
            tape.settle(*made)
        return made

    inputs = (q, k) if lengths is None else (q, k, lengths)
    # Other tensors are made by torch's operators, which a tape does not see.
    if recorded is None or any(x is not None for x in tensors.values()):
        return call(None, *inputs), None
    return recorded(q.device, call, *inputs)


@lru_cache(64)
def _recorder(device):
    """What takes down a call's launches on a device, see `slices.selection`; None where there is nothing to gain."""
    return getattr(import_module(SELECTIONS[device.type]), "recorded", None) if device.type in SELECTIONS else None


@lru_cache(256)
def _planned(layout, head_dim, by, stated, mass, keep, threshold, ranges, least):
    """The `_Plan` of arguments. Raises `UnknownNameError` or `ConfigError`."""
    settings = {}
    for entry in filter(None, stated.split(";")):
        name, _, value = entry.partition("=")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ConfigError(f"{name}: expected a number, a text or a tuple of such, found {value}") from None
    module, params = predictors.parse(by, settings)
    params.check(layout)
    rule = _rule(layout, by, params, mass, keep, threshold, ranges, least)
    params = params.fitted(layout, rule.mass is None and rule.code is None)
    of_runs = layout.keys // layout.width if layout.width > 1 else 0
    group_bytes = module.group_bytes(params, layout, head_dim) + of_runs
    return _Plan(module, params, rule, selection.parts(layout, group_bytes))


def _rule(layout, by, params, mass, keep, threshold, ranges, least):
    """The `selection.Rule` of arguments."""
    stated = {"mass": mass, "keep": keep, "threshold": threshold}
    stated = {name: value for name, value in stated.items() if value is not None}
    if params.known:
        if stated or least is not None:
            found = ", ".join([*stated, *(() if least is None else ("least",))])
            raise ConfigError(f"predictor {by}: expected none of mass, keep, threshold and least, found {found}")
        threshold, least = 1.0, 0
    elif not stated or {"mass", "threshold"} <= set(stated):
        raise ConfigError(
            "expected one of mass, threshold and keep, or keep with one of the others, found "
            + (", ".join(stated) or "none")
        )
    least = LEAST if least is None else least
    units = -(-layout.keys // layout.width)
    most = units if layout.capacity >= layout.keys else layout.capacity // layout.width
    least = -(-min(least, layout.keys) // layout.width)
    needed = {"least": least}
    rule = selection.Rule(layout.width, mass, least=least, most=most, free=params.free, known=params.known)
    rule = rule._replace(always=_units(layout, ranges))
    needed["always and text" if layout.text else "always"] = rule.n_always
    if keep is not None:
        if len(keep) not in (1, layout.heads):
            raise ConfigError(f"keep: expected a number, or one for each of {layout.heads} heads, found {len(keep)}")
        counts = tuple(-(-math.ceil(share * layout.keys) // layout.width) for share in keep)
        rule = rule._replace(count=counts if len(set(counts)) > 1 else counts[0])
        needed["keep"] = max(counts)
    # A budget that holds one of them may be too small for another.
    name = max(needed, key=needed.__getitem__)
    if needed[name] > most:
        raise ConfigError(_too_small(layout, name, needed[name]))
    if threshold is not None:
        # Shares of at least the threshold have this code or a smaller one.
        deepest = selection.CODES - 1
        rule = rule._replace(code=min(deepest, math.floor(-selection.OCTAVE * math.log2(threshold))))
    return rule


def _too_small(layout, name, units):
    keys = min(units * layout.width, layout.keys)
    return (
        f"budget: expected room for the {keys} keys of {name}, found {layout.capacity}; a budget of "
        f"{share_of(keys, layout.keys):.3f} holds them"
    )


def _units(layout, ranges):
    """Ranges of keys, flat, as ranges of units in order that do not touch."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(zip(ranges[::2], ranges[1::2], strict=True)):
        if not 0 <= first < end <= layout.keys:
            raise ConfigError(f"always: expected ranges within 0 to {layout.keys}, found {first} to {end}")
        first, end = first // layout.width, -(-end // layout.width)
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def _tensors(layout, q, plan, by, **given):
    """The tensors that the predictor takes, those of `given` or its own. Raises for others."""
    for name, x in given.items():
        if x is not None and name not in plan.params.takes:
            raise ConfigError(f"{name}: expected none, predictor {by} takes no such tensor")
    if "mask" in plan.params.takes:
        if given["mask"] is None:
            given["mask"] = plan.module.mask(plan.params, layout, q.device)
        elif plan.params != type(plan.params)():
            raise ConfigError(f"predictor {by}: expected a mask or a pattern, found both")
    shapes = {
        "lse": (torch.float32, [(layout.batch,), (layout.heads,), (layout.tokens,)]),
        "mask": (torch.bool, [(1, layout.batch), (1, layout.heads), (layout.groups,), (layout.keys,)]),
    }
    taken = {name: x for name, x in given.items() if name in plan.params.takes}
    for name, x in taken.items():
        if x is None:
            continue
        dtype, sizes = shapes[name]
        fits = x.ndim == len(sizes) and all(n in known for n, known in zip(x.shape, sizes, strict=True))
        if x.dtype != dtype or not fits:
            shape = ", ".join(" or ".join(map(str, sorted(set(known)))) for known in sizes)
            raise PatternError(f"{name}: expected {dtype} of shape ({shape}), found {x.dtype} of {tuple(x.shape)}")
        if x.device != q.device:
            raise DeviceError(f"{name}: expected a tensor on {q.device}, as q, found {x.device}")
    if taken.get("lse") is not None:
        taken["lse"] = taken["lse"][:, :, layout.grouped]
    return taken


# What a part takes of a tensor: along batch and heads, and for each tensor along its third dimension.
def _cut(layout, part, name, x):
    if x is None or part == selection.WHOLE:
        return x
    if name == "lengths":
        return x[part.batch]
    rows = slice(*(None if g is None else g * layout.rows for g in (part.groups.start, part.groups.stop)))
    third = {"q": rows, "lse": rows, "k": slice(None)}.get(name, part.groups)
    return x[part.batch if len(x) > 1 else slice(None), part.heads if x.shape[1] > 1 else slice(None), third]


@lru_cache(256)
def _selection(layout, device):
    """The `Selection` of a device for (a part of) a layout."""
    return import_module(SELECTIONS[device.type]).Selection(layout, device)


def _allocated(layout, device):
    """Memory for keys and counts. Raises `DeviceError` where the device has not as much."""
    if device.type not in SELECTIONS:
        raise DeviceError(f"expected tensors on one of {', '.join(SELECTIONS)}, found {device}")
    total = _memory(device)
    if _bytes(layout) + selection.WORKSPACE > total:
        raise DeviceError(_too_large(layout, f"the device has {total / 1e9:.1f} GB", total))
    counts = torch.empty(layout.batch, layout.heads, layout.groups, dtype=torch.int32, device=device)
    try:
        return counts.new_empty(*counts.shape, layout.capacity), counts
    except torch.OutOfMemoryError as error:
        raise DeviceError(_too_large(layout, "that much is not free", _bytes(layout) // 2)) from error


def _bytes(layout):
    return 4 * layout.batch * layout.heads * layout.groups * layout.capacity


def _too_large(layout, why, room):
    per_key = 4 * layout.batch * layout.heads * layout.groups
    capacity = max(0, room - selection.WORKSPACE) // per_key // STEP * STEP
    would = f"a budget of {math.floor(1000 * capacity / layout.keys) / 1000:.3f} would fit" if capacity else "none fits"
    return (
        f"budget: expected lists that fit, found {_bytes(layout) / 1e9:.1f} GB of {layout.capacity} keys a group, and "
        f"{why}; {would}"
    )


@lru_cache(64)
def _memory(device):
    return import_module(SELECTIONS[device.type]).memory(device)


def _fake_predict(layout: Layout, q, *_):
    return operators.fake_lists(layout, q)


operators.define(
    "predict",
    "Tensor q, Tensor k, Tensor? lse, Tensor? mask, Tensor? lengths, str by, str settings, "
    "float? mass, float[]? keep, float? threshold, "
    "int[] always, int? least, float scale",
    "(Tensor, Tensor, Tensor, Tensor)",
    _predict,
    _fake_predict,
)

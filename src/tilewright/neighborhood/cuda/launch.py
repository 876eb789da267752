"""Launches of neighbourhood attention on an NVIDIA GPU (stage T5)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from tilewright.core.errors import DeviceError
from tilewright.devices.cuda.launcher import CachedLaunch, fitting
from tilewright.neighborhood.boxes import Candidate, Choice
from tilewright.neighborhood.cuda import forms, kernels
from tilewright.neighborhood.rule import Rule

LOG2E = math.log2(math.e)
# A pair of tensors of extra keys and values, or None.
Extra = tuple[torch.Tensor, torch.Tensor] | None


def columns(n: int) -> tuple[int, int]:
    """Powers of two whose sum is at least `n`, the second may be 0: blocks of channels."""
    first = max(16, 1 << (n.bit_length() - 1))
    if first >= n:
        return first, 0
    return first, max(16, 1 << (n - first - 1).bit_length())


@dataclass(frozen=True)
class Setting:
    """What calls share beside their tensors' layouts."""

    rule: Rule
    scale: float
    extra: bool
    lse: bool
    forms: tuple
    bound: float | None = None
    free: bool = False


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    scale: float,
    extra: Extra = None,
    want_lse: bool = False,
    bound: float | None = None,
    form: forms.Form | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(result [B, *grid, H, channels of v], natural log-sum-exps [B, *grid, H] in float32 or None)``.

    q, k, v: [B, *grid, heads, channels] on one device, of one type, checked; the last stride is 1. bound: that no
    scaled score exceeds, None where none is known. form: None for what `forms.choose` finds. Raises `DeviceError` for
    more programs than a launch has.
    """
    return _caller(q, rule, scale, extra is not None, want_lse, bound, form)(q, k, v, *(extra or ()))


def prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, scale: float, want_lse: bool, bound: float | None
) -> Callable:
    """See `backends`."""
    return _caller(q, rule, scale, False, want_lse, bound, again=True)


def _caller(q, rule, scale, extra, want_lse, bound, form=None, again=False):
    """``callable(q, k, v, extra keys, extra values) -> (result, log-sum-exps or None)`` for tensors like `q`; without
    `extra` the last two are not given. again: all calls have tensors of one layout."""
    if q.dtype == torch.float16:
        # Weights far below the bound are none in this type.
        bound = None
    form = form or forms.choose(rule, tuple(q.shape[1:-2]), q.shape[0] * q.shape[-2], q.shape[-1], q.dtype)
    # Measured in bfloat16 alone; in float16, weights far from 1 are none. On one axis a maximum costs less than what is
    # kept to compute a box once more.
    free = bound is None and q.dtype == torch.bfloat16 and q.shape[-1] <= 128 and q.ndim > 4
    launch = _forward(Setting(rule, scale, extra, want_lse, (form,), bound, free), q.device)
    if again:
        launch = launch.for_one_layout()

    def call(q, k, v, *more):
        if want_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
            return launch(q, k, v, lse, *more), lse
        # A kernel takes extra keys behind log-sum-exps: here it reads the address of `q`, and does not use it.
        return launch(q, k, v, q, *more) if more else launch(q, k, v), None

    return call


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    rule: Rule,
    scale: float,
    extra: Extra = None,
    chosen: tuple[forms.Form, forms.Form] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """See `backends`. chosen: forms of the gradients of queries and of keys; None for what `forms` finds."""
    chosen = chosen or forms.choose_backward(rule, tuple(q.shape[1:-2]), q.shape[0] * q.shape[-2], q.shape[-1], q.dtype)
    # Their programs compute a box each.
    setting = Setting(rule, scale, extra is not None, True, tuple(replace(form, run=1) for form in chosen))
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    dq = _queries(setting, q.device)(q, k, v, out, grad, lse, delta, *(extra or ()))
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dk = _keys(setting, q.device)(dv, q, k, v, grad, lse, delta)
    of_extra = (None, None) if extra is None else _extra_gradients(q, extra, lse, delta, grad, scale)
    return dq, dk, dv, *of_extra


def choose(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> Choice:
    """See `neighborhood.backends`. Padded rows and keys count as visited."""
    form = forms.choose(rule, grid, heads, dim, dtype)
    return Choice(form.box, _visited(rule, grid, form), None)


def candidates(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Candidate]:
    """See `neighborhood.backends`; predicted: by `forms.cost`."""
    chosen = forms.choose(rule, grid, heads, dim, dtype)
    others = {forms.with_run(rule, grid, form, heads, dim) for form in forms.candidates(rule, grid, dim, dtype)} - {
        chosen
    }
    costs = {form: forms.cost(rule, grid, form, heads) for form in (chosen, *others)}
    in_order = [chosen, *sorted(others, key=lambda form: (costs[form], form.name))]
    return [Candidate(form.name, _visited(rule, grid, form), costs[form], form) for form in in_order]


def _visited(rule, grid, form):
    work = forms.work(rule, grid, form)
    return work.boxes * math.prod(form.box) * work.steps * form.step_keys


# Scores of extra keys that are held at a time.
_HELD = 1 << 24


def _extra_gradients(q, extra, lse, delta, grad, scale):
    """Gradients of keys and values that all queries see: sums over all of these, a part of them at a time."""
    keys, values = (x.to(torch.float32).transpose(1, 2) for x in extra)  # [B, heads, N, channels]
    batch, heads, n = keys.shape[:3]
    share = q.shape[-2] // heads
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)

    def parts(x):
        flat = x.reshape(batch, -1, heads, share, *x.shape[len(lse.shape) :])
        return flat.split(max(1, _HELD // (batch * heads * share * n)), 1)

    for part, g, sums, d in zip(parts(q), parts(grad), parts(lse), parts(delta), strict=True):
        # [B, heads, queries times share, ...]
        part, g = (x.transpose(1, 2).flatten(2, 3).to(torch.float32) for x in (part, g))
        sums, d = (x.transpose(1, 2).flatten(2, 3)[..., None] for x in (sums, d))
        weights = torch.exp(part @ keys.mT * scale - sums)
        dv += weights.mT @ g
        weights *= g @ values.mT - d
        dk += weights.mT @ part * scale
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (dk, dv))


@lru_cache(1024)
def _forward(setting, device):
    return CachedLaunch(partial(_start_forward, setting), device)


@lru_cache(256)
def _queries(setting, device):
    return CachedLaunch(partial(_start_queries, setting), device)


@lru_cache(256)
def _keys(setting, device):
    return CachedLaunch(partial(_start_keys, setting), device)


@dataclass(frozen=True)
class _Axes:
    """The axes of a grid as kernels walk them: of z, y and x, with those of one token that it lacks."""

    order: tuple[int | None, ...]

    def of(self, values, missing) -> tuple:
        """Values of the grid's axes, in the order of z, y and x."""
        return tuple(missing if i is None else values[i] for i in self.order)

    def strides(self, x: torch.Tensor, last: int) -> tuple:
        """Strides of images, z, y and x, and of the dimension `last`."""
        return x.stride(0), *self.of(x.stride()[1:], 0), x.stride(last)


def _axes(form):
    rest = [i for i in range(len(form.box)) if i != form.walk]
    return _Axes((form.walk, *[None] * (2 - len(rest)), *rest))


# Boxes of a plane that run before the next ones along the walked axis, a power of two along each axis; fewer where many
# programs would find no box.
_NEAR, _IDLE = 8, 1.05


def _near(count):
    """The power of two of neighbours along an axis of so many boxes."""
    return max(g for g in range(_NEAR.bit_length()) if -(-count // (1 << g)) * (1 << g) <= _IDLE * count or g == 0)


def _rule_arguments(setting, form, axes, grid):
    """Lengths, windows, strides of windows, dilations, and how boxes run; boxes in all and residues."""
    rule = setting.rule
    lengths, dilations = axes.of(grid, 1), axes.of(rule.dilation, 1)
    counts = [-(-n // (d * t)) for n, d, t in zip(lengths, dilations, axes.of(form.box, 1), strict=True)]
    near = [_near(n) for n in counts[1:]]
    bands, columns = (-(-n // (1 << g)) for n, g in zip(counts[1:], near, strict=True))
    runs = -(-counts[0] // form.run)
    named = (*lengths, *axes.of(rule.window, 1), *axes.of(rule.stride, 1), *dilations, *near, columns, runs, form.run)
    return named, runs * bands * columns << sum(near), math.prod(dilations)


def _constants(setting, form, axes, grid, q, v, turned):
    work = forms.work(setting.rule, grid, form, turned)
    channels = (q.shape[-1], *columns(q.shape[-1]), v.shape[-1], *columns(v.shape[-1]))
    causal = axes.of(setting.rule.causal, False)
    extents = [forms.extent(a, n, t, turned) for a, n, t in zip(setting.rule.axes, grid, form.box, strict=True)]
    _, y, x = axes.of(extents, 1)
    # At borders, more queries see a key than elsewhere.
    bits = not turned and y + x < 32
    dilated, strided = max(setting.rule.dilation) > 1, max(setting.rule.stride) > 1
    cuts = (form.step_keys, work.c1, work.c2, dilated, strided, bits)
    return (*axes.of(form.box, 1), *cuts, *channels, *causal, setting.rule.border == "cut")


def _wide(setting, form, axes, grid, *tensors):
    """Whether what a box sees spans more values than a 32-bit offset reaches."""
    extents = [
        max(forms.extent(a, n, t, turned) for turned in (False, True))
        for a, n, t in zip(setting.rule.axes, grid, form.box, strict=True)
    ]
    # At borders, half as many more queries see a key.
    reach = [2 * e * a.dilation for e, a in zip(extents, setting.rule.axes, strict=True)]
    return any(sum(r * s for r, s in zip(reach, x.stride()[1:], strict=False)) + 256 >= 2**31 for x in tensors)


def _signed(scale):
    """``(the scale for powers of two, above zero, and its sign)``."""
    sign = (scale > 0) - (scale < 0)
    return abs(scale) * LOG2E if sign else 1.0, sign


def _programs(boxes, heads, images):
    if boxes >= 2**31 or heads >= 2**16 or images >= 2**16:
        raise DeviceError(
            "neighborhood: expected fewer than 2**31 boxes, 65,536 heads times dilations and 65,536 images, found "
            f"{boxes}, {heads} and {images}"
        )
    return boxes, heads, images


def _start_forward(setting, q, k, v, *more):
    (form,) = setting.forms
    grid, heads = tuple(q.shape[1:-2]), q.shape[-2]
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    axes = _axes(form)
    named, boxes, residues = _rule_arguments(setting, form, axes, grid)
    scale_log2, sign = _signed(setting.scale)
    strides = [s for x in (out, q, k, v) for s in axes.strides(x, -2)]
    strides += axes.strides(more[0], -1)[:-1] if setting.lse else (0, 0, 0, 0)
    strides += _extra_strides(setting, more)
    constants = _constants(setting, form, axes, grid, q, v, False)
    work, is_wide = forms.work(setting.rule, grid, form), _wide(setting, form, axes, grid, k, v)
    programs = _programs(boxes, heads * residues, q.shape[0])
    own = (sign, heads // k.shape[-2], *constants, work.single, form.run > 1, setting.bound is not None, setting.free)
    own += (len(grid) == 1, setting.extra, setting.lse, is_wide)
    extra = more[-1].shape[1] if setting.extra else 0
    bound_log2 = (setting.bound or 0.0) * LOG2E
    absent = (None,) * (3 - len(more))
    arguments: tuple[Any, ...] = (*absent, *strides, *named, extra, scale_log2, bound_log2, *own, form.num_stages)
    with fitting(f"neighborhood {form.name}"):
        compiled = kernels.tilewright_neighborhood[programs](out, q, k, v, *more, *arguments, **form.options)
    return out, compiled, programs, arguments


def _extra_strides(setting, more):
    """Strides of extra keys and values, the last two of `more`."""
    return [x.stride(i) for x in more[-2:] for i in (0, 1, 2)] if setting.extra else [0] * 6


def _start_queries(setting, q, k, v, out, grad, lse, delta, *more):
    form = setting.forms[0]
    grid, heads = tuple(q.shape[1:-2]), q.shape[-2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    axes = _axes(form)
    named, boxes, residues = _rule_arguments(setting, form, axes, grid)
    scale_log2, sign = _signed(setting.scale)
    strides = [s for x in (dq, q, k, v, out, grad) for s in axes.strides(x, -2)]
    strides += axes.strides(lse, -1)[:-1]
    strides += _extra_strides(setting, more)
    arguments = (
        *(None,) * (2 - len(more)), *strides, *named, more[0].shape[1] if more else 0, scale_log2, setting.scale, sign,
        heads // k.shape[-2], *_constants(setting, form, axes, grid, q, v, False), setting.extra,
        _wide(setting, form, axes, grid, k, v), form.num_stages,
    )  # fmt: skip
    programs = _programs(boxes, heads * residues, q.shape[0])
    with fitting(f"gradients of neighborhood {form.name}"):
        compiled = kernels.tilewright_neighborhood_queries[programs](
            dq, q, k, v, out, grad, lse, delta, *more, *arguments, **form.options
        )
    return dq, compiled, programs, arguments


def _start_keys(setting, dv, q, k, v, grad, lse, delta):
    form = setting.forms[1]
    grid, heads = tuple(q.shape[1:-2]), k.shape[-2]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    axes = _axes(form)
    named, boxes, residues = _rule_arguments(setting, form, axes, grid)
    scale_log2, sign = _signed(setting.scale)
    strides = [s for x in (dk, dv, q, k, v, grad) for s in axes.strides(x, -2)]
    strides += axes.strides(lse, -1)[:-1]
    arguments = (
        *strides, *named, scale_log2, setting.scale, sign, q.shape[-2] // heads,
        *_constants(setting, form, axes, grid, q, v, True), _wide(setting, form, axes, grid, q, grad),
        form.num_stages,
    )  # fmt: skip
    programs = _programs(boxes, heads * residues, q.shape[0])
    with fitting(f"gradients of neighborhood {form.name}"):
        compiled = kernels.tilewright_neighborhood_keys[programs](
            dk, dv, q, k, v, grad, lse, delta, *arguments, **form.options
        )
    return dk, compiled, programs, arguments

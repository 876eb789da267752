"""Neighbourhood attention as operators, for ``torch.compile``, ``torch.export``, transforms and gradients.

``torch.ops.tilewright.neighborhood_attend`` takes the rule as a list of int, see `rule.Rule.ints`: an exported program
needs nothing beside it. Its last argument says what becomes of the log-sum-exps: `NO_LSE`, or a backward alone needs
them (`KEPT_LSE`), or the caller, too (`LSE`).
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from tilewright.core import operators as _first
from tilewright.core import transforms
from tilewright.core._internals import empty_strided_cuda, is_batched
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices import qkv
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.backends import LAUNCHES

NO_LSE, KEPT_LSE, LSE = range(3)
# Channels that carry the gradient of log-sum-exps: rows of 16 bytes in every type.
_CARRIERS = 8
_LIBRARY = library.Library("tilewright", "FRAGMENT")


@lru_cache(256)
def launches(kind: str) -> ModuleType:
    """The module that runs on devices of this kind. Raises `DeviceError` where there is none."""
    if kind not in LAUNCHES:
        raise DeviceError(f"expected tensors on one of {', '.join(LAUNCHES)}, found {kind}")
    return import_module(LAUNCHES[kind])


_rule = lru_cache(1024)(rules.from_ints)
# What `prepared` found of late, by its arguments but for tensors: for some layouts of these each.
_prepared = Recent(256, 8)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    rule: tuple[int, ...],
    scale: float,
    lse: int,
    bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exps, [0] without; see `backends`. Results are contiguous."""
    if k_extra is None and (call := prepared(q, k, v, rule, scale, lse, bound)) is not None:
        out, sums = call(q, k, v)
    elif not q.numel() or not v.numel():
        return _fake_attend(q, k, v, k_extra, v_extra, rule, scale, lse, bound)
    else:
        given, extra = tuple(map(_rows, (q, k, v))), None
        if k_extra is not None and v_extra is not None and k_extra.shape[1]:
            extra = _rows(k_extra), _rows(v_extra)
        forward = launches(q.device.type).forward
        out, sums = forward(*given, _rule(tuple(rule)), scale, extra, lse != NO_LSE, bound)
    return out, _nothing_of(out) if sums is None else sums


def _nothing_of(out: Tensor) -> Tensor:
    """An empty tensor in float32 where `out` is, at the least cost."""
    if out.is_cuda and out.get_device() == torch.cuda.current_device():
        return empty_strided_cuda((0,), (1,), torch.float32)
    return out.new_empty(0, dtype=torch.float32)


def prepared(
    q: Tensor, k: Tensor, v: Tensor, rule: tuple[int, ...], scale: float, lse: int, bound: float | None
) -> Callable | None:
    """``callable(q, k, v) -> (out, lse or None)`` for tensors of these layouts, kept for the next time; None where they
    are empty or are to be copied."""
    key = *rule, scale, lse, bound
    for same, call in _prepared.get(key):
        if same(q, k, v):
            return call
    if not all(x.numel() and _rows(x) is x for x in (q, k, v)):
        return None
    call = launches(q.device.type).prepared(q, k, v, _rule(tuple(rule)), scale, lse != NO_LSE, bound)
    _prepared.add(key, (qkv.same_layout(q, k, v), call))
    return call


def _fake_attend(q, k, v, k_extra, v_extra, rule, scale, lse, bound):
    sums = q.new_empty(q.shape[:-1] if lse != NO_LSE else (0,), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), sums


def _gradients(grad, q, k, v, out, lse, k_extra, v_extra, rule, scale):
    """The operator of the backward; gradients of extra tokens are empty where there are none."""
    found = _fake_gradients(grad, q, k, v, out, lse, k_extra, v_extra, rule, scale)
    if not q.numel() or not v.numel():
        return tuple(x.zero_() for x in found)
    q, k, v, out, lse, grad = map(_rows, (q, k, v, out, lse, grad))
    extra = None if k_extra is None or not k_extra.shape[1] else (_rows(k_extra), _rows(v_extra))
    made = launches(q.device.type).backward(q, k, v, out, lse, grad, _rule(tuple(rule)), scale, extra)
    return tuple(old if new is None else new for old, new in zip(found, made, strict=True))


def _fake_gradients(grad, q, k, v, out, lse, k_extra, v_extra, rule, scale):
    return tuple(q.new_empty(0 if x is None else x.shape) for x in (q, k, v, k_extra, v_extra))


def _rows(x: Tensor) -> Tensor:
    """`x` with the values of a head side by side, copied where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _setup(ctx, inputs, output):
    q, k, v, k_extra, v_extra, ctx.rule, ctx.scale, mode, _ = inputs
    if mode != LSE:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, k_extra, v_extra)


def _differentiated(ctx, grad, grad_lse):
    q, k, v, out, lse, k_extra, v_extra = ctx.saved_tensors
    if grad is None and grad_lse is None:
        return (None,) * 9
    grad = torch.zeros_like(out) if grad is None else grad
    width = v.shape[-1]
    if grad_lse is not None:
        # A score's gradient has the term of its log-sum-exp where a channel of ones has that gradient, and no result.
        v, v_extra = _carrying(v, 1), None if v_extra is None else _carrying(v_extra, 1)
        out, grad = _carrying(out, 0), _carrying(grad, 0)
        grad[..., width] = grad_lse.to(grad.dtype)
    given = grad, q, k, v, out, lse, k_extra, v_extra, list(ctx.rule), ctx.scale
    look = torch.is_grad_enabled() or _first.watched(grad) or is_batched(grad)
    dq, dk, dv, *of_extra = (torch.ops.tilewright.neighborhood_backward if look else _gradients)(*given)
    of_extra = (None, None) if k_extra is None else (of_extra[0], of_extra[1][..., :width])
    return dq, dk, dv[..., :width], *of_extra, None, None, None, None


def _carrying(x, value):
    """`x` with further channels, the first of which has a `value`."""
    return F.pad(F.pad(x, (0, 1), value=value), (0, _CARRIERS - 1))


class _Attend(torch.autograd.Function):
    """`attend` with its gradients, where nobody looks at the operator."""

    @staticmethod
    def forward(ctx, *inputs):
        output = attend(*inputs)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiated)


def differentiated(*given: Any) -> tuple[Tensor, Tensor]:
    """`attend` with what its backward needs."""
    return _Attend.apply(*given)


def _nothing(ctx, inputs, output):
    """A refusal needs nothing of a call."""


def _refused(ctx, *_):
    raise PatternError("neighbourhood attention has first derivatives only, found a call for a second derivative")


def _folded(size, given, dims, tensors):
    """Arguments of a batched call, the first `tensors` of them folded into one larger batch."""
    return [None if x is None else transforms.folded(x, at, size) for x, at in zip(given[:tensors], dims, strict=False)]


def _in_one_batch(size, given, dims):
    found = torch.ops.tilewright.neighborhood_attend(*_folded(size, given, dims, 5), *given[5:])
    # Without log-sum-exps there is an empty tensor for all.
    return tuple(x.unflatten(0, (size, len(x) // size)) if x.ndim > 1 else x.expand(size, -1) for x in found)


def _backwards_in_one_batch(size, given, dims):
    found = torch.ops.tilewright.neighborhood_backward(*_folded(size, given, dims, 8), *given[8:])
    return tuple(x.unflatten(0, (size, len(x) // size)) if x.ndim > 1 else x.expand(size, -1) for x in found)


_EXTRA = "Tensor? k_extra, Tensor? v_extra, int[] rule, float scale"
transforms.define(
    _LIBRARY,
    f"neighborhood_attend(Tensor q, Tensor k, Tensor v, {_EXTRA}, int lse, float? bound) -> (Tensor, Tensor)",
    attend,
    _fake_attend,
)
transforms.define(
    _LIBRARY,
    f"neighborhood_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_EXTRA}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
transforms.differentiate("neighborhood_attend", _setup, _differentiated, _in_one_batch)
transforms.differentiate("neighborhood_backward", _nothing, _refused, _backwards_in_one_batch)

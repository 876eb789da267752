"""Gradients of the operators of packed batches: what gathers in one direction sums in the other (training).

All but that of attention are operators of the same batch again. That one is a method of a device's executor,
``attend_backward(lists, q, k, v, out, grad) -> (dq, dk, dv)``; devices without it refuse what needs a gradient, by
name.
"""

from collections.abc import Callable

import torch

from tilewright.core import transforms
from tilewright.core.errors import PatternError
from tilewright.packed.lists import PackedOffsets

_OPS = torch.ops.tilewright


def register(differentiates: Callable) -> None:
    """Give the operators their gradients, on devices that ``differentiates(device)`` is true of."""

    def saving(save):
        def setup(ctx, inputs, output):
            device = inputs[0].device
            if not differentiates(device):
                # Here: once the graph is recorded, the call that lacks a backward is hard to find.
                raise PatternError(f"packed batches have no backward on {device.type}; call this under torch.no_grad()")
            ctx.offsets = PackedOffsets(*inputs[-1])
            save(ctx, inputs, output)

        return setup

    for name, (save, backward) in _FORMULAS.items():
        transforms.differentiate(f"ragged_{name}", saving(save), backward)  # type: ignore[arg-type]  # mypy joins signatures to a bare function
    transforms.differentiate("ragged_attend_backward", lambda *_, **__: None, _refused)


def _save_lists(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _gather(ctx, grad):
    (lists,) = ctx.saved_tensors
    return None, _OPS.ragged_scatter(lists, grad, None, ctx.offsets), None


def _save_scatter(ctx, inputs, output):
    lists, x, fill, _ = inputs
    ctx.save_for_backward(lists)
    ctx.x, ctx.fill = x.requires_grad, fill is not None and fill.requires_grad


def _scatter(ctx, grad):
    (lists,) = ctx.saved_tensors
    kept = _OPS.ragged_gather(lists, grad, ctx.offsets) if ctx.x else None
    # Zeros where tokens are kept.
    zeros = grad.new_zeros(ctx.offsets.capacity, grad.shape[-1])
    rest = _OPS.ragged_scatter(lists, zeros, grad, ctx.offsets) if ctx.fill else None
    return None, kept, rest, None


def _first(ctx, grad):
    (lists,) = ctx.saved_tensors
    rows = _starts(lists, ctx.offsets)[:-1].clamp(max=ctx.offsets.capacity - 1).long()
    return None, grad.new_zeros(ctx.offsets.capacity, grad.shape[-1]).index_add(0, rows, grad), None


def _pad(ctx, grad):
    (lists,) = ctx.saved_tensors
    return None, _unpadded(grad, _starts(lists, ctx.offsets), ctx.offsets.capacity), None, None


def _save_pack(ctx, inputs, output):
    _, tokens, origin, _ = inputs
    ctx.save_for_backward(output[0], origin)
    ctx.rows = len(tokens)


def _pack(ctx, _, grad):
    lists, origin = ctx.saved_tensors
    found = _OPS.ragged_scatter(lists, grad, None, ctx.offsets)
    if origin is not None:
        found = _unpadded(found, _starts(origin, ctx.offsets), ctx.rows)
    return None, found, None, None


def _save_attend(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], output)


def _attend(ctx, grad):
    return None, *_OPS.ragged_attend_backward(*ctx.saved_tensors, grad, ctx.offsets), None


_FORMULAS = {
    "gather": (_save_lists, _gather),
    "scatter": (_save_scatter, _scatter),
    "first": (_save_lists, _first),
    "pad": (_save_lists, _pad),
    "pack": (_save_pack, _pack),
    "attend": (_save_attend, _attend),
}


def _refused(ctx, *_):
    raise PatternError("packed attention has first derivatives only, found a call for a second derivative")


def _starts(lists, offsets):
    return lists[offsets.starts : offsets.source]


def _unpadded(x, starts, rows):
    """x by image and number [B, length, C] to the rows [rows, C] that `starts` [B + 1] says; zeros in rows of none."""
    at = torch.arange(rows, device=x.device, dtype=starts.dtype)
    image = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp(max=len(x) - 1)
    number = at - starts[image]
    real = (at < starts[-1]) & (number < x.shape[1])
    return torch.where(real[:, None], x[image, number.clamp(0, x.shape[1] - 1)], 0)

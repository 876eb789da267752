"""Executor of packed batches on any device that torch has: neighbours of one length attend as one batch (stage T5).

The contract is that of `packed.lists`. Work items are left out: images need none here.
"""

import weakref
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.core import _internals
from tilewright.core.errors import PatternError
from tilewright.devices.cpu.workers import in_any_state
from tilewright.packed.lists import (
    BAD,
    EMPTY,
    KEPT,
    check_packed,
    check_qkv,
    check_result,
    check_rows,
    check_tensors,
)

if TYPE_CHECKING:
    from tilewright.packed.lists import PackedOffsets

# Scores that the backward holds at a time, as floats twice.
_PAIRS = 1 << 22


class Executor:
    """Methods as in `packed.lists`, for a `packed.lists.PackedOffsets`."""

    def __init__(self, offsets: "PackedOffsets", device: torch.device):
        """`device` holds the tensors of each call."""
        self.offsets, self._device = offsets, device
        self._last: tuple[Callable, list | None] = (lambda: None), None

    @in_any_state
    def lists(self, keep: Tensor) -> Tensor:
        """See `packed.lists`."""
        made = keep.new_zeros(self.offsets.size, dtype=torch.int32)
        lengths = keep.sum(1)
        made[KEPT], made[EMPTY] = lengths.sum(), (lengths == 0).sum()
        made[self.offsets.starts + 1 : self.offsets.source] = lengths.cumsum(0).clamp(max=self.offsets.capacity)
        made[self.offsets.source : self.offsets.work] = -1
        made[BAD] = (made[KEPT] > self.offsets.capacity) | (made[EMPTY] > 0)
        if not made[BAD]:
            kept = keep.flatten().nonzero().flatten()
            made[self.offsets.source :][: len(kept)] = kept
            made[self.offsets.position + kept] = torch.arange(len(kept), dtype=torch.int32, device=keep.device)
        return made

    @in_any_state
    def pack(self, keep: Tensor, tokens: Tensor, origin: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `packed.lists`."""
        made = self.lists(keep)
        if origin is not None:
            check_packed(tokens)
            starts = origin[self.offsets.starts : self.offsets.source]
            tokens = _padded(tokens, starts, self.offsets.tokens)[0]
        return made, self.gather(made, tokens)

    @in_any_state
    def gather(self, lists: Tensor, x: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self._rows(lists, "source", x, None)

    @in_any_state
    def scatter(self, lists: Tensor, x: Tensor, fill: Tensor | None = None) -> Tensor:
        """See `packed.lists`."""
        return self._rows(lists, "position", x, fill)

    @in_any_state
    def first(self, lists: Tensor, x: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self._rows(lists, "starts", x, None)

    def _rows(self, lists, section, x, fill):
        """Rows of x by the numbers of a section, `fill` or zeros where a number is -1."""
        check_rows(self.offsets, section, x, fill)
        check_tensors(self._device, tokens=x)
        offset, count = self.offsets.section(section)
        shape = self.offsets.rows_into(section, x.shape[-1])
        if lists[BAD]:
            return x.new_full(shape, torch.nan)
        index = lists[offset : offset + count]
        rows = x.flatten(0, -2).index_select(0, index.clamp(min=0)).view(shape)
        other = x.new_zeros(()) if fill is None else fill
        return torch.where((index >= 0).view(*shape[:-1], 1), rows, other)

    @in_any_state
    def pad(self, lists: Tensor, x: Tensor, length: int) -> Tensor:
        """See `packed.lists`."""
        check_rows(self.offsets, "starts", x)
        check_tensors(self._device, tokens=x)
        if lists[BAD]:
            return x.new_full((self.offsets.images, length, x.shape[-1]), torch.nan)
        starts = lists[self.offsets.starts : self.offsets.source]
        if (most := int(starts.diff().max())) > length:
            raise PatternError(f"length: expected at least the {most} tokens of an image, found {length}")
        rows, valid = _padded(x, starts, length)
        return rows.masked_fill_(~valid[..., None], 0)

    @in_any_state
    def attend(self, lists: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self.attend_into(q.new_empty(q.shape), lists, q, k, v)

    @in_any_state
    def attend_into(self, out: Tensor, lists: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `packed.lists`."""
        check_qkv(self.offsets, q, k, v, out)
        check_tensors(self._device, q=q)
        stretches = self._stretches(lists)
        if stretches is None:
            return out.fill_(torch.nan)
        covered = sum(images * length for _, images, length in stretches)
        out[covered:] = 0
        for first, images, length in stretches:
            rows = slice(first, first + images * length)
            taken = (x[rows].unflatten(0, (images, length)).transpose(1, 2) for x in (q, k, v))
            out[rows] = F.scaled_dot_product_attention(*taken).transpose(1, 2).flatten(0, 1)
        return out

    @in_any_state
    def attend_backward(self, lists: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor) -> tuple:
        """See `packed.lists`. Weights are computed again, for some queries at a time.

        Of the result no value is read: sums over the weights are more exact where one key has nearly all of them.
        """
        check_qkv(self.offsets, q, k, v, torch.empty_like(q, memory_format=torch.contiguous_format))
        check_result(q, out=out, grad=grad)
        check_tensors(self._device, q=q)
        stretches = self._stretches(lists)
        if stretches is None:
            return tuple(torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (q, k, v))
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        for first, images, length in stretches:
            rows = slice(first, first + images * length)
            taken = (x[rows].unflatten(0, (images, length)).transpose(1, 2).float() for x in (q, k, v, grad))
            for total, found in zip(sums, _gradients(*taken), strict=True):
                total[rows] = found.transpose(1, 2).flatten(0, 1)
        return tuple(x.to(q.dtype) for x in sums)

    def _stretches(self, lists):
        """Stretches of images of one length, ``(first row, images, length)`` each; None where the batch did not fit.

        Those of the last lists are kept: the layers of a network attend by the same ones.
        """
        known, stretches = self._last
        if known() is not lists:
            lengths = lists[self.offsets.starts : self.offsets.source].diff().tolist()
            every, first = [], 0
            for length, images in ((length, len(list(same))) for length, same in groupby(lengths)):
                every.append((first, images, length))
                first += images * length
            stretches = None if lists[BAD] else every
            # Assigned at once: other threads may ask for other lists at the same time.
            self._last = weakref.ref(lists), stretches
        return stretches


def _gradients(q, k, v, grad):
    """``(dq, dk, dv)`` of dense attention of q, k, v [B, H, N, D] for the gradient of its result, float32."""
    batch, heads, n, dim = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part in torch.arange(n, device=q.device).split(max(1, _PAIRS // (batch * heads * n))):
        at = slice(int(part[0]), int(part[-1]) + 1)
        some = q[:, :, at] * dim**-0.5
        weights = (some @ k.mT).softmax(-1)
        dv += weights.mT @ grad[:, :, at]
        d_scores = _internals.softmax_backward(grad[:, :, at] @ v.mT, weights)
        dq[:, :, at] = d_scores @ k * dim**-0.5
        dk += d_scores.mT @ some
    return dq, dk, dv


def _padded(x, starts, length):
    """``(rows of x by image and number [B, length, C], valid)``: any row where an image has no such token, and bool
    [B, length], whether it has."""
    number = torch.arange(length, device=x.device)
    row = (starts[:-1, None] + number).clamp_(max=len(x) - 1)
    return x[row], number < starts.diff()[:, None]

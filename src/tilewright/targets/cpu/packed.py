"""Executor of packed batches on any device that torch has: neighbours of one length attend as one batch (stage T5).

The contract is that of `ragged_lists`; work items are left out, images need none here.
"""

import weakref
from itertools import groupby

import torch
import torch.nn.functional as F

from tilewright.targets.cpu.workers import in_forks
from tilewright.targets.packed_lists import BAD, EMPTY, KEPT, check_qkv, check_rows, check_tensors


class Executor:
    """Methods as in `ragged_lists`, for a `ragged_lists.Layout`."""

    def __init__(self, layout, device):
        """`device` holds the tensors of each call."""
        self.layout, self._device = layout, device
        self._last = (lambda: None), None

    @in_forks
    def lists(self, keep):
        """See `ragged_lists`."""
        made = keep.new_zeros(self.layout.size, dtype=torch.int32)
        lengths = keep.sum(1)
        made[KEPT], made[EMPTY] = lengths.sum(), (lengths == 0).sum()
        made[self.layout.starts + 1 : self.layout.source] = lengths.cumsum(0).clamp(max=self.layout.capacity)
        made[self.layout.source : self.layout.work] = -1
        made[BAD] = (made[KEPT] > self.layout.capacity) | (made[EMPTY] > 0)
        if not made[BAD]:
            kept = keep.flatten().nonzero().flatten()
            made[self.layout.source :][: len(kept)] = kept
            made[self.layout.place + kept] = torch.arange(len(kept), dtype=torch.int32, device=keep.device)
        return made

    @in_forks
    def pack(self, keep, tokens, origin=None):
        """See `ragged_lists`."""
        made = self.lists(keep)
        if origin is not None:
            check_rows(self.layout, "source", tokens, None, origin)
            starts = origin[self.layout.starts : self.layout.source]
            tokens = _padded(tokens, starts, self.layout.tokens)[0]
        return made, self.take(made, "source", tokens, None)

    @in_forks
    def take(self, lists, part, x, fill):
        """See `ragged_lists`."""
        check_rows(self.layout, part, x, fill)
        check_tensors(self._device, tokens=x)
        first, count = self.layout.part(part)
        shape = self.layout.result(part, x.shape[-1])
        if lists[BAD]:
            return x.new_full(shape, torch.nan)
        index = lists[first : first + count]
        rows = x.flatten(0, -2).index_select(0, index.clamp(min=0)).view(shape)
        other = x.new_zeros(()) if fill is None else fill
        return torch.where((index >= 0).view(*shape[:-1], 1), rows, other)

    @in_forks
    def pad(self, lists, x, slots):
        """See `ragged_lists`."""
        check_rows(self.layout, "starts", x, None)
        check_tensors(self._device, tokens=x)
        if lists[BAD]:
            return x.new_full((self.layout.images, slots, x.shape[-1]), torch.nan)
        rows, there = _padded(x, lists[self.layout.starts : self.layout.source], slots)
        return rows.masked_fill_(~there[..., None], 0)

    @in_forks
    def attend(self, lists, q, k, v):
        """See `ragged_lists`."""
        return self.attend_into(q.new_empty(q.shape), lists, q, k, v)

    @in_forks
    def attend_into(self, out, lists, q, k, v):
        """See `ragged_lists`."""
        check_qkv(self.layout, q, k, v, out)
        check_tensors(self._device, q=q)
        runs = self._runs(lists)
        if runs is None:
            return out.fill_(torch.nan)
        covered = sum(images * length for _, images, length in runs)
        out[covered:] = 0
        for first, images, length in runs:
            rows = slice(first, first + images * length)
            taken = (x[rows].unflatten(0, (images, length)).transpose(1, 2) for x in (q, k, v))
            out[rows] = F.scaled_dot_product_attention(*taken).transpose(1, 2).flatten(0, 1)
        return out

    def _runs(self, lists):
        """Stretches of images of one length, ``(first row, images, length)`` each; None where the lists are of no use.

        Of the lists that were asked for last they are remembered: the layers of a network attend by the same ones.
        """
        told, runs = self._last
        if told() is not lists:
            lengths = lists[self.layout.starts : self.layout.source].diff().tolist()
            runs, first = [], 0
            for length, images in ((length, len(list(run))) for length, run in groupby(lengths)):
                runs.append((first, images, length))
                first += images * length
            runs = None if lists[BAD] else runs
            # In one piece: other threads may ask for other lists of this layout at the same time.
            self._last = weakref.ref(lists), runs
        return runs


def _padded(x, starts, slots):
    """Rows of x by image and place [B, slots, C], any row where no token is, and where one is, bool [B, slots]."""
    place = torch.arange(slots, device=x.device)
    row = (starts[:-1, None] + place).clamp_(max=len(x) - 1)
    return x[row], place < starts.diff()[:, None]

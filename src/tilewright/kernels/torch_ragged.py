"""Executor of packed batches on any device that torch has: images of like lengths attend as one batch (stage T5).

The contract is that of `ragged_lists`; work items are left out, images need none here.
"""

import torch
import torch.nn.functional as F

from tilewright.kernels.ragged_lists import BAD, EMPTY, KEPT, check_qkv, check_rows, check_tensors

# Images whose lengths differ by less attend together, padded to the longest of them.
CLASS = 16


def lists(layout, keep):
    """See `ragged_lists`: for bool keep [B, N]."""
    made = keep.new_zeros(layout.size, dtype=torch.int32)
    lengths = keep.sum(1)
    made[KEPT], made[EMPTY] = lengths.sum(), (lengths == 0).sum()
    made[layout.starts + 1 : layout.source] = lengths.cumsum(0).clamp(max=layout.capacity)
    made[layout.source : layout.work] = -1
    made[BAD] = (made[KEPT] > layout.capacity) | (made[EMPTY] > 0)
    if not made[BAD]:
        kept = keep.flatten().nonzero().flatten()
        made[layout.source :][: len(kept)] = kept
        made[layout.place + kept] = torch.arange(len(kept), dtype=torch.int32, device=keep.device)
    return made


def pack(layout, keep, tokens):
    """See `ragged_lists`: for bool keep [B, N] and tokens [B, N, C]."""
    made = lists(layout, keep)
    return made, take(layout, made, "source", tokens, None)


def take(layout, lists, part, x, fill):
    """Rows of x [.., C] by the numbers in a part of the lists; fill: what stands where there is none, None for zeros.

    All NaN where the lists are of no use. Raises `PatternError` or `DeviceError` for tensors that are not of this
    batch.
    """
    check_rows(layout, part, x, fill)
    check_tensors(lists.device, tokens=x)
    first, count = layout.part(part)
    shape = layout.result(part, x.shape[-1])
    if lists[BAD]:
        return x.new_full(shape, torch.nan)
    index = lists[first : first + count]
    rows = x.flatten(0, -2).index_select(0, index.clamp(min=0)).view(shape)
    other = x.new_zeros(()) if fill is None else fill
    return torch.where((index >= 0).view(*shape[:-1], 1), rows, other)


def attend(layout, lists, q, k, v):
    """Attention of each image within itself: q, k, v [capacity, H, D] → [capacity, H, D].

    Rows of no image are zeros; all are NaN where the lists are of no use. Raises `PatternError` or `DeviceError` for
    tensors that are not of this batch.
    """
    check_qkv(layout, q, k, v)
    check_tensors(lists.device, q=q)
    if lists[BAD]:
        return torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    starts = lists[layout.starts : layout.source].long()
    lengths = starts.diff()
    kinds = (lengths - 1) // CLASS
    out = q.new_zeros(q.shape)
    for kind in kinds.unique().tolist():
        first, length = starts[:-1][kinds == kind, None], lengths[kinds == kind, None]
        column = torch.arange(int(length.max()), device=q.device)
        own = column < length
        rows = first + torch.minimum(column, length - 1)
        mask = None if own.all() else own[:, None, None]
        taken = (x[rows].transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(*taken, attn_mask=mask).transpose(1, 2)
        out[rows[own]] = attended[own]
    return out

"""FlexAttention over the windows of a grid, by rule: tokens in an order of boxes, pairs by tables along each axis."""

from math import prod

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.core import _internals
from tilewright.torch_attention import flex
from tilewright_study.baselines import flex_blocks

BLOCK = flex.BLOCK
# Tokens of a box along each axis, of as many as a block has.
BOXES = {1: (128,), 2: (8, 16), 3: (4, 4, 8)}
# Pairs that are counted at a time.
_COUNTED = 1 << 26


def prepare(layer, place, gpu):
    """``(attend(q, k, v), order)``: attention [1, H, N, D] of tokens in the `order` of boxes, int64 on the device.

    The first call compiles. Raises `Unavailable`.
    """
    flex.need_compiler("cuda" if gpu else "cpu")
    order = torch.from_numpy(_order(layer.grid)).to(place)
    where = [order // prod(layer.grid[axis + 1 :]) % n for axis, n in enumerate(layer.grid)]
    axes = [_Axis(axis, n, at) for axis, n, at in zip(layer.rule.axes, layer.grid, where, strict=True)]
    counts = _counts(layer, axes, order)
    whole = counts == BLOCK * BLOCK
    tables = [table for flags in ((counts > 0) & ~whole, whole) for table in flex_blocks.listed(flags[None, None])]
    mask = BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=BLOCK, mask_mod=_mask_mod(axes), seq_lengths=(len(order), len(order))
    )
    limit = _internals.recompile_limit(flex.COMPILATIONS)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q, k, v):
        with limit, torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)

    return attend, order


def _order(grid):
    """Tokens by boxes, row by row inside of one."""
    at = np.indices(grid).reshape(len(grid), -1)
    box = BOXES[len(grid)]
    inside = [x % side for x, side in zip(at, box, strict=True)]
    outside = [x // side for x, side in zip(at, box, strict=True)]
    return np.lexsort([*inside[::-1], *outside[::-1]])


class _Axis:
    """Tables over the tokens in their order, int32: a token's own index along its sub-axis, which indices it sees, and
    the residue of its sub-axis, None where there is one alone."""

    def __init__(self, axis, n, at):
        index, first = np.divmod(np.arange(n), axis.dilation)
        ends = [axis.keys(i, axis.lengths(n)[r]) for i, r in zip(index, first, strict=True)]
        lo, hi = np.array(ends).T
        self.index, self.lo, self.hi, self.residue = (
            torch.from_numpy(x.astype(np.int32)).to(at.device)[at] for x in (index, lo, hi, first)
        )
        if axis.dilation == 1:
            self.residue = None


def _mask_mod(axes):
    def one(axis, q, kv):
        index = axis.index[kv]
        near = (axis.lo[q] <= index) & (index < axis.hi[q])
        return near if axis.residue is None else near & (axis.residue[q] == axis.residue[kv])

    def mask_mod(b, h, q, kv):
        near = one(axes[0], q, kv)
        for axis in axes[1:]:
            near = near & one(axis, q, kv)
        return near

    return mask_mod


def _counts(layer, axes, order):
    """Pairs of each two blocks, int64 [blocks, blocks]."""
    n, place = len(order), torch.empty_like(order)
    place[order] = torch.arange(n, device=order.device)
    blocks = -(-n // BLOCK)
    found = torch.zeros(blocks * blocks, dtype=torch.int64, device=order.device)
    some = max(1, _COUNTED // prod(layer.rule.window))
    for lo in range(0, n, some):
        here = slice(lo, min(n, lo + some))
        at, seen = torch.zeros(here.stop - lo, 1, dtype=torch.int64, device=order.device), None
        for axis, own, size, window in zip(axes, layer.rule.axes, layer.grid, layer.rule.window, strict=True):
            keys = axis.lo[here, None] + torch.arange(window, device=order.device)
            is_key = keys < axis.hi[here, None]
            residue = 0 if axis.residue is None else axis.residue[here, None]
            keys = torch.minimum(keys, axis.hi[here, None] - 1) * own.dilation + residue
            at = (at[:, :, None] * size + keys[:, None]).flatten(1)
            seen = is_key if seen is None else (seen[:, :, None] & is_key[:, None]).flatten(1)
        row = torch.arange(lo, here.stop, device=order.device)[:, None] // BLOCK
        pair = (row * blocks + place[at] // BLOCK)[seen]
        found.index_add_(0, pair, torch.ones_like(pair))
    return found.view(blocks, blocks)

"""Executor of an abacus: work items one after another, merged by running maxima and sums in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from tilewright.attention.schedule.record import verify_inputs
from tilewright.attention.setting import Setting, setting
from tilewright.devices import qkv


def prepare(schedule, blocks, *, heads, head_dim, dtype, **options):
    """Return an `Executor` of `schedule`; see the contract in `attention.backends`."""
    verify_inputs(schedule, blocks)
    shape = next(iter(blocks.values())).shape
    columns = zip(schedule.tile, schedule.block, schedule.run_lo, schedule.run_hi, strict=True)
    items = tuple(_item(blocks[schedule.tiles[tile]], *where) for tile, *where in columns)
    return Executor(items, shape, setting(shape, heads, head_dim, dtype, **options))


def _item(blocks, block, lo, hi):
    """``(rows [R], keys [K], allowed [R, K])`` of a block's runs ``lo..hi``, in the order of the graph."""
    rows = np.arange(blocks.row_ptr[block], blocks.row_ptr[block + 1])
    keys, which = blocks.run_keys[lo:hi], blocks.run_mask[lo:hi]
    # The mask -1 is full: it stands behind the others.
    masks = np.concatenate([blocks.masks, np.full((1, *blocks.masks.shape[1:]), 255, np.uint8)])[which]
    bits = np.unpackbits(masks, axis=2, bitorder="little")[:, : len(rows), : keys.shape[1]]
    allowed = bits.astype(bool) & (keys >= 0)[:, None]
    return rows, np.maximum(keys, 0).ravel(), allowed.swapaxes(0, 1).reshape(len(rows), -1)


@dataclass(frozen=True, eq=False)
class Executor:
    """A prepared schedule; call it with q, k and v."""

    launches: tuple
    shape: tuple[int, int]
    common: Setting

    @property
    def memory_bytes(self):
        """Bytes of the items' rows, keys and masks."""
        return sum(array.nbytes for item in self.launches for array in item)

    @property
    def executed(self):
        """Pairs of query and key that a head works through."""
        return sum(allowed.size for *_, allowed in self.launches)

    def peak_bytes(self, batch):
        """Bytes of the running sums and the result, and of the largest item's tokens and scores, in float64."""
        width = self.common.head_dim
        item = max((allowed.size + sum(allowed.shape) * width for *_, allowed in self.launches), default=0)
        return 8 * batch * self.common.heads * (self.shape[0] * (2 * width + 2) + 3 * item)

    def __call__(self, q, k, v):
        """Attention over the pattern."""
        common = self.common
        sizes = {"heads": common.heads, "head_dim": common.head_dim, "dtype": common.dtype}
        qkv.check(q, k, v, shape=self.shape, **sizes, device=torch.device("cpu"))
        m_i = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float64)
        l_i, acc = torch.zeros_like(m_i), torch.zeros(q.shape, dtype=torch.float64)
        scale = q.shape[3] ** -0.5 if common.scale is None else common.scale
        for rows, keys, allowed in self.launches:
            at, seen = common.taken[0][rows], common.taken[1][keys]
            scores = q[:, :, at].double() @ k[:, :, seen].double().mT * scale + self._added(rows, keys, allowed)
            largest = torch.maximum(m_i[:, :, at], scores.amax(3, keepdim=True))
            p = (scores - largest).exp().nan_to_num()
            alpha = (m_i[:, :, at] - largest).exp().nan_to_num()
            l_i[:, :, at] = l_i[:, :, at] * alpha + p.sum(3, keepdim=True)
            acc[:, :, at] = acc[:, :, at] * alpha + p @ v[:, :, seen].double()
            m_i[:, :, at] = largest
        return qkv.empty(q, self.shape[0]).copy_((acc / l_i).nan_to_num())

    def _added(self, rows, keys, allowed):
        """What is added to the scores of an item, [R, K] or [H, R, K]: its bias, minus infinity where not allowed."""
        none = torch.full(allowed.shape, -torch.inf, dtype=torch.float64).masked_fill_(torch.from_numpy(allowed), 0)
        if self.common.bias is None:
            return none
        natural_rows, natural_keys = self.common.natural[0][rows, None], self.common.natural[1][keys]
        index = np.where(allowed, self.common.bias.index(natural_rows, natural_keys), 0)
        return none + self.common.bias.table.double()[:, torch.from_numpy(index)]

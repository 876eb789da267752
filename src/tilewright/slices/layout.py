"""How slice lists lie on a device: tensors of a fixed layout, which a CUDA graph can capture.

A *slice* is `rows` consecutive queries of one head, a group, with a list of the keys that it attends to. The stride of
lists is fixed: no prefix sum over groups, no shapes that depend on data. Source: `FG-Attn`, arXiv 2509.16518; the
layout is ours.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Keys that a kernel takes in a step. Lists end at a multiple of it.
STEP = 64
# Fields of `SliceLists.state`: a list that did not fit, a group without keys, the keys listed in low and high 31 bits.
OVERFLOW, EMPTY, LISTED, LISTED_HIGH, STATE = range(5)


class Layout(NamedTuple):
    """Shapes of the lists of one attention call.

    batch, heads: B and H. queries, keys: N_q and N_k. rows: queries of a group, M, a power of two. capacity: keys that
    a group's list has room for, a multiple of `STEP`, at most N_k rounded up to one.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    rows: int
    capacity: int

    @property
    def groups(self) -> int:
        """Groups of a head, G; the last one may be short."""
        return -(-self.queries // self.rows)


@dataclass(frozen=True)
class SliceLists:
    """Which keys each group of queries attends to. All tensors lie on one device.

    keys: int32 [B, H, G, capacity], ascending in each group; the tail up to the next multiple of `STEP` repeats the
        last key, so that loads need no mask. What follows is not defined.
    counts: int32 [B, H, G], keys of each group.
    order: int32 [B, H, G], the groups of each head, most keys first; equal ones by number.
    state: int32 [STATE]: group number + 1 (flat over B, H, G) of a list that did not fit, 0 for none; the same of a
        group without keys; the keys listed in all, in units of 1 and of 2**31.
    """

    layout: Layout
    keys: Tensor
    counts: Tensor
    order: Tensor
    state: Tensor

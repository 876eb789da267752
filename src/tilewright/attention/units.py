"""Which of several patterns each head of each image has, and work lists for all of them (stages T3, T5).

A *unit* is what has a pattern of its own: a head (in all images), an image (all its heads), or a head of an image.
Several patterns of one shape stand one above the other in the rows of one graph, pattern g in rows ``g * N_q`` to
``(g + 1) * N_q``: it is covered, scheduled and stored as any other. Units with equal patterns share blocks and masks.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks import Blocks
from tilewright.attention.masks import Bias
from tilewright.core.errors import PatternError

By = Literal["head", "image", "both"]


@dataclass(frozen=True)
class Units:
    """The pattern of each unit.

    by: what a unit is. heads: of q, k and v. group: of each unit, the number of its pattern; where units are heads of
    images, those of an image follow one another.
    """

    by: By
    heads: int
    group: tuple[int, ...]

    @property
    def patterns(self) -> int:
        """Number of distinct patterns."""
        return max(self.group) + 1

    @property
    def images(self) -> int | None:
        """Batch entries that a call has; None for any number."""
        return {"head": None, "image": len(self.group), "both": len(self.group) // self.heads}[self.by]

    @property
    def first(self) -> NDArray[np.int64]:
        """int64 [U]: the first head of each unit, heads of all images counted through."""
        return np.arange(len(self.group)) * (self.heads if self.by == "image" else 1)

    @property
    def step(self) -> int:
        """From a head of a unit to the next, heads of all images counted through."""
        return self.heads if self.by == "head" else 1

    @property
    def apart(self) -> bool:
        """Whether units have biases of their own, as heads have."""
        return self.by != "image"

    @property
    def share(self) -> int:
        """Heads that a pattern has on average, in one image: those that times are predicted for."""
        heads = self.heads if self.by == "image" else len(self.group) / self.patterns
        return max(1, round(heads))

    def lanes(self, batch: int) -> int:
        """Heads that each unit has in a batch."""
        return {"head": batch, "image": self.heads, "both": 1}[self.by]

    def check(self, batch: int) -> None:
        """Raise `PatternError` for a batch of another number of images than have patterns."""
        if self.images not in (None, batch):
            raise PatternError(f"q: expected a batch of {self.images}, one for each image's pattern, found {batch}")

    def bias(self, bias: Bias | None, shape: tuple[int, int]) -> Bias | None:
        """`bias` over the rows and keys of all units, those of unit u from ``u * shape[0]`` and ``u * shape[1]`` on.

        Where units are heads it has one table of one head, which holds those of all.
        """
        if bias is None:
            return None
        n_q, n_k = shape
        length = bias.table.shape[1]
        if not self.apart:
            return Bias(bias.table, lambda rows, keys: bias.index(rows % n_q, keys % n_k))

        def index(rows, keys):
            return rows // n_q % self.heads * np.int64(length) + bias.index(rows % n_q, keys % n_k)

        return Bias(bias.table.reshape(1, -1), index)

    def spread(self, blocks: Blocks, block: Any, run_lo: Any, run_hi: Any, n_q: int) -> tuple[Any, ...]:
        """``(blocks, block, run_lo, run_hi)``: items of all units, unit u in the rows from ``u * n_q`` on.

        blocks, block, run_lo, run_hi: those of the patterns. Runs and masks are those of the patterns. The items of the
        units stand side by side, so that long ones of all units begin first.
        """
        group = np.asarray(self.group)
        bounds = np.searchsorted(blocks.row_ptr, np.arange(self.patterns + 1) * n_q)
        lo, n_blocks = bounds[group], np.diff(bounds)[group]
        first = np.cumsum(n_blocks) - n_blocks
        unit = np.repeat(np.arange(len(group)), n_blocks)
        source = np.arange(len(unit)) - first[unit] + lo[unit]
        ends = blocks.row_ptr[1:][source] + (unit - group[unit]) * n_q
        made = replace(blocks, row_ptr=np.concatenate(([0], ends)).astype(blocks.row_ptr.dtype))
        item, unit = self.members(blocks.row_ptr[block] // n_q)
        return made, (block[item] - lo[unit] + first[unit]).astype(block.dtype), run_lo[item], run_hi[item]

    def members(self, of_item: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``(item, unit)``: each item with each unit of its pattern `of_item`; items ascend."""
        units = [np.flatnonzero(np.asarray(self.group) == g) for g in range(self.patterns)]
        counts = np.array([len(each) for each in units])[of_item]
        item = np.repeat(np.arange(len(of_item)), counts)
        number = np.arange(len(item)) - (np.cumsum(counts) - counts)[item]
        padded = np.zeros((len(units), max(map(len, units))), np.int64)
        for g, each in enumerate(units):
            padded[g, : len(each)] = each
        return item, padded[np.asarray(of_item)[item], number]


def interleaved(pattern: NDArray[np.integer], length: NDArray[np.integer]) -> NDArray[np.int64]:
    """An order of items: the longest first, and of equal ones the first of each `pattern`, then the second of each."""
    by_pattern = np.argsort(pattern, kind="stable")
    counts = np.bincount(pattern)
    number = np.empty(len(pattern), np.int64)
    number[by_pattern] = np.arange(len(pattern)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.lexsort((pattern, number, -np.asarray(length)))

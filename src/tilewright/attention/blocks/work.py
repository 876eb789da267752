"""Work items: what an executor runs, and the few shapes they come in (stages T3 to T5).

A block becomes one work item, or several when it has more key runs than one part may hold: the parts of a split block
are merged by their log-sum-exp. Items come in few *shapes*: those of one shape are padded to the same number of rows
and runs, so that an executor can batch them and a profile can measure each shape once, exactly.

Everything here is a pure function of the blocks and of `split_keys`; profile, schedule and executor all call it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks import Blocks
from tilewright.graph import STACKED

# Distinct padded row counts, and padded run counts for each of those. More of them pad less and launch more.
ROW_STEPS = 3
RUN_STEPS = 4
# A block of up to the first share of all keys stays whole, and the parts of others hold at least the second: what is no
# longer than the rest balances by itself, and merging costs time. Measured on an H200, docs/trials/tile-kernel.md.
WHOLE = 1 / 48
PART = 1 / 256
# ASSUME: beyond this many distinct values, as many of them evenly spaced are good enough candidates for a step.
CANDIDATES = 512


@dataclass(frozen=True, eq=False)
class WorkItems:
    """Work items of one `Blocks`, in block order (I items, K shapes).

    block: int32 [I]. run_lo, run_hi: int64 [I], absolute indices into the block file's runs.
    split: bool [I], the item is one part of a split block. shape: int32 [I], the shape.
    shape_rows, shape_runs: int32 [K], padded shape. shape_masked, shape_split: bool [K]: some run is partial or padded;
        the item yields log-sum-exps.
    Blocks without keys have no item: their rows are zeros.
    """

    block: NDArray[np.int32]
    run_lo: NDArray[np.int64]
    run_hi: NDArray[np.int64]
    split: NDArray[np.bool_]
    shape: NDArray[np.int32]
    shape_rows: NDArray[np.int32]
    shape_runs: NDArray[np.int32]
    shape_masked: NDArray[np.bool_]
    shape_split: NDArray[np.bool_]

    @property
    def n_shapes(self) -> int:
        """Number of shapes."""
        return len(self.shape_rows)

    @property
    def forms(self) -> list[tuple[int, int, bool, bool]]:
        """``(rows, runs, masked, split)`` of each shape."""
        columns = self.shape_rows, self.shape_runs, self.shape_masked, self.shape_split
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64 [K]: items of each shape."""
        return np.bincount(self.shape, minlength=self.n_shapes)


def ladder(values: NDArray[np.integer], weights: NDArray, steps: int) -> NDArray[np.integer]:
    """At most `steps` of `values`, ascending, the maximum among them, that cost the least padding.

    Each value is raised to the next one chosen; the padding is weighted. Exact up to `CANDIDATES` distinct values.
    """
    values, inverse = np.unique(np.asarray(values), return_inverse=True)
    weight = np.bincount(inverse, weights=weights, minlength=len(values))
    n = len(values)
    if n <= steps:
        return values
    if n > CANDIDATES:
        keep = np.unique(np.linspace(0, n - 1, CANDIDATES).astype(int))
        target = np.searchsorted(keep, np.arange(n))
        weight = np.bincount(target, weights=weight)
        values, n = values[keep], len(keep)
    total = np.concatenate(([0.0], np.cumsum(weight)))
    # best[k][j]: least padded weight of values[:j] with k steps, the last one at values[j-1].
    best = np.full((steps + 1, n + 1), np.inf)
    back = np.zeros((steps + 1, n + 1), np.int64)
    best[0, 0] = 0
    for k in range(1, steps + 1):
        for j in range(1, n + 1):
            cost = best[k - 1, :j] + values[j - 1] * (total[j] - total[:j])
            back[k, j] = int(np.argmin(cost))
            best[k, j] = cost[back[k, j]]
    k, j, chosen = int(np.argmin(best[:, n])), n, []
    while j:
        chosen.append(values[j - 1])
        k, j = k - 1, back[k, j]
    return np.array(chosen[::-1])


def items(blocks: Blocks, split_keys: int | None) -> WorkItems:
    """Cut `blocks` into `WorkItems`. split_keys: None never splits a block.

    A block with more than `split_keys` keys, and more than `WHOLE` of all keys, is split into parts of at most
    `split_keys` keys, or `PART` of all keys where that is more, and of at least one run.
    """
    width = blocks.tile.run
    live = np.flatnonzero(blocks.runs > 0).astype(np.int32)
    runs = blocks.runs[live]
    parts = np.ones(len(live), np.int64)
    if split_keys is not None:
        # Of several patterns, one has this on average.
        total = runs.sum() / blocks.meta.get(STACKED, 1)
        most = max(1, split_keys // width, int(PART * total))
        long = (runs > most) & (runs > WHOLE * total)
        parts[long] = -(-runs[long] // most)
    block = np.repeat(live, parts)
    index = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
    n_parts, n_runs = np.repeat(parts, parts), np.repeat(runs, parts)
    # Parts of near-equal length, so that they have one shape.
    start = blocks.run_ptr[block]
    run_lo, run_hi = start + index * n_runs // n_parts, start + (index + 1) * n_runs // n_parts
    split = n_parts > 1
    partial = np.concatenate(([0], np.cumsum(blocks.run_mask >= 0)))
    masked = partial[run_hi] > partial[run_lo]
    rows, length = blocks.rows[block].astype(np.int64), run_hi - run_lo

    row_steps = ladder(rows, length, ROW_STEPS)
    row_pad = row_steps[np.searchsorted(row_steps, rows)]
    run_pad = np.empty_like(length)
    for step in row_steps:
        here = row_pad == step
        run_steps = ladder(length[here], np.ones(here.sum()), RUN_STEPS)
        run_pad[here] = run_steps[np.searchsorted(run_steps, length[here])]
    masked = masked | (run_pad > length)
    # One number for each shape, ordered by rows, runs, masked, split.
    radix = run_pad.max(initial=0) + 1
    shapes, shape = np.unique(((row_pad * radix + run_pad) * 2 + masked) * 2 + split, return_inverse=True)
    shape_rows, shape_runs = np.divmod(shapes // 4, radix)
    return WorkItems(
        block,
        run_lo,
        run_hi,
        split,
        shape.astype(np.int32),
        shape_rows.astype(np.int32),
        shape_runs.astype(np.int32),
        shapes // 2 % 2 == 1,
        shapes % 2 == 1,
    )

"""Shapes of one blocks file, each run alone by the kernel of `executor` (stage T3 on a GPU)."""

import math
from dataclasses import replace

import numpy as np
import torch

from tilewright import targets
from tilewright.blocks import work
from tilewright.core import progress
from tilewright.core.timing import time_gpu
from tilewright.profile import item_shape
from tilewright.targets.cuda import config, executor, tile_lists
from tilewright.targets.cuda.tile_lists import Item, Part
from tilewright.targets.setting import setting

# A timing stops at this relative standard error of its mean.
RSE = 0.02
MIN_REPS = 10
# Of a multiprocessor, whatever its kind: threads, programs, and the parts that have its registers and run its warps.
MOST_THREADS, MOST_PROGRAMS, PARTS = 2048, 32, 4


def measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s, known=None):
    """``(launch_us, tile_us, [ItemShape, …])`` of the work items of `blocks`; arguments as in `targets.measure`.

    An item is one program for each head. A shape is timed with as many items as all blocks have, since the time of a
    GPU that is not full is not proportional to its items, and with twice as many. The difference is the items' share of
    the multiprocessors; the rest, averaged over all shapes, is `tile_us`. A shape with fewer items runs them several
    times, with the same results. A launch is a cost of the round, see `targets.cuda.facts`. known: not used, for split
    items beside it change what an item takes.
    """
    config.check_head_dim(head_dim)
    device, items = targets.describe("cuda"), work.items(blocks, split_keys)
    multiprocessors, launch_us, n_items = device["multiprocessors"], device["launch_us"], len(items.block)
    common = setting(blocks.shape, heads, head_dim, getattr(torch, dtype))
    step_keys = config.for_tile(blocks.tile, head_dim, common.dtype).step_keys
    generator = torch.Generator("cuda").manual_seed(seed)
    n_q, n_k = blocks.shape
    q, k, v = (
        torch.randn(1, heads, n, head_dim, generator=generator, device="cuda").to(common.dtype) for n in (n_q, n_k, n_k)
    )
    tokens = q, k, v, torch.empty_like(q)
    share_s = budget_s / (3 * max(1, items.n_shapes))

    def timed(lists):
        launch = executor.Launch(lists, blocks.tile, common, "cuda")
        compiled = launch(*tokens)
        timing = time_gpu(lambda: launch(*tokens), min_reps=MIN_REPS, max_seconds=share_s, rse_target=RSE)
        return timing, compiled

    shapes, fixed_us = [], []
    for shape in progress.with_progress(range(items.n_shapes), f"profile {blocks.tile.name}"):
        member = np.flatnonzero(items.shape == shape)
        columns = (getattr(items, name)[member] for name in ("block", "run_lo", "run_hi"))
        lists = tile_lists.build(blocks, *columns, step_keys)
        times = math.ceil(n_items / len(member))
        once, compiled = timed(repeated(lists, times))
        twice, _ = timed(repeated(lists, 2 * times))
        alone, _ = timed(replace(lists, items=_whole(lists.items[:1]), parts=lists.parts[:0], groups=0, part_rows=0))
        # Noise must not make an item free.
        grown_us = max(twice.p50_us - once.p50_us, once.p50_us / 10)
        latency_us = grown_us * multiprocessors / (times * len(member))
        fixed_us.append(max(once.p50_us - launch_us - grown_us, 0.0))
        shapes.append(
            item_shape(
                items,
                shape,
                once,
                latency_us=latency_us,
                p20_us=latency_us * once.p20_us / once.p50_us,
                p80_us=latency_us * once.p80_us / once.p50_us,
                alone_us=max(alone.p50_us - launch_us, alone.p50_us / 10),
                resources=resources(compiled, device),
                occupancy=_scratch_bytes(lists, common) / len(member),
            )
        )
    return 0.0, float(np.average(fixed_us, weights=items.counts)) if shapes else 0.0, shapes


def repeated(lists, times):
    """`TileLists` that run every item `times` times; each time, the parts of split blocks are merged anew."""
    first, n_parts = np.arange(times)[:, None], len(lists.parts)
    items = np.tile(lists.items, (times, 1)).reshape(times, -1, lists.items.shape[1])
    items[:, :, Item.PART] += np.where(items[:, :, Item.PART] < 0, 0, first * n_parts).astype(np.int32)
    parts = np.tile(lists.parts, (times, 1)).reshape(times, -1, len(Part))
    parts[:, :, Part.GROUP] += (first * lists.groups).astype(np.int32)
    parts[:, :, Part.SCRATCH_ROW] += (first * lists.part_rows).astype(np.int32)
    # Longest first, as in any launch.
    items = items.transpose(1, 0, 2).reshape(-1, items.shape[2])
    totals = {"groups": times * lists.groups, "part_rows": times * lists.part_rows}
    return replace(lists, items=items, parts=parts.reshape(-1, len(Part)), **totals)


def _whole(items):
    """Items that are no parts of others."""
    items = items.copy()
    items[:, Item.PART] = -1
    return items


def resources(compiled, device):
    """What one program takes of a multiprocessor, and how many are resident there for that."""
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    # Registers are handed out to warps in units of 256, shared memory with a kilobyte of the system's own.
    per_warp = -(-32 * compiled.n_regs // 256) * 256
    warps = PARTS * (device["registers"] // PARTS // per_warp)
    by_shared = device["shared_bytes_each"] // (shared + 1024)
    resident = max(1, min(warps // (threads // 32), by_shared, MOST_THREADS // threads, MOST_PROGRAMS))
    return {
        "shared_bytes": float(shared),
        "registers": float(compiled.n_regs),
        "spills": float(compiled.n_spills),
        "resident": float(resident),
    }


def _scratch_bytes(lists, common):
    """Memory that the parts of split items leave their sums in."""
    return float(executor.scratch_bytes(lists, common.heads, sum(config.HEAD_DIMS[common.head_dim])))

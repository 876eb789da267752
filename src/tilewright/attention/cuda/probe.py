"""Work items of one blocks file, timed shape by shape and all together with the kernel of `executor` (T3 on a GPU)."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewright import devices
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.cuda import config, executor, launch, tile_lists
from tilewright.attention.cuda.tile_lists import Item, Part
from tilewright.attention.profile import ItemShape, fitted, item_shape
from tilewright.attention.setting import setting
from tilewright.core import progress
from tilewright.core.timing import Timing, time_gpu

# Where q, k, v and the lists lie.
DEVICE = "cuda"
# A timing stops at this relative standard error of its mean.
RSE = 0.02
MIN_REPS = 10
# Of a multiprocessor, whatever its kind: threads, programs, and the parts that have its registers and run its warps.
MOST_THREADS, MOST_PROGRAMS, PARTS = 2048, 32, 4


def measure(
    blocks: Blocks, *, heads: int, head_dim: int, dtype: str, split_keys: int | None, seed: int, budget_s: float
) -> tuple[float, float, list[ItemShape]]:
    """``(launch_us, tile_us, [ItemShape, …])`` of the work items of `blocks`; arguments as in `attention.measure`.

    An item is one program for each head. A shape is timed with as many items as all blocks have, since the time of a
    GPU that is not full is not proportional to its items, and with twice as many: what it takes more is the items'
    share of the multiprocessors. A shape with fewer items runs them several times, with the same results.

    Shapes run side by side in a schedule, and otherwise than one by one. So all items are timed in one launch, and
    every other one. The difference tells the load of all, which the latencies are scaled to, and the rest is `tile_us`
    (`profile.fitted`). The schedule with this tile alone is then predicted as it was timed, and a part of the
    regions takes its share of the load. All launches are of one compiled kernel, that of all items. A launch is a cost
    of the round, see `devices.cuda.facts`.
    """
    config.check_head_dim(head_dim)
    device, items = devices.describe("cuda"), work.items(blocks, split_keys)
    if not items.n_shapes:
        return 0.0, 0.0, []
    multiprocessors, launch_us, n_items = device["multiprocessors"], device["launch_us"], len(items.block)
    probe = Probe(blocks, items, heads=heads, head_dim=head_dim, dtype=dtype, seed=seed)
    share_s, lists = budget_s / (3 * items.n_shapes + 2), probe.lists
    needs, shapes = resources(probe.compiled(), device), []
    for shape in progress.with_progress(range(items.n_shapes), f"profile {blocks.tile.name}"):
        alike = tile_lists.subset(lists, probe.shape == shape)
        count = len(alike.items)
        times = math.ceil(n_items / count)
        once, twice = (probe.timed(repeated(alike, n * times), share_s) for n in (1, 2))
        alone = probe.timed(tile_lists.subset(alike, [0]), share_s)
        # Noise must not make an item free.
        latency_us = max(twice.p50_us - once.p50_us, once.p50_us / 10) * multiprocessors / (times * count)
        shapes.append(
            item_shape(
                items,
                shape,
                once,
                latency_us=latency_us,
                p20_us=latency_us * once.p20_us / once.p50_us,
                p80_us=latency_us * once.p80_us / once.p50_us,
                alone_us=_beside(alone, launch_us),
                resources=needs,
                occupancy=_scratch_bytes(alike, probe.setting) / count,
            )
        )
    latency_us = np.array([shape.latency_us for shape in shapes])[probe.shape]
    whole, half = (probe.timed(each, share_s) for each in (lists, tile_lists.subset(lists, slice(None, None, 2))))
    load_us = _load_us(whole, half, latency_us[1::2].sum() / latency_us.sum())
    return 0.0, *fitted(shapes, whole_us=_beside(whole, launch_us), load_us=load_us, lanes=multiprocessors)


def _load_us(whole, half, left_out):
    """The part of `whole` that grows with the items. half: without items that have the share `left_out` of the load."""
    grown_us = max(whole.p50_us - half.p50_us, left_out * whole.p50_us / 10)
    return grown_us / left_out if left_out else whole.p50_us


def _beside(timing, launch_us):
    """What a launch takes beside the cost of any launch. Noise must not make it nothing."""
    return max(timing.p50_us - launch_us, timing.p50_us / 10)


class Probe:
    """Launches of work items of `blocks` on random tokens, by the kernel that a launch of all of them has.

    lists: `TileLists` of all `items`. shape: int [I], the shape of each item of the lists. setting: of the kernel.
    """

    def __init__(self, blocks: Blocks, items: work.WorkItems, *, heads: int, head_dim: int, dtype: str, seed: int):
        """Make lists and tokens; items: ``work.items(blocks, …)``; dtype: a name such as ``bfloat16``."""
        self.setting = setting(blocks.shape, heads, head_dim, getattr(torch, dtype))
        form = config.for_tile(blocks.tile, head_dim, self.setting.dtype)
        self.lists = tile_lists.build(blocks, items.block, items.run_lo, items.run_hi, form.step_keys)
        # The lists have the longest first.
        self.shape = items.shape[np.argsort(items.run_lo - items.run_hi, kind="stable")]
        self._launch = executor.Launch(self.lists, blocks.tile, self.setting, DEVICE, form)
        generator, (n_q, n_k) = torch.Generator(DEVICE).manual_seed(seed), blocks.shape
        shapes = ((1, heads, n, head_dim) for n in (n_q, n_k, n_k))
        drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": DEVICE}
        q, k, v = (torch.randn(each, **drawn).to(self.setting.dtype) for each in shapes)
        self._tokens = q, k, v, torch.empty_like(q)

    def compiled(self) -> Any:
        """The compiled kernel, after a launch of all items."""
        return self._launch(*self._tokens)

    def timed(self, lists: tile_lists.TileLists, seconds: float) -> Timing:
        """The `Timing` of a launch of `lists`, some of the items, in about so many seconds."""
        launch = self._launch.with_items(lists)
        return time_gpu(lambda: launch(*self._tokens), min_reps=MIN_REPS, max_seconds=seconds, rse_target=RSE)


def repeated(lists: tile_lists.TileLists, times: int) -> tile_lists.TileLists:
    """`TileLists` that run every item `times` times; each time, the parts of split blocks are merged anew."""
    first, n_parts = np.arange(times)[:, None], len(lists.parts)
    items = np.tile(lists.items, (times, 1)).reshape(times, -1, lists.items.shape[1])
    items[:, :, Item.PART] += np.where(items[:, :, Item.PART] < 0, 0, first * n_parts).astype(np.int32)
    parts = np.tile(lists.parts, (times, 1)).reshape(times, -1, len(Part))
    parts[:, :, Part.GROUP] += (first * lists.groups).astype(np.int32)
    parts[:, :, Part.SCRATCH_ROW] += (first * lists.part_rows).astype(np.int32)
    # Longest first, as in any launch.
    flat = items.transpose(1, 0, 2).reshape(-1, items.shape[2])
    groups, part_rows = times * lists.groups, times * lists.part_rows
    return replace(lists, items=flat, parts=parts.reshape(-1, len(Part)), groups=groups, part_rows=part_rows)


def resources(compiled: Any, device: dict) -> dict:
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
    return float(launch.scratch_bytes(lists, common.heads, sum(config.HEAD_DIMS[common.head_dim])))

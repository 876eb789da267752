"""Shape classes of one blocks file, each run alone by the code of `torch_blocks` (stage T3)."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from tilewright import targets
from tilewright.blocks import work
from tilewright.core import progress
from tilewright.core.timing import time_call
from tilewright.profile import shape_class
from tilewright.targets.cpu.executor import MASK_BYTES, Executor, merge
from tilewright.targets.cpu.launch import build, index, item_bytes, token_major
from tilewright.targets.cpu.workers import in_forks, slots
from tilewright.targets.setting import setting

# A timing stops at this relative standard error of its mean.
RSE = 0.03
MIN_REPS = 10
# Classes that the cost of a launch is found from.
LAUNCH_CLASSES = 4


@in_forks
def measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s):
    """``(launch_us, tile_us, [ShapeClass, …])`` of the work items of `blocks`; arguments as of `targets.measure`.

    A class is timed with all slots busy, each with the whole launch, or with part of it where its share of the budget
    is too short. The cost of a launch is that of its first chunk: what one item alone costs beyond an item's share in a
    larger chunk; taken off the slots' time here, it comes back as `launch_us` of all slots. What every call does for
    all rows (handing out jobs, bringing tokens into place and results back) is charged to the items by their rows, the
    merging of split rows to their parts.
    """
    probe = Probe(blocks, heads=heads, head_dim=head_dim, dtype=dtype, split_keys=split_keys, seed=seed)
    slots, items = probe.slots, probe.items
    share_s = budget_s / (items.n_classes + LAUNCH_CLASSES + 2)
    handing_us = _time(probe.handing(), share_s).p50_us
    passage_us = (_time(probe.passage(), share_s).p50_us + handing_us) / blocks.shape[0]
    chunk_us = _chunk_us(probe, handing_us, share_s)
    classes = []
    for cls in progress.steps(range(items.n_classes), f"profile {blocks.tile.name}"):
        timing, n_items, merging_us = _time_class(probe, cls, share_s)
        common_us = slots * (passage_us * probe.passing_rows(cls) + merging_us / n_items)
        p20, p50, p80 = (
            # A launch may be over sooner than a chunk was found to cost elsewhere; its items still take some time.
            max(us - handing_us - chunk_us, us / 10) / n_items + common_us
            for us in (timing.p20_us, timing.p50_us, timing.p80_us)
        )
        times = {"p20_us": p20, "latency_us": p50, "alone_us": p50, "p80_us": p80}
        resources, occupancy = probe.resources(cls)
        classes.append(shape_class(items, cls, timing, **times, resources=resources, occupancy=occupancy))
    return chunk_us / slots, 0.0, classes


class Probe:
    """Runs what `torch_blocks.prepare` would run for the work items of `blocks`, class by class, on random tokens."""

    def __init__(self, blocks, *, heads, head_dim, dtype, split_keys, seed):
        """Make tokens and work items; dtype: a name such as ``float32``."""
        self.blocks, self.items = blocks, work.items(blocks, split_keys)
        self._setting = setting(blocks.shape, heads, head_dim, getattr(torch, dtype))
        self.slots = targets.describe("cpu")["threads"]
        self._slots = slots(self.slots)
        generator = torch.Generator().manual_seed(seed)
        n_q, n_k = blocks.shape
        self._q, self._k, self._v = (
            torch.randn(1, heads, n, head_dim, generator=generator).to(self._setting.dtype) for n in (n_q, n_k, n_k)
        )

    def launch(self, cls, most=None):
        """The launch of all items of class `cls`, or of its first `most`."""
        member = np.flatnonzero(self.items.cls == cls)[:most]
        columns = (getattr(self.items, name)[member] for name in ("block", "run_lo", "run_hi"))
        return build(self._setting, self.blocks, self.items, cls, *columns, MASK_BYTES)

    def call(self, launch):
        """``(callable, n)``: runs `launch`, n items, once on every slot, all at the same time."""
        tokens, slots = self._tokens, self._slots
        out = tokens[0].new_empty(slots.n, launch.n_rows, tokens[0].shape[2])
        lse = tokens[0].new_empty(slots.n, launch.n_rows, launch.heads, dtype=torch.float64)
        jobs, begin = [], 0
        for chunk in launch.chunks:
            jobs += [(chunk, begin, out[i : i + 1], lse[i : i + 1]) for i in range(slots.n)]
            begin += len(chunk.rows)

        def attend(job):
            chunk, begin, out, lse = job
            launch.attend(chunk, tokens, (0, 1), out, begin, lse)

        return lambda: slots.run(attend, jobs), sum(chunk.items for chunk in launch.chunks)

    def merging(self, launch):
        """A callable that merges the parts that `launch` makes: as many a row as the split blocks have on average."""
        live = self.items.block[self.items.split]
        parts = min(launch.n_rows, round(len(live) / len(np.unique(live))))
        rows = launch.n_rows // parts * parts
        sources = index(np.arange(rows).reshape(parts, -1).T)
        width = self._tokens[0].shape[2]
        values = torch.ones(rows, width, dtype=self._setting.dtype)
        lse = torch.zeros(rows, launch.heads, dtype=torch.float64)
        return lambda: merge(values, lse, sources, launch.heads)

    def handing(self):
        """A callable that hands every slot an empty job."""
        return lambda: self._slots.run(lambda job: None, range(self._slots.n))

    def passage(self):
        """A callable that does what every call does besides its items: bring tokens into place, and results back."""
        n, common = self.blocks.shape[0], self._setting
        sizes = n, 0, self.blocks.shape, common.heads, common.head_dim, common.dtype
        nothing = Executor((), (), (), index(np.arange(n)), *sizes, self.slots)
        return lambda: nothing(self._q, self._k, self._v)

    def passing_rows(self, cls):
        """Rows that one item of class `cls` adds to the passage; those of a split block count once among its parts."""
        member = self.items.cls == cls
        block = self.items.block[member]
        parts = np.bincount(self.items.block, minlength=self.blocks.n_blocks)[block]
        return float((self.blocks.rows[block] / parts).mean())

    def resources(self, cls):
        """``(resources, occupancy)`` of one item, in bytes: what it touches; its result and its indices."""
        items = self.items
        rows, keys = int(items.class_rows[cls]), int(items.class_runs[cls]) * self.blocks.tile.run
        touched = sum(item_bytes(self._setting, rows, keys, int(items.class_masked[cls])))
        token = self._setting.heads * self._setting.head_dim * self._setting.dtype.itemsize
        return {"working_set_bytes": float(touched)}, float(rows * token + 4 * (rows + keys))

    @cached_property
    def _tokens(self):
        return tuple(token_major(x) for x in (self._q, self._k, self._v))


def head(launch, n_chunks):
    """The first `n_chunks` chunks of a launch, as a launch."""
    chunks = launch.chunks[:n_chunks]
    return replace(launch, chunks=chunks, n_rows=sum(len(chunk.rows) for chunk in chunks))


def _time(call, seconds):
    return time_call(call, min_reps=MIN_REPS, max_seconds=seconds, rse_target=RSE, warmups=1)


def _time_class(probe, cls, seconds):
    """``(timing, items, merging_us)`` of the launch of class `cls`, or of as many chunks as `seconds` allow."""
    launch = probe.launch(cls)
    first, _ = probe.call(head(launch, 1))
    chunk_s = _time(first, 0).p20_us / 1e6
    n_chunks = max(1, min(len(launch.chunks), int(seconds / (MIN_REPS + 1) / chunk_s)))
    launch = head(launch, n_chunks)
    call, n_items = probe.call(launch)
    merging_us = _time(probe.merging(launch), seconds / 10).p50_us if launch.split else 0.0
    return _time(call, seconds), n_items, merging_us


def _chunk_us(probe, handing_us, seconds):
    """Cost of a chunk beyond its items: the median over the largest classes of what one item costs more than others."""
    costs = []
    for cls in np.argsort(-probe.items.counts, kind="stable")[:LAUNCH_CLASSES].tolist():
        (alone, _), (several, n) = probe.call(probe.launch(cls, 1)), probe.call(head(probe.launch(cls), 1))
        if n > 1:
            alone_us, several_us = (_time(call, seconds / 2).p50_us - handing_us for call in (alone, several))
            costs.append(alone_us - (several_us - alone_us) / (n - 1))
    return float(max(np.median(costs), 0.0)) if costs else 0.0

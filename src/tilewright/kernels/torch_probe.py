"""Shape classes of one blocks file, each run alone by the code of `torch_blocks` (stage T3)."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from tilewright import hardware, work
from tilewright.kernels.slots import slots
from tilewright.kernels.torch_blocks import MASK_BYTES, Executor, merge
from tilewright.kernels.torch_launch import build, index, item_bytes, setting, token_major


class Probe:
    """Runs what `torch_blocks.prepare` would run for the work items of `blocks`, class by class, on random tokens."""

    def __init__(self, blocks, *, heads, head_dim, dtype, split_keys, seed):
        """Make tokens and work items; dtype: a name such as ``float32``."""
        self.blocks, self.items = blocks, work.items(blocks, split_keys)
        self._setting = setting(blocks.shape, heads, head_dim, getattr(torch, dtype))
        self._slots = slots(hardware.describe("cpu")["threads"])
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
        lse = tokens[0].new_empty(slots.n, launch.n_rows, launch.heads, dtype=torch.float32)
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
        values, lse = torch.ones(rows, width, dtype=self._setting.dtype), torch.zeros(rows, launch.heads)
        return lambda: merge(values, lse, sources, launch.heads)

    def handing(self):
        """A callable that hands every slot an empty job."""
        return lambda: self._slots.run(lambda job: None, range(self._slots.n))

    def passage(self):
        """A callable that does what every call does besides its items: bring tokens into place, and results back."""
        n, common = self.blocks.shape[0], self._setting
        sizes = n, 0, self.blocks.shape, common.heads, common.head_dim, common.dtype
        nothing = Executor((), (), (), index(np.arange(n)), *sizes, self._slots)
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

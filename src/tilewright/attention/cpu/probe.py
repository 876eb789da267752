"""Times of the work items of one blocks file, shape by shape and all together, by the executor's code (stage T3)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tilewright import devices
from tilewright.attention.blocks import work
from tilewright.attention.cpu.executor import MASK_BYTES, Executor, assembled, merge
from tilewright.attention.cpu.launch import build, index, item_bytes, token_major
from tilewright.attention.profile import ItemShape, item_shape
from tilewright.attention.setting import setting
from tilewright.core import progress
from tilewright.core.timing import FEWEST, time_call
from tilewright.devices.cpu.workers import in_any_state, workers

if TYPE_CHECKING:
    from tilewright.attention.blocks import Blocks
    from tilewright.attention.cpu.launch import Launch

# A timing stops at this relative standard error of its mean.
RSE = 0.03
MIN_REPS = 10
# The cost of a launch is the median over this many shapes.
LAUNCH_SHAPES = 4
# Of the budget, what the call of all items takes in place of one shape.
WHOLE_SHARES = 2


@in_any_state
def measure(
    blocks: "Blocks", *, heads: int, head_dim: int, dtype: str, split_keys: int, seed: int, budget_s: float
) -> tuple[float, float, list[ItemShape]]:
    """``(launch_us, tile_us, [ItemShape, …])`` of the work items of `blocks`; see the contract in `attention.backends`.

    All workers run the launch of a class at the same time: all of it, or the part that the class's share of the budget
    has time for. Where all cores share its operators it runs once, an item is charged its share of that time on each
    core, and its heads share the cores where it is alone. The cost of a launch is the cost of its first chunk: what an
    item that runs alone takes beyond an item's share of a larger chunk. It is taken off and returned as `launch_us`.
    Work that every call does for all rows (gathering tokens, returning results) is charged to the items by their rows.
    The merging of split rows is charged to their parts.

    Shapes run side by side in a schedule, and otherwise than one by one. So a call of all items is timed, too, or of as
    many chunks of all shapes as there is time for, and all times are scaled to it. The schedule with this tile alone is
    then predicted as it was timed. Nothing of it is `tile_us`: what all cores do beside items, they do once a call.
    """
    probe = Probe(blocks, heads=heads, head_dim=head_dim, dtype=dtype, split_keys=split_keys, seed=seed)
    cores, items = probe.cores, probe.items
    if not items.n_shapes:
        return 0.0, 0.0, []
    share_s = budget_s / (items.n_shapes + LAUNCH_SHAPES + 2 + WHOLE_SHARES)
    passage_us = _time(probe.passage(), share_s).p50_us / blocks.shape[0]
    launch_us = _chunk_us(probe, share_s)
    shapes, commons_us = [], []
    for shape in progress.with_progress(range(items.n_shapes), f"profile {blocks.tile.name}"):
        timing, n_items, merging_us = _time_shape(probe, shape, share_s)
        spread = cores if probe.launch(shape).together else 1
        common_us = cores * (passage_us * probe.passing_rows(shape) + merging_us / n_items)
        p20, p50, p80 = (
            # A short launch may take less than a chunk cost in other shapes. Its items must not be free.
            spread * max(us - launch_us, us / 10) / n_items + common_us
            for us in (timing.p20_us, timing.p50_us, timing.p80_us)
        )
        times = {"p20_us": p20, "latency_us": p50, "alone_us": p50 / min(spread, heads), "p80_us": p80}
        resources, occupancy = probe.resources(shape)
        shapes.append(item_shape(items, shape, timing, **times, resources=resources, occupancy=occupancy))
        commons_us.append(common_us)
    scale = _scale(probe, shapes, np.array(commons_us), launch_us, WHOLE_SHARES * share_s)
    return scale * launch_us, 0.0, [_scaled(shape, scale) for shape in shapes]


class Probe:
    """Runs the launches of the work items of `blocks`, class by class, as the executor does, on random tokens."""

    def __init__(self, blocks: "Blocks", *, heads: int, head_dim: int, dtype: str, split_keys: int, seed: int):
        """Make tokens and work items; dtype: a name such as ``float32``."""
        self.blocks, self.items = blocks, work.items(blocks, split_keys)
        self._setting = setting(blocks.shape, heads, head_dim, getattr(torch, dtype))
        self.cores: int = devices.describe("cpu")["threads"]
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        n_q, n_k = blocks.shape
        self._q, self._k, self._v = (
            torch.randn(1, heads, n, head_dim, **drawn).to(self._setting.dtype) for n in (n_q, n_k, n_k)
        )

    def launch(self, shape: int, most: int | None = None) -> "Launch":
        """The launch of all items of shape `shape`, or of its first `most`."""
        return self._launches[shape] if most is None else self._build(shape, most, MASK_BYTES)

    @cached_property
    def _launches(self):
        # Memory for masks is shared out as the executor does.
        launches, spare = [], MASK_BYTES
        for shape in range(self.items.n_shapes):
            launches.append(self._build(shape, None, spare))
            spare -= 0 if launches[-1].masks is None else launches[-1].masks.held_bytes
        return launches

    def _build(self, shape, most, spare_bytes):
        member = np.flatnonzero(self.items.shape == shape)[:most]
        columns = (getattr(self.items, name)[member] for name in ("block", "run_lo", "run_hi"))
        return build(self._setting, self.blocks, self.items.forms[shape], *columns, spare_bytes)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked

    def whole(self, every: int) -> tuple[Callable, np.ndarray]:
        """``(callable, left out)``: the executor's call with each `every`-th chunk of all items; left out: int [K], the
        items of each shape that do not run."""
        executor = assembled(self._launches, [0] * self.items.n_shapes, self._setting, self.blocks.shape)
        some = replace(executor, jobs=executor.jobs[::every])
        left_out = self.items.counts.copy()
        number = {id(launch): shape for shape, launch in enumerate(self._launches)}
        for launch, chunk, _ in some.jobs:
            left_out[number[id(launch)]] -= chunk.items
        return lambda: some(self._q, self._k, self._v), left_out

    def call(self, launch: "Launch") -> tuple[Callable, int]:
        """``(callable, n)``: runs `launch`, which has n items: shared by all cores, or once on each of all workers."""
        tokens, copies = self._tokens, 1 if launch.together else self.cores
        out = tokens[0].new_empty(copies, launch.n_rows, tokens[0].shape[2])
        stats = tokens[0].new_empty(copies, launch.n_rows, 2, launch.heads, dtype=torch.float64)
        jobs, begin = [], 0
        for chunk in launch.chunks:
            jobs += [(chunk, begin, out[i : i + 1], stats[i : i + 1]) for i in range(copies)]
            begin += len(chunk.rows)

        def attend(job):
            chunk, begin, out, stats = job
            launch.attend(chunk, tokens, (0, 1), out, begin, stats)

        @torch.inference_mode()
        def attend_all():
            for job in jobs:
                attend(job)

        n = sum(chunk.items for chunk in launch.chunks)
        return attend_all if launch.together else lambda: workers(copies).run(attend, jobs), n

    def merging(self, launch: "Launch") -> Callable[[], Tensor]:
        """A callable that merges the parts that `launch` makes; a row has as many as split blocks have on average."""
        live = self.items.block[self.items.split]
        parts = min(launch.n_rows, round(len(live) / len(np.unique(live))))
        rows = launch.n_rows // parts * parts
        sources = index(np.arange(rows).reshape(parts, -1).T)
        width = self._tokens[0].shape[2]
        values = self._tokens[0].new_ones(rows, width)
        stats = values.new_zeros(rows, 2, launch.heads, dtype=torch.float64)
        return lambda: merge(values, stats, sources, launch.heads)

    def passage(self) -> Callable:
        """A callable that does what every call does besides its items: copy the tokens, and gather the results."""
        n, common = self.blocks.shape[0], self._setting
        sizes = n, 0, self.blocks.shape, common.heads, common.head_dim, common.dtype
        nothing = Executor((), (), (), index(np.arange(n)), *sizes, self.cores)
        return lambda: nothing(self._q, self._k, self._v)

    def passing_rows(self, shape: int) -> float:
        """Rows that one item of shape `shape` adds to the passage; the parts of a split block share its rows."""
        member = self.items.shape == shape
        block = self.items.block[member]
        parts = np.bincount(self.items.block, minlength=self.blocks.n_blocks)[block]
        return float((self.blocks.rows[block] / parts).mean())

    def resources(self, shape: int) -> tuple[dict[str, float], float]:
        """``(resources, occupancy)`` of one item, in bytes: what it reads and writes; its result and its indices."""
        items = self.items
        rows, keys = int(items.shape_rows[shape]), int(items.shape_runs[shape]) * self.blocks.tile.run
        touched = sum(item_bytes(self._setting, rows, keys, int(items.shape_masked[shape])))
        token = self._setting.heads * self._setting.head_dim * self._setting.dtype.itemsize
        return {"working_set_bytes": float(touched)}, float(rows * token + 4 * (rows + keys))

    @cached_property
    def _tokens(self):
        return tuple(token_major(x) for x in (self._q, self._k, self._v))


def head(launch: "Launch", n_chunks: int) -> "Launch":
    """The first `n_chunks` chunks of a launch, as a launch."""
    chunks = launch.chunks[:n_chunks]
    return replace(launch, chunks=chunks, n_rows=sum(len(chunk.rows) for chunk in chunks))


def _time(call, seconds):
    return time_call(call, min_reps=MIN_REPS, max_seconds=seconds, rse_target=RSE, warmups=1)


def _time_shape(probe, shape, seconds):
    """``(timing, items, merging_us)`` of the launch of shape `shape`, or of as many chunks as `seconds` allow."""
    launch = probe.launch(shape)
    first, _ = probe.call(head(launch, 1))
    chunk_s = _time(first, 0).p20_us / 1e6
    n_chunks = max(1, min(len(launch.chunks), int(seconds / (MIN_REPS + 1) / chunk_s)))
    launch = head(launch, n_chunks)
    call, n_items = probe.call(launch)
    merging_us = _time(probe.merging(launch), seconds / 10).p50_us if launch.split else 0.0
    return _time(call, seconds), n_items, merging_us


def _scale(probe, shapes, commons_us, launch_us, seconds):
    """How many times what `shapes` add up to their items take, all or as many chunks as `seconds` allow.

    commons_us: what an item takes of the work for all rows, which every call does.
    """
    latency_us = np.array([shape.latency_us for shape in shapes])
    load_us = probe.items.counts @ latency_us / probe.cores
    longest_us = max(shape.alone_us for shape in shapes)
    added_us = max(longest_us, load_us) + launch_us * len(shapes)
    call, left_out = probe.whole(max(1, round((FEWEST + 1) * added_us / 1e6 / seconds)))
    absent_us = left_out @ (latency_us - commons_us) / probe.cores
    return _time(call, seconds).p50_us / (max(longest_us, load_us - absent_us) + launch_us * len(shapes))


def _scaled(shape, scale):
    times = ("latency_us", "alone_us", "p20_us", "p80_us")
    return replace(shape, **{name: scale * getattr(shape, name) for name in times})


def _chunk_us(probe, seconds):
    """Cost of a chunk beyond its items: what an item alone costs more than one in a chunk, median of some shapes."""
    costs = []
    for shape in np.argsort(-probe.items.counts, kind="stable")[:LAUNCH_SHAPES].tolist():
        (alone, _), (several, n) = probe.call(probe.launch(shape, 1)), probe.call(head(probe.launch(shape), 1))
        if n > 1:
            alone_us, several_us = (_time(call, seconds / 2).p50_us for call in (alone, several))
            costs.append(alone_us - (several_us - alone_us) / (n - 1))
    return float(max(np.median(costs), 0.0)) if costs else 0.0

"""Executor of schedules on a CPU: batched attention calls on gathered tokens (stages T3 and T5).

Work items of one round, tile and shape form one launch. A chunk of it gathers its queries and keys from token-major
copies of q, k and v, by indices that include the order of the tokens. It attends with an additive mask where it needs
one and writes its results side by side. The parts of a split block are merged by their log-sum-exps. A last gather puts
the result of every query at its position.

All cores share the operators of small items, one chunk after the other, as in the layers around: the helper threads of
torch, which spin for up to milliseconds after each of these, would take the cores from workers. Chunks of large items
are taken by workers one at a time.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tilewright import devices
from tilewright.attention.blocks import work
from tilewright.attention.cpu.launch import build, index, take, token_major
from tilewright.attention.schedule.record import verify_inputs
from tilewright.attention.setting import of_units, setting
from tilewright.attention.units import Units
from tilewright.devices import qkv
from tilewright.devices.cpu.workers import alone, in_any_state, workers

if TYPE_CHECKING:
    from tilewright.attention.blocks import Blocks
    from tilewright.attention.cpu.launch import Launch
    from tilewright.attention.schedule.record import Schedule
    from tilewright.attention.setting import Setting

# ASSUME: masks may take a quarter of a gigabyte as floats. Those that do not fit are expanded in each call, a few items
# at a time.
MASK_BYTES = 1 << 28
_CPU = torch.device("cpu")


@in_any_state
def prepare(
    schedule: "Schedule",
    blocks: "dict[str, Blocks]",
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    units: Units | None = None,
    **options: Any,
) -> "Executor | OfUnits":
    """Return an `Executor` of `schedule`, see the contract in `attention.backends`.

    Raises `ArtifactError` for blocks of another schedule, `PatternError` for an order or bias that does not fit.
    """
    verify_inputs(schedule, blocks)
    shape = next(iter(blocks.values())).shape
    if units is not None:
        shape = shape[0] // units.patterns, shape[1]
    common = setting(shape, heads, head_dim, dtype, **options)
    own = common if units is None else of_units(common, units, shape)
    launches, spare = [], MASK_BYTES
    batches = np.column_stack([schedule.round, schedule.tile, _forms(schedule, blocks)])
    distinct, batch_of = np.unique(batches, axis=0, return_inverse=True)
    for i, (_, tile, *form) in enumerate(distinct.tolist()):
        member = batch_of.ravel() == i
        items = blocks[schedule.tiles[tile]], schedule.block[member], schedule.run_lo[member], schedule.run_hi[member]
        cover, block, run_lo, run_hi = items if units is None else units.spread(*items, shape[0])
        launches.append(build(own, cover, form, block, run_lo, run_hi, spare))
        spare -= 0 if launches[-1].masks is None else launches[-1].masks.held_bytes
    rounds = distinct[:, 0].tolist()
    if units is None:
        return assembled(launches, rounds, common, shape)
    n = len(units.group)
    inner = assembled(launches, rounds, own, (n * shape[0], n * shape[1]))
    return OfUnits(replace(inner, back=_by_token(inner.back, units, shape[0])), units, shape, heads)


def _by_token(back, units, n_rows):
    """`back` such that the heads of a token stand side by side, as in a result; of images they do already."""
    if units.by == "image":
        return back
    return back.view(-1, units.heads, n_rows).transpose(1, 2).flatten()


def assembled(launches: "list[Launch]", rounds: list[int], common: "Setting", shape: tuple[int, int]) -> "Executor":
    """The `Executor` of `launches`, each in its round, over a pattern of `shape`; common: the `Setting` of them."""
    jobs = _jobs(launches, rounds)
    place, merges, n_results, n_parts = _places(launches, shape[0])
    back = np.empty_like(place)
    back[common.taken[0]] = place
    sizes = n_results, n_parts, shape, common.heads, common.head_dim, common.dtype
    return Executor(tuple(launches), jobs, merges, index(back), *sizes, devices.describe("cpu")["threads"])


def _forms(schedule, blocks):
    """int [I, 4]: rows, runs, masked and split of each item's shape."""
    forms = np.zeros((schedule.n_items, 4), np.int64)
    for tile in np.unique(schedule.tile).tolist():
        here = schedule.tile == tile
        items = work.items(blocks[schedule.tiles[tile]], schedule.split_keys)
        forms[here] = np.array(items.forms)[schedule.shape[here]]
    return forms


@dataclass(frozen=True, eq=False)
class Executor:
    """A prepared schedule; call it with q, k and v.

    launches: in order. jobs: ``((launch, chunk, first row of its results), ...)``, in the order that they run in.
    merges: ``((begin, sources), ...)``: the rows `sources` [R, p] of the parts are merged into the rows of the results
    from `begin` on. back: int32 [N_q], the row of each query's result; the row `n_results` holds zeros. n_workers:
    threads that take jobs, and those of the backward.
    """

    launches: tuple
    jobs: tuple
    merges: tuple
    back: Tensor
    n_results: int
    n_parts: int
    shape: tuple[int, int]
    heads: int
    head_dim: int
    dtype: torch.dtype
    n_workers: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of indices and masks held between calls."""
        return 4 * len(self.back) + sum(launch.memory_bytes for launch in self.launches)

    @in_any_state
    def with_bias(self, table: Tensor) -> "Executor":
        """This executor with other values of its bias, float32 [H, T]: see `attention.backends`."""
        now = {id(x): replace(x, masks=x.masks.with_table(table)) for x in self.launches}
        jobs = tuple((now[id(launch)], *rest) for launch, *rest in self.jobs)
        return replace(self, launches=tuple(now[id(x)] for x in self.launches), jobs=jobs)

    @property
    def executed(self) -> int:
        """Pairs of query and key that a head works through, padding included."""
        return sum(_pairs(chunk) for launch in self.launches for chunk in launch.chunks)

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that a call holds beyond its arguments: copies of the tokens, results, a chunk for each worker."""
        tensors = self.shape[0] + 2 * self.shape[1] + self.n_results + 1 + self.n_parts + self.shape[0]
        chunk = max((launch.chunk_bytes(self.dtype.itemsize * self.head_dim) for launch in self.launches), default=0)
        per_entry = self.heads * (tensors * self.head_dim * self.dtype.itemsize + 16 * self.n_parts)
        return batch * per_entry + self.n_workers * chunk

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the pattern. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        expected = {name: getattr(self, name) for name in ("shape", "heads", "head_dim", "dtype")}
        qkv.check(q, k, v, **expected, device=_CPU)
        return self._run(q, k, v)

    @in_any_state
    def _run(self, *tensors):
        """Run all jobs on q, k, v → [B, H, N_q, D]."""
        jobs = [(job, b) for job in self.jobs for b in range(0, len(tensors[0]), job[1].entries)]
        handed, shared = ([each for each in jobs if each[0][0].together == together] for together in (False, True))
        if len(handed) == 1:
            handed, shared = [], handed + shared
        with alone() if handed else nullcontext():
            q, k, v = map(token_major, tensors)
        batch, width = q.shape[0], self.heads * self.head_dim
        results = q.new_empty(batch, self.n_results + 1, width)
        results[:, -1] = 0
        parts = q.new_empty(batch, self.n_parts, width)
        # In float64, in which differences of peaks are exact.
        stats = q.new_empty(batch, self.n_parts, 2, self.heads, dtype=torch.float64)

        def attend(job):
            (launch, chunk, begin), b = job
            entries = b, min(b + chunk.entries, batch)
            launch.attend(chunk, (q, k, v), entries, parts if launch.split else results, begin, stats)

        if handed:
            workers(self.n_workers).run(attend, handed)
        with torch.inference_mode():
            for job in shared:
                attend(job)
        for begin, sources in self.merges:
            for b in range(batch):
                results[b, begin : begin + len(sources)] = merge(parts[b], stats[b], sources, self.heads)
        out = take(results, self.back, 0, batch)
        return qkv.own(out.view(batch, self.shape[0], self.heads, self.head_dim).transpose(1, 2))


@dataclass(frozen=True, eq=False)
class OfUnits:
    """A prepared schedule of several patterns: one pass of an `Executor` over the tokens of all units, side by side.

    inner: its results stand by token, the heads of each side by side.
    """

    inner: Executor
    units: Units
    shape: tuple[int, int]
    heads: int

    @property
    def launches(self) -> "tuple[Launch, ...]":
        """Those of the pass."""
        return self.inner.launches

    @property
    def memory_bytes(self) -> int:
        """Bytes of indices and masks held between calls."""
        return self.inner.memory_bytes

    @property
    def executed(self) -> int:
        """Pairs of query and key that a head works through on average, padding included."""
        return self.inner.executed // len(self.units.group)

    def with_bias(self, table: Tensor) -> "OfUnits":
        """This executor with other values of its bias, float32 [H, T]: see `attention.backends`."""
        return replace(self, inner=self.inner.with_bias(table.reshape(1, -1) if self.units.apart else table))

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that a call holds beyond its arguments, with copies of q, k and v, whose heads move."""
        inner = self.inner
        copied = batch * self.heads * inner.head_dim * inner.dtype.itemsize * (self.shape[0] + 2 * self.shape[1])
        return copied + inner.peak_bytes(batch if self.units.by == "head" else 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the patterns. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        inner = self.inner
        sizes: dict[str, Any] = {"heads": self.heads, "head_dim": inner.head_dim, "dtype": inner.dtype}
        qkv.check(q, k, v, shape=self.shape, **sizes, device=_CPU)
        self.units.check(len(q))
        found = inner(*map(self.together, (q, k, v)))
        return qkv.own(found.transpose(1, 2).reshape(len(q), self.shape[0], self.heads, inner.head_dim).transpose(1, 2))

    def apart(self, x: Tensor, batch: int) -> Tensor:
        """The inverse of `together`, for gradients: [B, H, N, D], of a batch of B."""
        if self.units.by == "image":
            return x[0].unflatten(1, (batch, -1)).transpose(0, 1)
        return x.reshape(batch, self.heads, x.shape[2] // len(self.units.group), x.shape[3])

    def together(self, x: Tensor) -> Tensor:
        """[B, H, N, D] → the tokens of all units one after the other: [B or 1, H or 1, U * N, D]."""
        if self.units.by == "image":
            return x.transpose(0, 1).flatten(1, 2)[None]
        return x.flatten(1, 2)[:, None] if self.units.by == "head" else x.flatten(0, 2)[None, None]


def merge(parts: Tensor, stats: Tensor, sources: Tensor, heads: int) -> Tensor:
    """Merge split results: parts [P, H*D] with stats [P, 2, H], see `Launch.attend`; sources int32 [R, p] → [R, H*D].

    Parts with a log-sum-exp of -inf have weight zero. A row with no other part gives zeros.
    """
    n, p = sources.shape
    logs, peaks = stats.index_select(0, sources.flatten()).view(n, p, 2, heads).unbind(2)
    # Relative to the greatest peak: a log-sum-exp would vanish beside a large bias.
    weight = torch.softmax(logs + (peaks - peaks.amax(1, keepdim=True)), 1).nan_to_num().float()
    part = parts.index_select(0, sources.flatten()).view(n, p, heads, -1)
    return (weight[..., None] * part).sum(1).view(n, -1)


def _jobs(launches, rounds):
    """Chunks with their launches and the first row of their results: round by round, the most work first."""
    jobs: list = []
    written = {False: 0, True: 0}
    for launch, number in zip(launches, rounds, strict=True):
        for chunk in launch.chunks:
            jobs.append((number, -_pairs(chunk), len(jobs), (launch, chunk, written[launch.split])))
            written[launch.split] += len(chunk.rows)
    return tuple(job for *_, job in sorted(jobs, key=lambda job: job[:3]))


def _pairs(chunk):
    return len(chunk.rows) * len(chunk.keys) // (1 if chunk.shared else chunk.items)


def _places(launches, n_queries):
    """``(place, merges, n_results, n_parts)``: the row of each query's result, and the merges that make some of them.

    A part in which a row has no key is left out of the row's merge: its log-sum-exp is not defined.
    """
    place, written, n_parts = np.full(n_queries, -1, np.int64), 0, 0
    rows, sources = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for launch in launches:
        if launch.split:
            rows.append(launch.row_of)
            sources.append(n_parts + launch.position_of)
            n_parts += launch.n_rows
        else:
            place[launch.row_of] = written + launch.position_of
            written += launch.n_rows
    all_rows = np.concatenate(rows)
    order = np.argsort(all_rows, kind="stable")
    sorted_sources = np.concatenate(sources)[order]
    merged, first, count = np.unique(all_rows[order], return_index=True, return_counts=True)
    merges = []
    for p in np.unique(count):
        member = np.flatnonzero(count == p)
        place[merged[member]] = written + np.arange(len(member))
        merges.append((written, index(sorted_sources[first[member][:, None] + np.arange(p)])))
        written += len(member)
    # Queries without a result read the row of zeros behind all others.
    return np.where(place < 0, written, place), tuple(merges), written, n_parts

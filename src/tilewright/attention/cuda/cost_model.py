"""What a work list takes on a GPU, predicted from its calibration; nothing is compiled or timed (stage T3).

A multiprocessor works on several programs at a time, the more the slower each. `calibration` has measured how long the
parts of a program take while 1, 2, … of them share a multiprocessor: what it takes at all, a step without and with a
mask, keys that lie apart or come from memory, masks of its own, a part of a split block. A launch is played through
with these durations, program by program, in the order of its items.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tilewright import devices
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.cuda import config, tile_lists
from tilewright.attention.cuda.tile_lists import Item, Part
from tilewright.attention.profile import ItemShape, fitted
from tilewright.core.compiled import njit
from tilewright.core.contents import Amount, Count, Size
from tilewright.core.errors import DeviceError

if TYPE_CHECKING:
    pass

# Of programs beyond so many, the first are taken to run at the full rate: only how the last ones end is uneven.
PLAYED = 1 << 17
# Of the second-level cache, the share that a launch can count on. ASSUME: the rest holds what nobody asked for.
L2_SHARE = 0.8
# So many are played through faster than the compiled function is loaded, and far faster than it is compiled.
_FEW = 4096
# Waves of programs in which the reuse of keys is looked at, at most.
_WAVES = 256
# Steps of keys that are sorted at a time.
_STEPS = 1 << 14


@dataclass(frozen=True)
class Kernel:
    """One variant of the kernel: masks of this `TileLists.rank`, or None for no masks.

    resident, resident_split: programs on a multiprocessor at a time; where some block is split. busy: 1 to `resident`,
    numbers of programs on each multiprocessor. item_us, full_us, partial_us: with so many that begin together, what a
    program takes beside its steps, a step without a mask and one with a mask. steady_us: these three where all places
    are taken and programs begin as others end.
    """

    rank: Count | None
    registers: Amount
    spills: Amount
    shared_bytes: Amount
    resident: Size
    resident_split: Size
    busy: tuple[Size, ...]
    item_us: tuple[Amount, ...]
    full_us: tuple[Amount, ...]
    partial_us: tuple[Amount, ...]
    steady_us: tuple[Amount, Amount, Amount]


@dataclass(frozen=True)
class Calibration:
    """What the programs of one form take on one GPU, in one type and head dim.

    made_for: what it holds for, see `calibration.made_for`. kernels: the variants. launch_us: of a launch, whatever it
    runs. by_age: how far the older programs of a multiprocessor go first, see `shares`.
    What a step takes more, for each program on the multiprocessor:
    scattered_us: if none of its keys lie side by side. missed_us: if none is in the second-level cache.
    apart_factors_us, apart_tiles_us: if the multiprocessor's other programs have other masks, factors of the greatest
    rank or tiles. own_tiles_us, missed_tiles_us: if no other program reads the tile of its mask; if it is not in the
    second-level cache.
    And a program: part_us, to leave its sums, for each on the multiprocessor. merge_us, merge_few_us: to merge a part
    of a block of many rows, and `tile_kernel.MERGED` parts of one row of a block of few.
    error, spread: medians of how far the times that it was made of are from what it says of them, and of their own
    spread. seconds: that the timing took. timings: these times, ``us`` of each `calibration_fit.Point`.
    """

    made_for: dict[str, str | int | float | None]
    rows: Size
    step_keys: Size
    multiprocessors: Size
    l2_bytes: Size
    kernels: tuple[Kernel, ...]
    launch_us: Amount
    by_age: Amount
    scattered_us: Amount
    missed_us: Amount
    apart_factors_us: Amount
    apart_tiles_us: Amount
    own_tiles_us: Amount
    missed_tiles_us: Amount
    part_us: Amount
    merge_us: Amount
    merge_few_us: Amount
    error: Amount
    spread: Amount
    seconds: Amount
    timings: tuple[dict[str, int | float | bool | None], ...]

    def kernel(self, rank: int | None) -> Kernel:
        """The variant for masks of `rank`. Raises `DeviceError` where it does not fit the device."""
        found = next((kernel for kernel in self.kernels if kernel.rank == rank), None)
        if found is None:
            raise DeviceError(
                f"tiles of {self.rows} rows: expected masks of a rank that fits this device, "
                f"{[each.rank for each in self.kernels]}, found rank {rank}; plan with a smaller tile"
            )
        return found


@dataclass(frozen=True, eq=False)
class Launch:
    """What the time of a launch follows from.

    full, partial: int [I], steps of each item without and with a mask. part: bool [I], it is a part of a split block.
    merged, merged_few: int [I], what the item merges as the last of its block. hb: programs of an item. rank: of its
    masks, None where it has none. Shares, see `Calibration`: scattered, missed of its keys; apart: of pairs of
    items whose masks differ; own, missed_tiles: of the tiles of masks that its programs read.
    """

    full: np.ndarray
    partial: np.ndarray
    part: np.ndarray
    merged: np.ndarray
    merged_few: np.ndarray
    hb: int
    rank: int | None
    scattered: float = 0.0
    missed: float = 0.0
    apart: float = 0.0
    own: float = 0.0
    missed_tiles: float = 0.0


def predict(
    blocks: Blocks,
    *,
    heads: int,
    head_dim: int,
    dtype: str,
    split_keys: int | None,
    calibration: Calibration,
    bias_heads: int | None = None,
) -> tuple[float, float, list[ItemShape]]:
    """``(launch_us, tile_us, [ItemShape, …])`` of the work items of `blocks`, as `probe.measure` gives them.

    bias_heads: heads with a bias of their own, None without a bias. `tile_us` is what the launch of all items takes
    beside its load: ramp, tail and what its few programs leave of the multiprocessors.
    """
    items = work.items(blocks, split_keys)
    if not items.n_shapes:
        return 0.0, 0.0, []
    columns = items.block, items.run_lo, items.run_hi
    lists = tile_lists.build(blocks, *columns, calibration.step_keys, masks=bias_heads is None)
    # The lists have the longest first.
    shape = items.shape[np.argsort(items.run_lo - items.run_hi, kind="stable")]
    launch = describe(lists, calibration, heads, head_dim, dtype, bias_heads)
    kernel = calibration.kernel(launch.rank)
    together_us, steady_us = durations(launch, calibration)
    resident, multiprocessors = together_us.shape[1], calibration.multiprocessors
    # A multiprocessor's share of an item's programs.
    load_us = heads * steady_us / resident
    fixed_us = max(calibration.launch_us - devices.describe("cuda")["launch_us"], 0.0)
    whole_us = fixed_us + makespan(together_us, steady_us, heads, calibration)
    alone_us = fixed_us + together_us[:, 0] * -(-heads // multiprocessors)
    width = sum(config.HEAD_DIMS[head_dim]) + 2
    scratch = np.where(launch.part, 4.0 * heads * width * lists.items[:, Item.ROWS], 0.0)
    counts, error = items.counts, calibration.error
    mean_us, scratch = (np.bincount(shape, x, items.n_shapes) / counts for x in (load_us, scratch))
    resources = {
        "shared_bytes": kernel.shared_bytes,
        "registers": kernel.registers,
        "spills": kernel.spills,
        "resident": float(resident),
    }
    shapes = [
        ItemShape(
            rows=int(items.shape_rows[s]),
            runs=int(items.shape_runs[s]),
            masked=bool(items.shape_masked[s]),
            split=bool(items.shape_split[s]),
            items=int(counts[s]),
            latency_us=float(mean_us[s]),
            alone_us=float(alone_us[shape == s].max()),
            p20_us=float(mean_us[s] * max(0.0, 1 - error)),
            p80_us=float(mean_us[s] * (1 + error)),
            repetitions=0,
            rse=error,
            resources=resources,
            occupancy=float(scratch[s]),
        )
        for s in range(items.n_shapes)
    ]
    all_us = float(load_us.sum() / multiprocessors)
    return 0.0, *fitted(shapes, whole_us=whole_us, load_us=all_us, lanes=multiprocessors)


def describe(
    lists: tile_lists.TileLists,
    calibration: Calibration,
    hb: int,
    head_dim: int,
    dtype: str,
    bias_heads: int | None = None,
) -> Launch:
    """The `Launch` of `TileLists` for `hb` heads times batch entries."""
    steps = lists.items[:, Item.STEPS].astype(np.int64)
    full = lists.items[:, Item.FULL_STEPS].astype(np.int64) if bias_heads is None else np.zeros_like(steps)
    partial = steps - full
    rank = None if not partial.any() else 0 if bias_heads is not None else lists.rank
    row_bytes = 2 * hb * head_dim * (4 if dtype == "float32" else 2)
    tiles, apart, own = 0, 0.0, 0.0
    value_bytes = 1 if rank == tile_lists.BYTES else 4
    if rank is not None:
        tiled = rank in (0, tile_lists.BYTES)
        kinds = lists.items[:, Item.MASK_STEP if tiled else Item.LEFT_FACTOR][partial > 0]
        _, counts = np.unique(kinds, return_counts=True)
        apart = 1.0 if bias_heads is not None else 1 - float(np.square(counts / counts.sum()).sum())
        if tiled:
            tiles = len(lists.bias_index) if bias_heads is None else int(partial.sum()) * bias_heads
        if rank == 0:
            own = min(1.0, tiles / (int(partial.sum()) * hb))
    merged, merged_few = _merged(lists)
    l2_bytes = L2_SHARE * calibration.l2_bytes
    wave = max(1, calibration.multiprocessors * calibration.kernel(rank).resident // hb)
    missed, read_bytes = _missed(lists, wave, row_bytes, l2_bytes, tiles * value_bytes * lists.rows * lists.step_keys)
    return Launch(
        full=full,
        partial=partial,
        part=lists.items[:, Item.PART] >= 0,
        merged=merged,
        merged_few=merged_few,
        hb=hb,
        rank=rank,
        scattered=_scattered(lists),
        missed=missed,
        apart=apart,
        own=own,
        missed_tiles=own if read_bytes > l2_bytes else 0.0,
    )


def _merged(lists):
    """``(int [I], int [I])``: parts of a block of many rows that an item merges, as the last of them; of a block of few
    rows, groups of `tile_kernel.MERGED` parts of a row."""
    from tilewright.attention.cuda.tile_kernel import FEW_ROWS, MERGED

    many, few = np.zeros((2, len(lists.items)), np.int64)
    at = np.flatnonzero(lists.items[:, Item.PART] >= 0)
    records, rows = lists.parts[lists.items[at, Item.PART]], lists.items[at, Item.ROWS]
    count, is_few = records[:, Part.COUNT], rows <= FEW_ROWS.value
    is_last = records[:, Part.NUMBER] == count - 1
    many[at] = np.where(is_last & ~is_few, count, 0)
    few[at] = np.where(is_last & is_few, rows * -(-count // MERGED.value), 0)
    return many, few


def _scattered(lists):
    """Share of the keys that do not follow another key of their step."""
    keys = lists.keys[:-1]
    pairs = keys.shape[0] * (keys.shape[1] - 1)
    return float(_breaks(keys) / pairs) if pairs else 0.0


def _breaks(keys):
    """How many keys of each step of `keys` [steps, step_keys], in order, do not follow the one before."""
    count = 0
    for lo in range(0, len(keys), _STEPS):
        ahead = np.diff(np.sort(keys[lo : lo + _STEPS], axis=1), axis=1)
        count += int(np.count_nonzero(ahead > 1))
    return count


def _missed(lists, wave, row_bytes, l2_bytes, mask_bytes):
    """``(share of the keys that the second-level cache does not hold, bytes that the launch reads)``.

    wave: items that run at a time. row_bytes: of a key and its value, in all heads. A key is held if what came between
    two waves that read it fits; where not all that the launch reads fits, the first to read a key does not find it.
    """
    used, n_items = lists.keys[:-1], len(lists.items)
    wave = max(wave, -(-n_items // _WAVES))
    reads = _reads(used, lists.items[:, Item.STEPS].astype(np.int64), wave)
    # Queries and results beside.
    read_bytes = int(reads[:, 0].sum()) * row_bytes + mask_bytes + int(lists.items[:, Item.ROWS].sum()) * row_bytes
    if read_bytes <= l2_bytes:
        return 0.0, read_bytes
    until = np.concatenate(([0.0], np.cumsum(reads.sum(1) * (row_bytes + mask_bytes / reads.sum()))))
    # No more than all that there is comes between.
    between = np.minimum(until[:-1, None] - until[:-1], read_bytes)
    missed = np.column_stack([np.full(len(reads), True), between > l2_bytes])
    return float((reads * missed).sum() / used.size), read_bytes


def _reads(used, steps, wave):
    """int64 [waves, 1 + waves]: keys that each wave reads, by the wave that read them last, counted from 1; 0 for none.

    used: keys [steps, step_keys]; steps: int64 [I], of each item. A wave is `wave` items, and reads a key once.
    """
    end = np.cumsum(steps)[wave - 1 :: wave].tolist()
    end += [len(used)] if len(steps) % wave else []
    reads = np.zeros((len(end), 1 + len(end)), np.int64)
    last = np.zeros(int(used.max()) + 1, np.int32)
    for now, (lo, hi) in enumerate(zip([0, *end], end, strict=False)):
        is_read = np.zeros(len(last), bool)
        is_read[used[lo:hi]] = True
        keys = np.flatnonzero(is_read)
        reads[now] = np.bincount(last[keys], minlength=1 + len(end))
        last[keys] = now + 1
    return reads


def depth(rank: int | None) -> float:
    """How much of a mask of `rank` is read in a step, where the greatest rank, or a tile, is 1; of intervals little, of
    bytes as much as of that rank."""
    if rank in (0, tile_lists.BYTES):
        return 1.0
    return 0.0 if rank is None else rank / tile_lists.RANKS[-1]


def durations(launch: Launch, calibration: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """``(float [I, resident], float [I])``: what a program of each item takes while 1, 2, … that began together share
    its multiprocessor, and with as many as there may be that began as others ended."""
    kernel = calibration.kernel(launch.rank)
    resident = kernel.resident_split if launch.part.any() else kernel.resident
    busy = np.arange(1, resident + 1)
    costs = [np.interp(busy, kernel.busy, times) for times in (kernel.item_us, kernel.full_us, kernel.partial_us)]
    step_us = launch.scattered * calibration.scattered_us + launch.missed * calibration.missed_us
    apart_us = calibration.apart_factors_us if launch.rank else calibration.apart_tiles_us
    mask_us = launch.apart * apart_us * depth(launch.rank)
    mask_us += launch.own * calibration.own_tiles_us + launch.missed_tiles * calibration.missed_tiles_us
    each_us = (launch.full + launch.partial) * step_us + launch.partial * mask_us + launch.part * calibration.part_us
    merges_us = launch.merged * calibration.merge_us + launch.merged_few * calibration.merge_few_us
    items = np.stack([np.ones_like(launch.full), launch.full, launch.partial], 1)
    together_us = items @ np.stack(costs) + each_us[:, None] * busy + merges_us[:, None]
    steady_us = items @ np.array(kernel.steady_us) + each_us * resident + merges_us
    return together_us, steady_us


def makespan(together_us: np.ndarray, steady_us: np.ndarray, hb: int, calibration: Calibration) -> float:
    """Microseconds that a launch takes whose items' programs, `hb` each, take what `durations` gives."""
    kinds, of_item = np.unique(np.column_stack([together_us, steady_us]), axis=0, return_inverse=True)
    of_item, resident = of_item.ravel(), together_us.shape[1]
    begun = max(0, (len(of_item) * hb - PLAYED) // hb)
    even_us = hb * steady_us[:begun].sum() / (resident * calibration.multiprocessors)
    # Programs that begin as others end gain by that, the more the fuller the multiprocessor is.
    first, full = kinds[:, :-1], np.arange(resident) / max(1, resident - 1)
    later = first * (1 + full * np.clip(kinds[:, -1:] / first[:, -1:] - 1, -0.5, 0.0))
    by_rank = shares(together_us.mean(axis=0), calibration.by_age)
    few = (len(of_item) - begun) * hb <= _FEW
    return even_us + (played if few else _compiled())(
        first, later, of_item[begun:], hb, calibration.multiprocessors, by_rank
    )


def shares(took_us: np.ndarray, by_age: float) -> np.ndarray:
    """float [n, n]: with 1 to n programs on a multiprocessor, the speed of each, the oldest first; 1 is their mean.

    took_us: float [n], what a program takes with so many. by_age: 0 where all are equally fast, 1 where each has what
    those before it leave: what a multiprocessor does more with it than without it.
    """
    n = len(took_us)
    found, done = np.ones((n, n)), np.arange(1, n + 1) / took_us
    for busy in range(2, n + 1):
        more = np.diff(np.maximum.accumulate(done[:busy]), prepend=0.0)
        # The youngest runs, too.
        more = np.maximum(more, 1e-3 * done[busy - 1])
        found[busy - 1, :busy] += by_age * (busy * more / more.sum() - 1)
    return found


@cache
def _compiled():
    return njit(cache=True, nogil=True)(played)


def played(
    first: np.ndarray, later: np.ndarray, of_item: np.ndarray, hb: int, multiprocessors: int, by_rank: np.ndarray
) -> float:
    """Time at which the last program ends. A multiprocessor that has room takes the next program.

    first, later: float [kinds, resident], durations of programs that begin with the launch, and of others. of_item: int
    [I], kinds. by_rank: `shares`.
    """
    resident, n = first.shape[1], len(of_item) * hb
    # The programs of each multiprocessor, the oldest first: their durations, and what is left of each.
    takes, left = np.ones((multiprocessors, resident, resident)), np.zeros((multiprocessors, resident))
    busy = np.zeros(multiprocessors, np.int64)
    now, ends = np.zeros(multiprocessors), np.full(multiprocessors, np.inf)
    begun, last = 0, 0.0
    for place in range(resident):
        for m in range(multiprocessors):
            if begun < n:
                takes[m, place], left[m, place] = first[of_item[begun // hb]], 1.0
                busy[m] += 1
                begun += 1
    for m in range(multiprocessors):
        for place in range(busy[m]):
            ends[m] = min(ends[m], left[m, place] * takes[m, place, busy[m] - 1] / by_rank[busy[m] - 1, place])
    while True:
        m = int(np.argmin(ends))
        if ends[m] == np.inf:
            return last
        last, passed, count, kept = ends[m], ends[m] - now[m], busy[m], 0
        now[m] = last
        for place in range(count):
            rest = left[m, place] - passed * by_rank[count - 1, place] / takes[m, place, count - 1]
            if rest > 1e-9:
                takes[m, kept], left[m, kept] = takes[m, place], rest
                kept += 1
        while kept < count and begun < n:
            takes[m, kept], left[m, kept] = later[of_item[begun // hb]], 1.0
            kept += 1
            begun += 1
        busy[m], ends[m] = kept, np.inf
        for place in range(kept):
            ends[m] = min(ends[m], last + left[m, place] * takes[m, place, kept - 1] / by_rank[kept - 1, place])

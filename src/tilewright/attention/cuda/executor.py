"""Executor of schedules on an NVIDIA GPU: one launch of `tile_kernel` for each tile of a round (stage T5).

The launches of a round run side by side, on streams of their own (`launcher.Beside`): each writes rows that no other
reads. Rounds follow one another.
"""

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from triton import OutOfResources

from tilewright.attention.cuda import bias_values, config, tile_kernel, tile_lists
from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, MASKED, RANKS, Item, Part
from tilewright.attention.schedule.record import verify_inputs
from tilewright.attention.setting import Setting, setting
from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher, tape

# Values of a bias are read from their table in each call, where it is on the device.
READS_TABLES = True
# Sizes of a scale for which scores, masks and the initial maximum of a row differ in float32.
SCALES = 2.0**-20, 2.0**20
# Programs in the second dimension of a grid, at most.
MOST_ACROSS = 65535
# Where the masks of the steps are in the memory that a kernel takes.
RIGHT = 4


@dataclass(frozen=True, eq=False)
class Source:
    """What an executor was prepared from. used: ``[(Blocks, int ids), …]``, the blocks that its work items are of."""

    common: Setting
    used: list


def prepare(
    schedule,
    blocks,
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    units=None,
    **options,
) -> "Executor":
    """Return an `Executor` of `schedule`: ``callable(q [B, H, N_q, D], k, v [B, H, N_k, D]) -> [B, H, N_q, D]``.

    blocks: ``{tile: Blocks}``. device: of the lists. options: row_order, col_order, ordered, bias and scale, see
    `attention.backends`. Pairs with a bias of -inf are not allowed; queries without an allowed pair get zeros.

    Raises `ArtifactError` for blocks of another schedule, `PatternError` for an order, a bias, a head dim or a scale
    that does not fit, `TileError` for a tile too small, and `DeviceError` while a CUDA graph is captured.
    """
    verify_inputs(schedule, blocks)
    _expect_no_capture()
    config.check_head_dim(head_dim)
    shape = next(iter(blocks.values())).shape
    n_rows = shape[0]
    if units is not None:
        shape = n_rows // units.patterns, shape[1]
    common = setting(shape, heads, head_dim, dtype, **options)
    if units is not None:
        common = replace(common, units=units)
    device = torch.empty(0, dtype=torch.int8, device=device).device
    rounds: dict = {}
    batches = np.unique(np.stack([schedule.round, schedule.tile]), axis=1).T.tolist()
    for number, t in batches:
        member = (schedule.round == number) & (schedule.tile == t)
        cover = blocks[schedule.tiles[t]]
        columns = schedule.block[member], schedule.run_lo[member], schedule.run_hi[member]
        form = config.for_tile(cover.tile, head_dim, dtype)
        build = partial(tile_lists.build, step_keys=form.step_keys, index=index(common))
        lists = lists_of(build, cover, columns, common, shape[0])
        rounds.setdefault(number, []).append(Launch(lists, cover.tile, common, device, form))
    if device.type == "cuda":
        # Calls may come on any stream.
        torch.cuda.current_stream(device).synchronize()
    used = [(blocks[schedule.tiles[t]], schedule.tile == t) for t in np.unique(schedule.tile).tolist()]
    written = sum(int(cover.rows[np.unique(schedule.block[member])].sum()) for cover, member in used)
    # A GPU takes the programs of the first launch first: the longest are not to be the last ones.
    launches = tuple(tuple(sorted(each, key=_longest, reverse=True)) for each in rounds.values())
    source = Source(common, [(cover, np.unique(schedule.block[member])) for cover, member in used])
    return Executor(launches, shape, heads, head_dim, dtype, device, written < n_rows, source)


def lists_of(build, cover, columns, common, n_rows: int):
    """The `TileLists` of items `columns` of a `cover`, of all units where there are several patterns of `n_rows` rows.

    build: ``callable(cover, *columns) -> TileLists``.
    """
    units = common.units
    if units is None:
        return build(cover, *columns)
    if common.bias is not None and units.apart:
        # Masks hold the bias, which differs by head: each unit has its own.
        cover, *columns = units.spread(cover, *columns, n_rows)
        units = replace(units, group=tuple(range(len(units.group))))
    return tile_lists.of_units(build(cover, *columns), units, n_rows)


def _longest(launch):
    """Pairs of query and key of the longest item of a launch."""
    return launch.lists.rows * launch.lists.step_keys * int(launch.lists.items[:, Item.STEPS].max(initial=0))


def index(common):
    """Index into the bias table by row and key in the graph's order, or None."""
    if common.bias is None:
        return None
    rows, keys = common.natural
    n, units, length = len(rows), common.units, common.bias.table.shape[1]
    if units is None:
        return lambda row, key: common.bias.index(rows[row], keys[key])
    if not units.apart:
        return lambda row, key: common.bias.index(rows[row % n], keys[key])
    # One table of one head holds those of all heads, see `bias_table`.
    return lambda row, key: row // n % units.heads * length + common.bias.index(rows[row % n], keys[key])


def bias_table(common, table=None):
    """The values of the bias, or those of `table` [H, T], contiguous; [1, H * T] where heads have patterns of their
    own."""
    if table is None:
        table = (
            torch.zeros(1, 1, dtype=torch.float32, device="cpu")
            if common.bias is None
            else common.bias.table.detach().float()
        )
    return table.reshape(mask_heads(common), -1).contiguous()


def mask_heads(common):
    """Heads that tiles of a bias have of their own."""
    alone = common.bias is None or (common.units is not None and common.units.apart)
    return 1 if alone else common.heads


def _expect_no_capture():
    if launcher.capturing():
        raise DeviceError(
            "a CUDA graph is being captured: call the plan once with tensors of these shapes and strides before that"
        )


def lanes(batch: int, heads: int, units):
    """Heads that each work item has in a batch."""
    return batch * heads if units is None else units.lanes(batch)


class Launch:
    """Work items of one tile: their lists on the device, scratch memory for what split items leave, and the call.

    form: `KernelConfig` that the lists were built for; None for this GPU's.
    """

    def __init__(self, lists, tile, common, device, form=None):
        self.lists, self._tile, self._heads, self._units = lists, tile, common.heads, common.units
        sign, scale = signed_scale(common)
        self._scale_log2 = scale * math.log2(math.e)
        self._config = form or config.for_tile(tile, common.head_dim, common.dtype)
        self._d0, self._d1 = config.HEAD_DIMS[common.head_dim]
        rows, keys = common.taken
        # Where values of a bias stand in its tiles, and the tiles of those that it was planned with, once asked for.
        self._common, self._scale = common, scale
        self._places: Any = None
        self._own: Any = None
        left, right, heads = masks(lists, common, device)
        positions = (_to(device, x.astype(np.int32)) for x in (rows, keys[lists.keys]))
        # In the kernel's order; tiles of a bias are of each call.
        self._held = (_to(device, lists.items), *positions, left, right, _part_records(device, lists))
        # In the kernel's order, but for WIDE.
        self._constants = {
            "BLOCK_M": lists.rows, "BLOCK_N": lists.step_keys, "HEAD_DIM": common.head_dim, "D0": self._d0,
            "D1": self._d1, "RANK": lists.rank, "HEADS": common.heads, "MASK_HEADS": heads, "FULL": lists.full,
            "PARTIAL": lists.partial, "SPLIT": len(lists.parts) > 0,
            "ORDERED": bool((rows == np.arange(len(rows))).all()), "SIGN": sign,
            "ACROSS": 0 if common.units is None else common.units.step, "NUM_STAGES": self._config.num_stages,
        }  # fmt: skip
        # By stream, the latest and largest last. Graphs hold the addresses of all: none is given back.
        self._stream = launcher.current_stream(left.device)
        self._scratch: dict = {}

    @property
    def tiled(self) -> bool:
        """Whether masks are tiles of a bias, which each call is given."""
        return self._held[RIGHT] is None

    def tiles(self, table):
        """The tiles of these values of the bias [H, T], in new memory.

        The lists that say where values stand are held from the first call on.
        """
        if self._places is None:
            self._places = self._placing()
        return self._places(bias_table(self._common, table).to(self._held[0].device))

    def own_tiles(self):
        """The tiles of the bias that it was planned with, made by the first call."""
        if self._own is None:
            device = self._held[0].device
            own = self._placing()(bias_table(self._common).to(device))
            if device.type == "cuda":
                # Calls may come on any stream.
                torch.cuda.current_stream(device).synchronize()
            self._own = own
        return self._own

    def _placing(self):
        _expect_no_capture()
        return bias_values.Tiles(self.lists, mask_heads(self._common), self._scale, self._held[0].device)

    def with_items(self, lists):
        """A launch of other work items over the same keys and masks, which both hold, with the same compiled kernel.

        lists: those of this launch, with other items and parts; it has parts only where this launch has.
        """
        other, held = copy(self), self._held[1:-1]
        device = held[0].device
        other.lists, other._scratch, other._places, other._own = lists, {}, None, None
        other._held = (_to(device, lists.items), *held, _part_records(device, lists))
        return other

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks held between calls."""
        held = sum(x.nbytes for x in (*self._held, self._own) if x is not None)
        return held + (0 if self._places is None else self._places.memory_bytes)

    def scratch_bytes(self, batch: int):
        """Bytes that what split items leave takes, for each stream that calls; at most four times those of the largest
        batch where smaller ones came before."""
        return scratch_bytes(self.lists, self._lanes(batch), self._d0 + self._d1)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, tiles=None):
        """Attend the items through Triton's own launch; returns the compiled kernel.

        tiles: of a bias, see `tiles`; None for those that it was planned with.
        Raises `DeviceError` where a program's tile does not fit the device.
        """
        memory, sizes, constants = self._arguments(q, k, v, out)
        if self.tiled:
            memory = _with_tiles(memory, self.own_tiles() if tiles is None else tiles)
        options, grid = {"num_warps": self._config.num_warps, "maxnreg": self._config.maxnreg}, self._grid(q)
        kernel = tile_kernel.tilewright_tile_attention
        try:
            compiled = kernel[grid](q, k, v, out, *memory, *sizes, **constants, **options)
        except OutOfResources as error:
            raise DeviceError(
                f"tile {self._tile.name}: expected to need at most {error.limit} of this device's {error.name}, found "
                f"{error.required}; plan with a smaller tile"
            ) from error
        launcher.taken_down(compiled, grid, (q, k, v, out, *memory), (*sizes, *constants.values()))
        return compiled

    def direct(self, compiled: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out, number: int = 0):
        """``callable(addresses of q, k, v, out, and of tiles, the launch's own at this number)`` that launches
        `compiled` for tensors of this layout, see `launcher.direct`."""
        memory, sizes, constants = self._arguments(q, k, v, out)
        grid, stream, scalars = self._grid(q), self._stream(), (*sizes, *constants.values())
        # Those of tiles are of each call.
        addresses = [0 if x is None else x.data_ptr() for x in memory]
        if not self.tiled:
            return launcher.direct(compiled, grid, stream, (*addresses, *scalars))
        launch = launcher.direct(compiled, grid, stream, scalars)
        before, after = addresses[:RIGHT], addresses[RIGHT + 1 :]
        return launch and (lambda *given: launch(*given[:4], *before, given[4 + number], *after))

    def _lanes(self, batch):
        """Heads that each item has in a batch."""
        return lanes(batch, self._heads, self._units)

    def _grid(self, q):
        """Heads of an item side by side, and items in the dimensions that CUDA limits."""
        layers = max(1, -(-len(self.lists.items) // MOST_ACROSS))
        return self._lanes(q.shape[0]), -(-len(self.lists.items) // layers), layers

    def _arguments(self, q, k, v, out):
        """What the kernel takes after q, k, v and out: memory, sizes, and constants by name."""
        batch = q.shape[0]
        strides = (stride for x in (q, k, v, out) for stride in x.stride()[:3])
        wide = any(launcher.wide(x.shape[2], x.stride(2)) for x in (q, k, v, out))
        memory = [x if x is None else launcher.lasting(x) for x in (*self._held, *self._parts(batch))]
        sizes = (*strides, len(self.lists.items), self._lanes(batch), self._scale_log2)
        return memory, sizes, self._constants | {"WIDE": wide}

    def _parts(self, batch):
        """``(accumulators, statistics, counters)`` of the parts for a batch or a larger one, each stream its own."""
        made, hb = self._scratch.setdefault(self._stream(), []), self._lanes(batch)
        # Counters that a graph set to zero would be so only after its first replay: it takes those of any stream.
        known = itertools.chain(*self._scratch.values()) if launcher.capturing() else made
        if (found := next((parts for most, parts in known if most >= hb), None)) is not None:
            return found
        # At least twice the largest before, so that batches of many sizes take little more than the largest alone.
        hb = max(hb, 2 * made[-1][0] if made else 0)
        floats = {"dtype": torch.float32, "device": self._held[0].device}
        rows, groups = max(1, self.lists.part_rows), max(1, self.lists.groups)
        parts = (
            torch.empty(rows * hb, self._d0 + self._d1, **floats),
            torch.empty(rows * hb, 2, **floats),
            torch.zeros(groups * hb, dtype=torch.int32, device=floats["device"]),
        )
        made.append((hb, parts))
        return parts


def _with_tiles(memory, tiles):
    return (*memory[:RIGHT], tiles, *memory[RIGHT + 1 :])


def _part_records(device, lists):
    # A pointer needs memory even where nothing is split.
    return _to(device, lists.parts if len(lists.parts) else np.zeros((1, len(Part)), np.int32))


def _to(device, array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def masks(lists, common, device: torch.device | str):
    """``(left, right, mask heads)`` as the kernel reads them: factors, intervals or bytes; None for tiles of a bias,
    which calls are given."""
    left = _to(device, lists.left).to(common.dtype)
    if lists.rank == INTERVALS:
        begin, length = lists.intervals & 0xFFFF, lists.intervals >> 16
        bounds = np.stack([begin + (length - 1) / 2, length / 2], 1) * tile_kernel.PER_KEY.value
        return left, _to(device, bounds.astype(np.float32)), 1
    if lists.rank == BYTES:
        flags = np.where(lists.bias_index == MASKED, 255, 0).astype(np.uint8)
        return left, _to(device, flags), 1
    if lists.rank in RANKS:
        factor = tile_kernel.FACTOR_HALF if common.dtype == torch.float16 else tile_kernel.FACTOR
        return left * factor, _to(device, lists.right).to(common.dtype) * -factor, 1
    return left, None, mask_heads(common)


def scratch_bytes(lists, hb, width: int):
    """Bytes that the parts of split items leave for `hb` heads of `width` values, as the kernel has them."""
    return 4 * hb * lists.part_rows * (width + 2)


def signed_scale(common):
    """``(sign, size)`` of the scale; the size of none is 1. Raises `PatternError` beyond `SCALES`."""
    scale = common.head_dim**-0.5 if common.scale is None else common.scale
    if scale and not SCALES[0] <= abs(scale) <= SCALES[1]:
        least, most = (f"{size:.0e}" for size in SCALES)
        raise PatternError(f"scale: expected 0 or a size from {least} to {most} on a GPU, found {scale}")
    return (scale > 0) - (scale < 0), abs(scale) or 1.0


class Executor:
    """A prepared schedule; call it with q, k and v, the values of whose heads lie side by side.

    The first call with tensors of some shapes and strides, on each stream, goes through Triton, which compiles; later
    ones go straight to its C launcher (`launcher`), to the current stream, without synchronising. Calls on several
    streams at once are safe. So is capture in a CUDA graph, after a first call; graphs captured from one executor share
    scratch memory with each other and with its calls: keep it as long as they are replayed, and replay one at a time.

    rounds: the `Launch` of each round, in order. incomplete: some query has no key. source: what it was prepared from.
    table: values of a bias in place of those, see `Valued`; base: itself. backward: what differentiates it, once that
    was asked for; preparing: a lock to hold while it is made.
    """

    def __init__(
        self, rounds, shape: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype, device, incomplete, source
    ):
        self._rounds, self.shape, self.heads, self.head_dim = rounds, shape, heads, head_dim
        self.dtype, self.device, self.incomplete = dtype, device, incomplete
        self.source, self.backward, self.preparing = source, None, Lock()
        self.units, self.base, self.table = source.common.units, self, None
        # Tiles of the bias that it was planned with, made when they are first asked for.
        self._own: Sequence | None = None if any(launch.tiled for launch in self.launches) else ()
        self._stream = launcher.current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream, alignment and size: (whether tensors have its layout, memory for a result, launches).
        self._known, self._lock = launcher.recent(), Lock()
        self._of_tables = tape.Calls(device, self._with_table)

    @property
    def launches(self) -> tuple:
        """Each `Launch`, in order, those of a round together."""
        return tuple(itertools.chain(*self._rounds))

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks held between calls."""
        return sum(launch.memory_bytes for launch in self.launches)

    @property
    def executed(self) -> int:
        """Pairs of query and key that a head works through, padding included."""
        lists = [launch.lists for launch in self.launches]
        total = sum(x.rows * x.step_keys * int(x.items[:, Item.STEPS].sum()) for x in lists)
        return total // (1 if self.units is None else len(self.units.group))

    def peak_bytes(self, batch: int):
        """Most bytes that calls hold beyond their arguments: the result, and what split items leave."""
        result = batch * self.heads * self.shape[0] * self.head_dim * self.dtype.itemsize
        return result + sum(launch.scratch_bytes(batch) for launch in self.launches)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table=None):
        """Attention over the pattern. Raises `PatternError` or `DeviceError` for tensors other than planned.

        table: values [H, T] in place of those of the bias, see `with_bias`.
        """
        if self._several and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(q, k, v, table)
        tiles = self._own
        if tiles is None or table is not None:
            tiles = self._filled(table)
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        # A kernel is compiled for the alignment of its tensors; batches are many, and found at once so.
        key = (self._stream(), at_q & 15, at_k & 15, at_v & 15, q.numel())
        for same, empty, launches in self._known.get(key):
            if launches and same(q, k, v):
                out = empty()
                if self.incomplete:
                    out.zero_()
                at_out, at_tiles = out.data_ptr(), tiles and [x.data_ptr() for x in tiles]
                for launch in launches:
                    launch(at_q, at_k, at_v, at_out, *at_tiles)
                return out
        # Threads compile and store their calls one after the other.
        with self._lock:
            return self._first(key, q, k, v, tiles)

    def of_table(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table):
        """As a call with a `table`, by launches that were taken down where it consists of them."""
        # What writes zeros or copies a table is no launch.
        if self.incomplete or not table.is_contiguous() or table.device != q.device:
            return self(q, k, v, table)
        return self._of_tables(q, k, v, table)[0]

    def _with_table(self, q, k, v, table):
        """``(result,)`` of a call, through Triton where launches are taken down."""
        if launcher.RECORDER.get() is None:
            return (self(q, k, v, table),)
        key = (self._stream(), *(x.data_ptr() & 15 for x in (q, k, v)), q.numel())
        tiles = self._filled(table)
        with self._lock:
            return (self._first(key, q, k, v, tiles),)

    def with_bias(self, table) -> "Valued":
        """This executor with other values of its bias, float [H, T] on its device: see `attention.backends`."""
        return Valued(self, table)

    def _filled(self, table):
        """The tiles of each launch for the values of `table`, or for its own, which are then kept."""
        if table is not None:
            return [launch.tiles(table) for launch in self.launches]
        self._own = [launch.own_tiles() for launch in self.launches]
        return self._own

    def _first(self, key, q, k, v, tiles):
        """Check tensors of a new layout, launch through Triton, and store how to launch directly from then on."""
        expected = {name: getattr(self, name) for name in ("shape", "heads", "head_dim", "dtype", "device")}
        qkv.check(q, k, v, **expected)
        if self.units is not None:
            self.units.check(len(q))
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.stride(3) != 1:
                raise PatternError(f"{name}: expected the values of a head side by side, found stride {x.stride(3)}")
        out = qkv.empty(q, self.shape[0])
        if not len(q):
            return out
        if not self._seen(q, k, v, lambda known: known[1:] == key[1:]):
            _expect_no_capture()
        if self.incomplete:
            out.zero_()
        numbered = iter(enumerate(tiles or itertools.repeat(None)))
        found = (self._side_by_side([(x, *next(numbered)) for x in each], q, k, v, out) for each in self._rounds)
        launches = tuple(itertools.chain(*found))
        if not launcher.capturing() and not self._seen(q, k, v, lambda known: known == key):
            launches = () if None in launches else launches
            self._known.add(key, (qkv.same_layout(q, k, v), qkv.empty_like_result(out), launches))
        return out

    def _side_by_side(self, together, *tensors):
        """Run the launches of a round through Triton; returns what does so directly, see `Launch.direct`.

        together: of each the launch, its number and its tiles of a bias.
        """
        beside, calls = launcher.beside(self.device, len(together) - 1), []
        beside.fork()
        try:
            for (launch, number, tiles), place in zip(together, beside.places, strict=True):
                with place():
                    calls.append(launch.direct(launch(*tensors, tiles), *tensors, number))
        finally:
            # Tensors may be freed once this returns, also where a launch was refused.
            beside.join()
        return beside.around(calls)

    def _seen(self, q, k, v, which):
        """Whether calls with tensors of this layout are stored, under keys that ``which(key)``."""
        return any(same(q, k, v) for key, calls in self._known.items() if which(key) for same, *_ in calls)


class Valued:
    """An executor with other values of its bias, read from a table on its device in each call.

    A call puts them into new memory, by launches on the current stream. Nothing is copied to the host and nothing
    waits, so that values may change between calls, and between the replays of a CUDA graph. Other attributes are those
    of the executor.

    base: the executor. table: the values, float [H, T].
    """

    def __init__(self, base, table):
        self.base, self.table = base, table.detach()

    def __getattr__(self, name: str):
        return getattr(self.base, name)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """Attention over the pattern, see `Executor`."""
        return self.base.of_table(q, k, v, self.table)

"""Executor of schedules on an NVIDIA GPU: one launch of `tile_kernel` for each tile of a round (stage T5).

The launches of a round run side by side, on streams of their own (`launcher.Beside`): each writes rows that no other
reads. Rounds follow one another.
"""

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.attention.blocks import Blocks
from tilewright.attention.blocks.tiles import Tile
from tilewright.attention.cuda import bias_values, config, tile_kernel, tile_lists
from tilewright.attention.cuda.launch import ItemLaunch, mask_heads, records
from tilewright.attention.cuda.tile_lists import Item, TileLists
from tilewright.attention.schedule.record import Schedule, verify_inputs
from tilewright.attention.setting import Setting, setting
from tilewright.attention.units import Units
from tilewright.core.errors import PatternError
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher, tape
from tilewright.devices.cuda.launcher import ALIGNED

# Values of a bias are read from their table in each call, where it is on the device.
READS_TABLES = True
# What is said of a capture that comes first.
REFUSED = "call the plan once with tensors of these shapes and strides before that"


@dataclass(frozen=True, eq=False)
class Source:
    """What an executor was prepared from. used: ``[(Blocks, int ids), …]``, the blocks that its work items are of."""

    common: Setting
    used: list


def prepare(
    schedule: Schedule,
    blocks: dict[str, Blocks],
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    units: Units | None = None,
    **options: Any,
) -> "Executor":
    """Return an `Executor` of `schedule`: ``callable(q [B, H, N_q, D], k, v [B, H, N_k, D]) -> [B, H, N_q, D]``.

    blocks: ``{tile: Blocks}``. device: of the lists. options: row_order, col_order, ordered, bias and scale, see
    `attention.backends`. Pairs with a bias of -inf are not allowed; queries without an allowed pair get zeros.

    Raises `ArtifactError` for blocks of another schedule, `PatternError` for an order, a bias, a head dim or a scale
    that does not fit, `TileError` for a tile too small, and `DeviceError` while a CUDA graph is captured.
    """
    verify_inputs(schedule, blocks)
    launcher.expect_no_capture(REFUSED)
    config.check_head_dim(head_dim)
    shape = next(iter(blocks.values())).shape
    n_rows = shape[0]
    if units is not None:
        shape = n_rows // units.patterns, shape[1]
    common = setting(shape, heads, head_dim, dtype, **options)
    if units is not None:
        common = replace(common, units=units)
    device = torch.empty(0, dtype=torch.int8, device=device).device
    return launcher.lasting_memory(device, _prepared, schedule, blocks, common, shape, device)


def _prepared(schedule, blocks, common, shape, device):
    """The `Executor` of a schedule of `common`, whose patterns have the `shape`."""
    rounds: dict = {}
    batches = np.unique(np.stack([schedule.round, schedule.tile]), axis=1).T.tolist()
    for number, t in batches:
        member = (schedule.round == number) & (schedule.tile == t)
        cover = blocks[schedule.tiles[t]]
        columns = schedule.block[member], schedule.run_lo[member], schedule.run_hi[member]
        form = config.for_tile(cover.tile, common.head_dim, common.dtype)
        build = partial(tile_lists.build, step_keys=form.step_keys, index=index(common))
        lists = lists_of(build, cover, columns, common, shape[0])
        rounds.setdefault(number, []).append(Launch(lists, cover.tile, common, device, form))
    used = [(blocks[schedule.tiles[t]], schedule.tile == t) for t in np.unique(schedule.tile).tolist()]
    written = sum(int(cover.rows[np.unique(schedule.block[member])].sum()) for cover, member in used)
    # A GPU takes the programs of the first launch first: the longest are not to be the last ones.
    launches = tuple(tuple(sorted(each, key=_longest, reverse=True)) for each in rounds.values())
    source = Source(common, [(cover, np.unique(schedule.block[member])) for cover, member in used])
    incomplete = written < next(iter(blocks.values())).shape[0]
    return Executor(launches, shape, common.heads, common.head_dim, common.dtype, device, incomplete, source)


def lists_of(
    build: Callable[..., TileLists], cover: Blocks, columns: Sequence[np.ndarray], common: Setting, n_rows: int
) -> TileLists:
    """The `TileLists` of items `columns` of a `cover`, of all units where there are several patterns of `n_rows` rows.

    build: ``callable(cover, *columns) -> TileLists``.
    """
    units = common.units
    if units is None:
        return build(cover, *columns)
    if common.bias is not None and units.apart:
        # Masks hold the bias, which differs by head: each unit has its own.
        block, run_lo, run_hi = columns
        cover, *columns = units.spread(cover, block, run_lo, run_hi, n_rows)
        units = replace(units, group=tuple(range(len(units.group))))
    return tile_lists.of_units(build(cover, *columns), units, n_rows)


def _longest(launch):
    """Pairs of query and key of the longest item of a launch."""
    return launch.lists.rows * launch.lists.step_keys * int(launch.lists.items[:, Item.STEPS].max(initial=0))


def index(common: Setting) -> Callable | None:
    """Index into the bias table by row and key in the graph's order, or None."""
    if (bias := common.bias) is None:
        return None
    rows, keys = common.natural
    n, units, length = len(rows), common.units, bias.table.shape[1]
    if units is None:
        return lambda row, key: bias.index(rows[row], keys[key])
    if not units.apart:
        return lambda row, key: bias.index(rows[row % n], keys[key])
    # One table of one head holds those of all heads, see `bias_table`.
    return lambda row, key: row // n % units.heads * length + bias.index(rows[row % n], keys[key])


def bias_table(common: Setting, table: Tensor | None = None) -> Tensor:
    """The values of the bias, or those of `table` [H, T], contiguous; [1, H * T] where heads have patterns of their
    own."""
    if table is None:
        table = (
            torch.zeros(1, 1, dtype=torch.float32, device="cpu")
            if common.bias is None
            else common.bias.table.detach().float()
        )
    return table.reshape(mask_heads(common), -1).contiguous()


class Launch(ItemLaunch):
    """Work items of one tile for attention: a call gives q, k, v, memory for the result, and tiles of a bias."""

    kernel = tile_kernel.tilewright_tile_attention
    parameters = tuple(kernel.arg_names)
    GIVEN = "q", "k", "v", "o"
    remedy = "; plan with a smaller tile"

    def __init__(
        self,
        lists: TileLists,
        tile: Tile,
        common: Setting,
        device: torch.device | str,
        form: config.KernelConfig | None = None,
    ):
        """form: that the lists were built for; None for this GPU's."""
        form = form or config.for_tile(tile, common.head_dim, common.dtype)
        super().__init__(lists, form, common, common.taken, device)
        self._tile = tile
        # Where values of a bias stand in its tiles, and the tiles of those that it was planned with, once asked for.
        self._places: bias_values.Tiles | None = None
        self._own: Tensor | None = None

    @property
    def what(self) -> str:
        """The tile, as a refusal names it."""
        return f"tile {self._tile.name}"

    def __call__(self, *tensors: Tensor) -> Any:
        """See `ItemLaunch`. Where no tiles are given, they are those of the bias that it was planned with."""
        if self.tiled and len(tensors) == len(self.GIVEN):
            tensors = *tensors, *[self.own_tiles()] * (1 + self.number)
        return super().__call__(*tensors)

    def tiles(self, table: Tensor | None) -> Tensor:
        """The tiles of these values of the bias [H, T], in new memory.

        The lists that say where values stand are held from the first call on.
        """
        if self._places is None:
            launcher.expect_no_capture(REFUSED)
            self._places = launcher.lasting_memory(self.device, self._placing)
        return self._places(bias_table(self.common, table).to(self.device))

    def own_tiles(self) -> Tensor:
        """The tiles of the bias that it was planned with, made by the first call."""
        if self._own is None:
            launcher.expect_no_capture(REFUSED)
            self._own = launcher.lasting_memory(self.device, self._filled)
        return self._own

    def _filled(self):
        return self._placing()(bias_table(self.common).to(self.device))

    def _placing(self):
        return bias_values.Tiles(self.lists, mask_heads(self.common), self._size, self.device)

    def with_items(self, lists: TileLists) -> "Launch":
        """A launch of other work items over the same keys and masks, which both hold, with the same compiled kernel.

        lists: those of this launch, with other items and parts; it has parts only where this launch has.
        """
        other = copy(self)
        other.lists, other._scratch, other._places, other._own = lists, {}, None, None
        other._held = self._held | records(lists, self.device)
        return other

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks held between calls."""
        own = 0 if self._own is None else self._own.nbytes
        return super().memory_bytes + own + (0 if self._places is None else self._places.memory_bytes)


class Executor:
    """A prepared schedule; call it with q, k and v, the values of whose heads lie side by side.

    The first call with tensors of some shapes and strides, on each stream, goes through Triton, which compiles; later
    ones go straight to its C launcher (`launcher`), to the current stream, without synchronising. Calls on several
    streams at once are safe. So is capture in a CUDA graph, after a first call; graphs captured from one executor share
    scratch memory with each other and with its calls: keep it as long as they are replayed, and replay one at a time.

    rounds: the `Launch` of each round, in order. incomplete: some query has no key. source: what it was prepared from.
    table: values of a bias in place of those, see `Valued`; base: itself. backward: what differentiates it, once that
    was asked for; preparing: a lock to hold while it is made. known, joints: of tensors that were launched on
    directly, see `backends.Executor`.
    """

    def __init__(
        self,
        rounds: tuple[tuple[Launch, ...], ...],
        shape: tuple[int, ...],
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        incomplete: bool,
        source: Source,
    ):
        self._rounds, self.shape, self.heads, self.head_dim = rounds, shape, heads, head_dim
        for number, launch in enumerate(self.launches):
            launch.number = number
        self.dtype, self.device, self.incomplete = dtype, device, incomplete
        self.source, self.preparing = source, Lock()
        self.backward: Any = None
        self.units, self.base, self.table = source.common.units, self, None
        # Tiles of the bias that it was planned with, made when they are first asked for.
        self._own: Sequence | None = None if any(launch.tiled for launch in self.launches) else ()
        self._stream = launcher.current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream, alignment and size: (whether tensors have its layout, memory for a result, launches, the layout,
        # its call, see `known`).
        self._known, self._lock = launcher.recent(), Lock()
        self._of_tables = tape.Calls(device, self._with_table)
        self.known, self.joints = qkv.Seen.NOTHING, qkv.Seen()

    @property
    def joint(self) -> tuple:
        """See `backends.Executor`."""
        return self.joints.last

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
        return sum(launch.executed for launch in self.launches) // (1 if self.units is None else len(self.units.group))

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that calls hold beyond their arguments: the result, and what split items leave."""
        result = batch * self.heads * self.shape[0] * self.head_dim * self.dtype.itemsize
        return result + sum(launch.scratch_bytes(batch) for launch in self.launches)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
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
        for same, empty, launches, _, call in self._known.get(key):
            if launches and same(q, k, v):
                if call is not None and table is None:
                    self.known = same, call, False
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

    def of_table(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        """As a call with a `table`, by launches that were taken down where it consists of them."""
        # What writes zeros or copies a table is no launch.
        if self.incomplete or not table.is_contiguous() or table.device != q.device:
            return self(q, k, v, table)
        return self._of_tables(q, k, v, table)[0]

    def again(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor | None:
        """`of_table` for tensors like those of the last such call, else None."""
        found = self._of_tables.last(q, k, v, table)
        return None if found is None else found[0]

    def _with_table(self, q, k, v, table):
        """``(result,)`` of a call, through Triton where launches are taken down."""
        if launcher.RECORDER.get() is None:
            return (self(q, k, v, table),)
        key = (self._stream(), *(x.data_ptr() & 15 for x in (q, k, v)), q.numel())
        tiles = self._filled(table)
        with self._lock:
            return (self._first(key, q, k, v, tiles),)

    def with_bias(self, table: Tensor) -> "Valued":
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
                raise PatternError(
                    f"{name}: expected stride 1 in the last dimension, found {x.stride(3)}; pass {name}.contiguous()"
                )
        out = qkv.empty(q, self.shape[0])
        if not len(q):
            return out
        # Whether gradients are recorded matters to no kernel: graphs are captured of copies that need none.
        layout = qkv.layout(q, k, v)
        if not any(known[1:] == key[1:] and layout in (x[3] for x in calls) for known, calls in self._known.items()):
            launcher.expect_no_capture(REFUSED)
        if self.incomplete:
            out.zero_()
        tensors = q, k, v, out, *(tiles or ())
        found = [launcher.side_by_side(self.device, each, tensors) for each in self._rounds]
        launches = tuple(itertools.chain(*found))
        if not launcher.capturing() and not any(same(q, k, v) for same, *_ in self._known.get(key)):
            launches = () if None in launches else launches
            empty = qkv.empty_like_result(out)
            plain = launches and tiles is self._own and not any(key[1:4])
            call = _of_three(self._again(key[0], empty, launches)) if plain else None
            self._known.add(key, (qkv.same_layout(q, k, v), empty, launches, layout, call))
        return out

    def join(self, x: Tensor) -> None:
        """Make launches on the queries, keys and values of `x` known as those on itself, see `backends.Executor`."""
        on, step = self._stream(), self.heads * self.head_dim * x.itemsize
        at = (x.data_ptr() + i * step for i in range(3))
        key = (on, *(each & (ALIGNED - 1) for each in at), x.numel() // 3)
        given = qkv.split(x, self.heads)
        found = next((each for each in self._known.get(key) if each[4] is not None and each[0](*given)), None)
        if found is not None:
            empty = qkv.empty_like_result(x.new_empty((*x.shape[:2], x.shape[2] // 3)))
            launch = self._again(on, empty, found[2])
            joint = lambda x: launch(at := x.data_ptr(), at + step, at + 2 * step)  # noqa: E731
            self.joints.add(qkv.same_layout(x), joint, size=x.numel())

    def _again(self, on, empty, launches):
        """``callable(addresses of q, k, v)``: the result on the stream `on`, None elsewhere. It does not hold this."""
        stream, incomplete, index = self._stream, self.incomplete, self.device.index if self._several else None
        # Of the bias that it was planned with.
        at_tiles = [x.data_ptr() for x in self._own or ()]

        def launched(at_q, at_k, at_v):
            if (at_q | at_k | at_v) & (ALIGNED - 1) or stream() != on:
                return None
            if index is not None and torch.cuda.current_device() != index:
                return None
            out = empty()
            if incomplete:
                out.zero_()
            at_out = out.data_ptr()
            for launch in launches:
                launch(at_q, at_k, at_v, at_out, *at_tiles)
            return out

        return launched


def _of_three(launch):
    return lambda q, k, v: launch(q.data_ptr(), k.data_ptr(), v.data_ptr())


class Valued:
    """An executor with other values of its bias, read from a table on its device in each call.

    A call puts them into new memory, by launches on the current stream. Nothing is copied to the host and nothing
    waits, so that values may change between calls, and between the replays of a CUDA graph. Other attributes are those
    of the executor.

    base: the executor. table: the values, float [H, T].
    """

    def __init__(self, base: Executor, table: Tensor):
        self.base, self.table = base, table.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the pattern, see `Executor`."""
        return self.base.of_table(q, k, v, self.table)

"""Gradients of a schedule on an NVIDIA GPU: one launch for those of the queries, one for those of keys and values.

The first gives each query's log-sum-exp to the second (`backward_kernels`). Lists are made with the first backward of
an executor, see `backward_lists`. Memory beyond the gradients: two floats for each query, and what the parts of split
items leave. All sums have one order, so that no two calls differ.
"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from tilewright.attention.cuda import (
    backward_kernels,
    backward_lists,
    bias_gradients,
    bias_values,
    config,
    executor,
    tile_lists,
)
from tilewright.attention.cuda.launch import ItemLaunch, mask_heads, signed_scale
from tilewright.attention.cuda.tile_lists import Item, TileLists
from tilewright.attention.setting import Setting
from tilewright.core.errors import PatternError
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher, tape

# What is said of a capture that comes first.
REFUSED = "differentiate the plan once with tensors of these shapes and strides before that"


def gradients(
    forward: executor.Executor | executor.Valued, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv)`` of ``out = forward(q, k, v)`` for the gradient `grad` [B, H, N_q, D] of `out`, contiguous.

    forward: an `executor.Executor`. Raises `DeviceError` while a CUDA graph is captured, unless a call with tensors of
    these shapes and strides came before.
    """
    return prepared(forward)(q, k, v, out, grad, forward.table)


def prepared(forward: executor.Executor | executor.Valued) -> "Backward":
    """The `Backward` of an executor, for all values of its bias, made when it is first asked for."""
    base = forward.base
    if base.backward is None:
        with base.preparing:
            if base.backward is None:
                base.backward = launcher.lasting_memory(base.device, Backward, base)
    return base.backward


def gradients_with_bias(
    forward: executor.Executor | executor.Valued, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, d_table)`` of an executor with a bias: d_table float32 [H, T], the sums over an entry's pairs.

    Otherwise as `gradients`.
    """
    return prepared(forward).of_bias(q, k, v, out, grad, forward.table)


def narrow(lists: TileLists) -> bool:
    """Whether a kernel of keys may have 32 queries a step of these `TileLists`.

    ASSUME: with masks in bytes, or with a loop over full steps beside one over masked steps, the assembler serialises
    the products of some of these kernels, and of fewer with 64 (triton 3.7, sm_90a, head dim 64).
    """
    return lists.rank != tile_lists.BYTES and not (lists.full and lists.partial)


class Backward:
    """The prepared backward of an executor. The first call with tensors of some layout compiles, later ones do not."""

    def __init__(self, forward: executor.Executor):
        """Make the lists of `forward`."""
        launcher.expect_no_capture(REFUSED)
        source, self._forward = forward.source, forward
        common, (n_q, n_k), device = source.common, forward.shape, forward.device
        n_patterns = 1 if common.units is None else common.units.patterns
        seen_by = backward_lists.transposed(source.used, (n_patterns * n_q, n_k))
        seeing = seen_by.T.tocsr()
        if common.units is not None:
            seen_by = sparse.vstack([seeing[g * n_q : (g + 1) * n_q].T for g in range(n_patterns)], format="csr")
        rows, keys = common.taken
        of_queries = _listed(seeing, n_q, executor.index(common), common)
        of_keys = _listed(seen_by, n_k, _by_key(common, n_k), common, narrowed=True)
        wide = partial(config.for_backward, head_dim=common.head_dim, dtype=common.dtype)
        if any(not narrow(lists) and form != wide(lists.rows) for lists, form in of_keys):
            others = _listed(seen_by, n_k, _by_key(common, n_k), common)
            of_keys = [x if narrow(x[0]) else y for x, y in zip(of_keys, others, strict=True)]
        self._halves: dict[str, list] = {
            "queries": [QueryLaunch(lists, form, common, (rows, keys), device) for lists, form in of_queries],
            "keys": [KeyLaunch(lists, form, common, (keys, rows), device) for lists, form in of_keys],
        }
        for half in self._halves.values():
            # A GPU takes the programs of the first launch first: the longest are not to be the last ones.
            half.sort(key=lambda launch: launch.lists.items[:, Item.STEPS].max(), reverse=True)
        for number, launch in enumerate(itertools.chain(*self._halves.values())):
            launch.number = number
        # Values of the bias that the plan was made with, made when they are first asked for; none without a bias.
        self._own: Any = () if common.bias is None else None
        self._valued: Any = None
        self._all_see, self._all_seen = (bool((np.diff(x.indptr) > 0).all()) for x in (seeing, seen_by))
        self._stream = launcher.current_stream(device)
        self._of_bias: Any = None
        # By stream, alignment and size: (whether tensors have its layout, launches, the layout).
        self._known, self._lock = launcher.recent(), Lock()
        # Calls with a table, by whether its gradient is asked for. What writes zeros is no launch.
        self._launches_all = self._all_see and self._all_seen
        self._of_tables = {of: tape.Calls(device, partial(self._made, of)) for of in (False, True)}

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks held between calls."""
        own, places = sum(x.nbytes for x in self._own or ()), self._valued
        held = 0 if places is None else places.memory_bytes
        return own + held + sum(launch.memory_bytes for launch in itertools.chain(*self._halves.values()))

    @property
    def launches(self) -> dict[str, list]:
        """The launches of both kernels by what their rows are, ``queries`` first, then ``keys``."""
        return self._halves

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``(dq, dk, dv)``, contiguous. Raises `PatternError` or `DeviceError` for tensors other than planned.

        table: values [H, T] in place of those of the bias, on the device, which are read in each call.
        """
        return self._again(False, q, k, v, out, grad, table)

    def of_bias(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``(dq, dk, dv, d_table)``, the last float32 [H, T]. Raises as a call does."""
        if not len(q):
            bias = self._forward.source.common.bias
            assert bias is not None
            return *self(q, k, v, out, grad, table), torch.zeros(bias.table.shape, dtype=torch.float32, device=q.device)
        *found, sums = self._again(True, q, k, v, out, grad, table)
        return *found, self._of_bias.of_table(sums)

    def _again(self, of_bias, q, k, v, out, grad, table):
        """What `_made` returns, by launches that were taken down where it consists of them."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        placed = table is not None and table.is_contiguous() and table.device == q.device
        made = self._of_tables[of_bias] if placed and self._launches_all else partial(self._made, of_bias)
        return made(q, k, v, out, grad, table)

    def _made(self, of_bias, q, k, v, out, grad, table):
        """``(dq, dk, dv)``, with the sums of `bias_gradients` where they are asked for."""
        launches, common, device = self._halves["queries"], self._forward.source.common, self._forward.device
        tensors = self._run(q, k, v, out, grad, table)
        if not of_bias:
            return tensors[5:8]
        if self._of_bias is None:
            launcher.expect_no_capture(REFUSED)
            with self._lock:
                made = partial(bias_gradients.BiasGradients, launches, common, device)
                self._of_bias = launcher.lasting_memory(device, made)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return *tensors[5:8], self._of_bias(launches, tensors)

    def values(self, table: Tensor | None = None) -> tuple[Tensor, ...]:
        """What launches take of a bias: ``(greatest of each query, tiles of each launch, …)``; nothing without one.

        table: as of a call. Two calls of one table have the same.
        """
        if table is None and self._own is not None:
            return self._own
        common, device, places = self._forward.source.common, self._forward.device, self._valued
        if places is None:
            launcher.expect_no_capture(REFUSED)
            launches = itertools.chain(*self._halves.values())
            made = partial(_Values, list(launches), common, self._forward.shape[0], device)
            places = launcher.lasting_memory(device, made)
            if table is not None:
                self._valued = places
        if table is not None:
            return places(executor.bias_table(common, table).to(device))
        launcher.expect_no_capture(REFUSED)
        self._own = launcher.lasting_memory(device, lambda: places(executor.bias_table(common).to(device)))
        return self._own

    def _run(self, q, k, v, out, grad, table):
        """Launch; returns `tensors`."""
        device = self._forward.device
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self._run(q, k, v, out, grad, table)
        given = q, k, v, out, grad
        tensors = self.tensors(*given, table)
        addresses = [x.data_ptr() for x in tensors]
        key = (self._stream(), *(at & 15 for at in addresses), q.numel())
        for same, launches, _ in self._known.get(key):
            if launches and same(*given) and launcher.RECORDER.get() is None:
                for launch in launches:
                    launch(*addresses)
                return tensors
        # Threads compile and store their calls one after the other.
        with self._lock:
            self._first(key, given, tensors)
        return tensors

    def tensors(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What launches take: these, memory for their gradients, for the numbers of each query, and `values`."""
        n_q, n_k = self._forward.shape
        dq, dk, dv = (q.new_empty(*q.shape[:2], n, q.shape[3]) for n in (n_q, n_k, n_k))
        stats = torch.empty(2, len(q) * self._forward.heads, n_q, dtype=torch.float32, device=q.device)
        if not self._all_see:
            dq.zero_()
            # Blocks may hold queries without keys: what is read of them must be a number.
            stats.zero_()
        if not self._all_seen:
            dk.zero_()
            dv.zero_()
        return q, k, v, out, grad, dq, dk, dv, *stats, *self.values(table)

    def _first(self, key, given, tensors):
        """Check tensors of a new layout, launch through Triton, and store how to launch directly from then on."""
        self._check(*given)
        if not len(given[0]):
            return
        # Whether gradients are recorded matters to no kernel.
        layout = qkv.layout(*given)
        if not any(known[1:] == key[1:] and layout in (x[2] for x in calls) for known, calls in self._known.items()):
            launcher.expect_no_capture(REFUSED)
        # Keys take what the launches of queries leave.
        found = [launcher.side_by_side(self._forward.device, half, tensors) for half in self._halves.values()]
        launches = [*itertools.chain(*found)]
        if not launcher.capturing() and not any(same(*given) for same, *_ in self._known.get(key)):
            launches = [] if None in launches else launches
            self._known.add(key, (qkv.same_layout(*given), launches, layout))

    def _check(self, q, k, v, out, grad):
        names = ("shape", "heads", "head_dim", "dtype", "device")
        expected = {name: getattr(self._forward, name) for name in names}
        qkv.check(q, k, v, **expected)
        if self._forward.units is not None:
            self._forward.units.check(len(q))
        for name, x in (("out", out), ("grad", grad)):
            if (x.shape, x.dtype, x.device) != ((*q.shape[:2], self._forward.shape[0], q.shape[3]), q.dtype, q.device):
                raise PatternError(
                    f"{name}: expected the shape, dtype and device of the result, found {tuple(x.shape)}, {x.dtype}, "
                    f"{x.device}"
                )
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            if x.stride(3) != 1:
                raise PatternError(
                    f"{name}: expected stride 1 in the last dimension, found {x.stride(3)}; pass {name}.contiguous()"
                )


def _listed(pattern, n_rows, index, common, narrowed=False):
    """``[(TileLists, KernelConfig), …]`` that cover the rows of a pattern, of `n_rows` rows or several of them."""

    def form(tile):
        return config.for_backward(tile.rows, common.head_dim, common.dtype, narrowed)

    made = backward_lists.as_graph(pattern, pattern.shape[0] // n_rows)
    arranged = partial(executor.lists_of, common=common, n_rows=n_rows)
    found = backward_lists.build(made, lambda tile: form(tile).step_keys, index, arranged)
    return [(lists, form(tile)) for tile, lists in found]


def _by_key(common, n_keys):
    """As `executor.index`, of lists whose rows are keys."""
    if (bias := common.bias) is None:
        return None
    (rows, keys), units, length = common.natural, common.units, bias.table.shape[1]

    def index(key, row):
        at = bias.index(rows[row], keys[key % n_keys])
        # As in `executor.bias_table`.
        return at if units is None or not units.apart else key // n_keys % units.heads * length + at

    return index


class _Values:
    """Puts the values of a table where the launches of a backward read them; made once, for all values."""

    def __init__(self, launches, common, n_queries, device):
        heads = mask_heads(common)
        size = signed_scale(common)[1]
        of_queries = [isinstance(launch, QueryLaunch) for launch in launches]
        self._tiles = [
            bias_values.Tiles(launch.lists, heads, size, device, relative)
            for launch, relative in zip(launches, of_queries, strict=True)
        ]
        self._device, self._peaks = (
            device,
            [x.peaks if of else 0 for x, of in zip(self._tiles, of_queries, strict=True)],
        )
        units = common.units
        # Rows of the greatest bias of each query: heads, of all images where patterns are theirs.
        lanes = common.heads if units is None or units.by == "head" else len(units.group)
        lanes *= common.heads if units is not None and units.by == "image" else 1
        # Queries without a key take any value.
        source = np.zeros((lanes, n_queries), np.int64)
        before = np.cumsum(self._peaks) - self._peaks
        for launch, begin in zip((x for x in launches if isinstance(x, QueryLaunch)), before, strict=False):
            launch.find_peaks(common, heads, int(begin), source)
        self._spread = bias_values.Spread(source, device)

    @property
    def memory_bytes(self):
        """Bytes of lists held between calls."""
        return self._spread.memory_bytes + sum(x.memory_bytes for x in self._tiles)

    def __call__(self, table):
        """``(greatest of each query, tiles of each launch, …)`` for a contiguous table [mask heads, T]."""
        n = sum(self._peaks)
        greatest = torch.empty(max(1, n), dtype=torch.float32, device=self._device)
        parts = greatest.split([*self._peaks, max(1, n) - n])
        tiles = [put(table, part if n else None) for put, part, n in zip(self._tiles, parts, self._peaks, strict=False)]
        return self._spread(greatest), *tiles


class _Launch(ItemLaunch):
    """Work items of one tile and one kernel of a backward."""

    GIVEN = "q", "k", "v", "o", "g", "dq", "dk", "dv", "lse", "delta", "peak"

    @property
    def what(self) -> str:
        """The launch, as a refusal names it."""
        return f"backward of {self.lists.rows} rows"


class QueryLaunch(_Launch):
    """Work items whose rows are queries."""

    kernel = backward_kernels.tilewright_query_gradients
    parameters = tuple(kernel.arg_names)

    # What `bias_gradients` takes.

    def images(self, batch: int) -> int:
        """Images of a batch that each item has."""
        units = self.common.units
        return batch if units is None or units.by == "head" else 1

    def tiles(self, tensors: Sequence[Tensor]) -> Tensor:
        """float32 [tiles, mask heads, M, N] of a call: relative to the greatest of each row, over the scale."""
        return tensors[len(self.GIVEN) + self.number]

    def find_peaks(self, common: Setting, heads: int, begin: int, source: np.ndarray) -> None:
        """Write to `source`, int64 [lanes, N_q], where the greatest bias of each query of these lists stands.

        They stand by family, heads of tiles and rows from `begin` on, see `bias_values.Tiles`.
        """
        lists, units = self.lists, common.units
        items = lists.items.astype(np.int64)
        m = np.arange(lists.rows)
        there = m < items[:, Item.ROWS, None]
        row = self.held("row_ptr").cpu().numpy()[(items[:, Item.FIRST_ROW, None] + m)[there]]
        family = lists.family[items[:, Item.MASK_STEP]]
        # The first head of an item, and further ones as far as tiles tell them apart.
        first = np.zeros(len(items), np.int64) if units is None else items[:, len(Item)]
        for h in range(heads):
            at = begin + ((family * heads + h) * lists.rows)[:, None] + m
            lane = np.broadcast_to((first + h)[:, None], there.shape)
            source[lane[there], row] = at[there]


class KeyLaunch(_Launch):
    """Work items whose rows are keys."""

    kernel = backward_kernels.tilewright_key_gradients
    parameters = tuple(kernel.arg_names)
    sums = 2

"""Torch's own attention as what a plan runs, where it is faster than tiles (stages T3 to T5).

A *form* is a way of torch's dense kernel to compute a pattern:

``masked``: all pairs, with a mask in floats where some are not allowed.
``compacted``: the queries that have keys, over the keys that some query sees; with a mask where that is not dense.
``windows``: disjoint windows of equal size, as a batch.
``products``: what is compacted, or all pairs, where that is dense and small: two products and a softmax, on a CPU.

They are timed beside the tiles (`times`), chosen by `schedule.choose`, and executed as `backends.Executor` describes.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tilewright import devices
from tilewright.attention import backends
from tilewright.attention.masks import ItemMasks
from tilewright.attention.profile import DTYPES
from tilewright.attention.schedule.record import choose
from tilewright.attention.setting import Setting, setting
from tilewright.attention.units import Units
from tilewright.core import timing
from tilewright.core._internals import attention_gradients, attention_with_lse
from tilewright.core.errors import PatternError
from tilewright.devices import qkv
from tilewright.devices.cpu.workers import in_any_state, on_one_core, unusual
from tilewright.torch_attention import ALIGNED, patterns

if TYPE_CHECKING:
    from tilewright.attention.blocks import Blocks
    from tilewright.attention.schedule import Schedule
    from tilewright.graph import Graph

NAMES = ("masked", "compacted", "windows", "products")
# ASSUME: a mask may take a quarter of a gigabyte as floats, as those of tiles on a CPU.
MASK_BYTES = 1 << 28
# Pairs of all heads that are products. Of twice as many, torch's kernel takes as long.
PRODUCTS = 1 << 17
# Pairs of a mask whose bias is looked up pair by pair.
BIAS_PAIRS = 1 << 24
# A form that cannot be faster than tiles, by the least that its pairs take, is not timed. ASSUME: a core (False), and a
# multiprocessor (True), computes no more operations in a second, by the bytes of a number. Dense kernels reached 70 G
# in float32 on a core, 3.2 T in bfloat16 on a multiprocessor of an H200.
_PER_SECOND = {False: {4: 1e11, 2: 1e12}, True: {4: 5e11, 2: 5e12}}
# Tiles are predicted to take more than this share of the least time of a form that is timed. Times that are closer than
# this are measured again, in turns.
_NEAR = 0.7
# A call of fewer operations runs on the calling thread alone: to share them among two cores took 6 to 9 µs, and what is
# less than this took longer so.
_ALONE = 1e6
# How forms are timed, in how many turns, and by how many times as long as tiles one takes that is timed once.
_EFFORT: dict[str, Any] = {"min_reps": 20, "max_seconds": 0.05, "rse_target": 0.03}
_TURNS, _FAR = 3, 4
# In turns, calls of ten milliseconds run often enough to be told apart while another process takes the cores.
_LONGER = _EFFORT | {"max_seconds": 0.15}


_ALL: "weakref.WeakSet[Executor]" = weakref.WeakSet()


def _forget() -> None:
    """In a fork, calls run on one core: `in_any_state` says why."""
    for each in _ALL:
        each.seen.clear()
        each.joints.clear()


os.register_at_fork(after_in_child=_forget)


class Unprepared:
    """In place of an `Executor` before the first call."""

    known = joint = qkv.Seen.NOTHING

    def again(self, *_: Any) -> None:
        """Nothing is known."""


@dataclass(frozen=True)
class Form:
    """A form over a pattern, in the order of its graph.

    rows: int [n, M], the queries of each of n windows; keys: int [n, K]. dense: a window's queries see all its keys.
    empty: some query of it has no key. products: without torch's kernel.
    """

    rows: NDArray[np.int64]
    keys: NDArray[np.int64]
    dense: bool
    empty: bool
    products: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of query and key that a head works through."""
        return self.rows.size * self.keys.shape[1]


def forms(graph: "Graph", units: Units | None = None) -> dict[str, Form]:
    """The forms of a pattern, by name, tokens in the order of `graph`; of several patterns, `graph` holds them one
    above the other."""
    n, n_k = 1 if units is None else units.patterns, graph.n_cols
    seeing, seen = (np.diff(graph.indptr)[graph.row_id] > 0).reshape(n, -1), np.zeros(n_k, bool)
    seen[graph.indices] = True
    rows, keys = np.flatnonzero(seeing.any(0))[None], np.flatnonzero(seen)[None]
    everything = np.arange(seeing.shape[1])[None], np.arange(n_k)[None]
    found = {"masked": Form(*everything, graph.entries == seeing.size * n_k, not seeing.all())}
    if rows.size < seeing.shape[1] or keys.size < n_k:
        found["compacted"] = Form(rows, keys, graph.entries == n * rows.size * keys.size, not seeing[:, rows[0]].all())
    small = found.get("compacted", found["masked"])
    if small.dense and small.pairs <= PRODUCTS:
        found["products"] = replace(small, products=True)
    owner = patterns.windows(graph) if units is None else None
    if owner is not None:
        in_turn = [np.argsort(of, kind="stable").reshape(graph.n_distinct, -1) for of in (graph.row_id, owner)]
        found["windows"] = Form(in_turn[0], in_turn[1], True, False)
    return found


def able(form: Form, *, device: str, heads: int, dtype: torch.dtype, biased: bool, units: Units | None = None) -> bool:
    """Whether a form may run on a `device` of this kind; biased: with a bias.

    Products of 16 bits would round the scores. On a GPU a form takes no bias, whose values would be rounded to the type
    of the queries, and no query without a key, of which its kernels make what they like.
    """
    on_gpu = devices.facts(device).CUDA
    if on_gpu and (biased or form.empty):
        return False
    if form.products and (on_gpu or biased or dtype != torch.float32 or form.pairs * heads > PRODUCTS):
        return False
    masks = (heads if biased else 1) * (1 if units is None else len(units.group))
    masked = biased or not form.dense
    return not masked or (4 * form.pairs * masks <= MASK_BYTES and not (biased and form.pairs > BIAS_PAIRS))


def times(
    graph: "Graph",
    *,
    device: str,
    heads: int,
    head_dim: int,
    dtype: str,
    own_us: float,
    units: Units | None = None,
    bias: Any = None,
    seed: int = 0,
) -> dict[str, float]:
    """Microseconds of a call of each form of `graph`, a batch of one, that may be faster than tiles in `own_us`.

    On a GPU none is timed while a CUDA graph is captured, nor in float32, which torch's kernels may round.
    """
    on_gpu = devices.facts(device).CUDA
    if on_gpu and (dtype == DTYPES[0] or torch.cuda.is_current_stream_capturing()):
        return {}
    typed = getattr(torch, dtype)
    n_q = graph.n_rows // (1 if units is None else units.patterns)
    batch = 1 if units is None else units.images or 1
    orders = {} if graph.row_order is None else {"row_order": graph.row_order[:n_q], "col_order": graph.col_order}
    options: dict[str, Any] = {"device": device, "heads": heads, "units": units}
    runs = {
        name: prepare(name, graph, **options, head_dim=head_dim, dtype=typed, **orders, bias=bias)
        for name, form in forms(graph, units).items()
        if able(form, dtype=typed, biased=bias is not None, **options)
        and _NEAR * least_us(form.pairs * heads * head_dim * batch, typed, device) < own_us
    }
    if not runs:
        return {}
    given = _drawn(graph, device, heads, head_dim, typed, units, seed)
    found = _timed(runs, given, own_us, on_gpu)
    if "products" in runs and heads > 1:
        # Products are made by head, and copied where queries stand by token: either layout counts as much.
        by_head = _timed(runs, [x.contiguous() for x in given], own_us, on_gpu)
        found = {name: (us + by_head[name]) / 2 for name, us in found.items()}
    return found


def in_turns(
    schedule: "Schedule",
    blocks: "dict[str, Blocks]",
    graph: "Graph",
    *,
    device: str,
    heads: int,
    head_dim: int,
    dtype: str,
    units: Units | None = None,
    bias: Any = None,
    seed: int = 0,
) -> dict[str, float]:
    """`Schedule.torch_us`, of its fastest form by what that and the tiles take in turns, where predictions are close.

    Its time is that which is predicted for the tiles, times the ratio that is measured.
    """
    known, own_us = schedule.torch_us or {}, schedule.tiles_us
    best = min(known, key=lambda name: known[name], default="")
    if not best or not _NEAR < known[best] / own_us < 1 / _NEAR:
        return known
    typed, n_q = getattr(torch, dtype), graph.n_rows // (1 if units is None else units.patterns)
    options: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "dtype": typed, "bias": bias}
    options |= {} if units is None else {"units": units}
    options |= {} if graph.row_order is None else {"row_order": graph.row_order[:n_q], "col_order": graph.col_order}
    given = _drawn(graph, device, heads, head_dim, typed, units, seed)
    calls = [
        partial(executor(choose(schedule, of), blocks, graph, device=device, **options), *given)
        for of in ({best: 0.0}, {})
    ]
    with torch.no_grad():
        if devices.facts(device).CUDA:
            times = [each.p50_us for each in timing.time_in_turns(calls, gpu=True, **_EFFORT, turns=_TURNS)]
        else:
            times = _undisturbed_us(calls, _LONGER)
    return known | {best: own_us * times[0] / times[1]}


def _drawn(graph, device, heads, head_dim, dtype, units, seed):
    """Random q, k and v on a device of this kind, of one image, or of as many as have patterns; the heads of a token
    are adjacent, as networks have them."""
    batch = 1 if units is None else units.images or 1
    n_q, place = graph.n_rows // (1 if units is None else units.patterns), devices.facts(device).TORCH_DEVICE
    like: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(seed), "dtype": torch.float32}
    sizes = n_q, graph.n_cols, graph.n_cols
    drawn = [torch.randn(batch, n, heads, head_dim, **like, device="cpu") for n in sizes]
    return [x.to(place, dtype).transpose(1, 2) for x in drawn]


def least_us(operations: int, dtype: torch.dtype, device: str) -> float:
    """The least that products and sums of `operations` = pairs × channels take, twice, for scores and results."""
    rate = _PER_SECOND[devices.facts(device).CUDA][dtype.itemsize]
    return 4 * operations / rate / devices.describe(device)["threads"] * 1e6


@torch.no_grad()
def _timed(runs, given, own_us, on_gpu):
    """Microseconds of a call of each of `runs` by name; of one that takes far more than `own_us`, those of one call."""
    calls = {name: partial(run.ready(*given)[1], *given) for name, run in runs.items()}
    if on_gpu:
        return {name: timing.time_gpu(call, **_EFFORT).p50_us for name, call in calls.items()}
    found = {name: min(_once_us(call), _once_us(partial(on_one_core, call))) for name, call in calls.items()}
    near = [name for name in calls if found[name] < _FAR * own_us]
    return found | dict(zip(near, _undisturbed_us([calls[name] for name in near]), strict=True))


def _once_us(call):
    once: dict[str, Any] = {"min_reps": 1, "max_seconds": 0.0, "rse_target": 1.0, "warmups": 0, "fewest": 1}
    return timing.time_call(call, **once).p50_us


def _undisturbed_us(calls, effort=_EFFORT):
    """Microseconds of each call on a CPU, the first quintile: on all cores, or on one where that takes less.

    An operator that is shared waits for the slowest core. While another process has it, that takes a hundred times as
    long, and says nothing of later calls.
    """
    alone = [partial(on_one_core, call) for call in calls]
    times = [each.p20_us for each in timing.time_together([*calls, *alone], **effort)]
    return [min(pair) for pair in zip(times[: len(calls)], times[len(calls) :], strict=True)]


def executor(
    schedule: "Schedule", blocks: "dict[str, Blocks]", graph: "Graph", *, device: str, **options: Any
) -> "backends.Executor":
    """The executor of what a schedule runs on a `device` of this kind: of its work list, or of a form of `graph`.

    options: as of ``prepare`` in `attention.backends`.
    """
    if schedule.form is None:
        return backends.executor(device).prepare(schedule, blocks, **options)
    return prepare(schedule.form, graph, device=device, **options)


@in_any_state
def prepare(
    name: str,
    graph: "Graph",
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    units: Units | None = None,
    **options: Any,
) -> "Executor":
    """The `Executor` of the form `name` of `graph`; options: as of ``prepare`` in `attention.backends`.

    Raises `PatternError` for a form that the pattern does not have.
    """
    shape = graph.n_rows // (1 if units is None else units.patterns), graph.n_cols
    common = setting(shape, heads, head_dim, dtype, **options)
    known = forms(graph, units)
    if name not in known:
        raise PatternError(f"torch's attention: expected a form of this pattern, of {', '.join(known)}; found {name}")
    form, facts = known[name], devices.facts(device)
    # In the order of their places in q, k and v: where that is all of them, none is moved.
    rows, keys = (
        np.take_along_axis(of, np.argsort(at[of], axis=1, kind="stable"), axis=1)
        for of, at in zip((form.rows, form.keys), common.taken, strict=True)
    )
    queries, seen = (at[of].ravel() for of, at in zip((rows, keys), common.taken, strict=True))
    masks = None if form.dense and common.bias is None else _masks(graph, rows, keys, common)
    made = Executor(
        name=name,
        windows=len(rows),
        queries=_index(queries, shape[0]),
        keys=_index(seen, shape[1]),
        back=_index(np.argsort(queries), shape[0]) if len(queries) == shape[0] else None,
        shape=shape,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(facts.TORCH_DEVICE),
        scale=common.scale,
        units=units,
        executed=form.pairs,
        products=form.products,
        masks=None if common.bias is None else masks,
    )
    made = made if masks is None else replace(made, mask=made.spread(masks))
    if not facts.CUDA:
        return made
    from tilewright.devices.cuda import launcher

    launcher.expect_no_capture("call the plan once before that")
    place = torch.device(facts.TORCH_DEVICE, facts.current())
    return launcher.lasting_memory(place, made.moved, place)


def _index(places, size):
    """Places of tokens as an index; None where all tokens stand as they are."""
    if np.array_equal(places, np.arange(size)):
        return None
    # A CPU gathers by 32-bit indices in half the time.
    return torch.from_numpy(places.astype(np.int32))


def _masks(graph, rows, keys, common: Setting):
    """`ItemMasks` of each of the windows [n, M] × [n, K], or of each of several patterns, with keys padded."""
    allowed = np.zeros((graph.n_distinct, graph.n_cols), bool)
    allowed[graph.entry_row_id, graph.indices] = True
    of_pattern = graph.row_id.reshape(-1, len(common.natural[0]))
    n = max(len(rows), len(of_pattern))
    rows, keys, of_pattern = (np.broadcast_to(of, (n, of.shape[1])) for of in (rows, keys, of_pattern))
    # Bits of whole bytes.
    missing = -keys.shape[1] % 8
    bits = np.stack(
        [
            np.packbits(np.pad(allowed[row_id[row]][:, key], ((0, 0), (0, missing))), axis=1, bitorder="little")
            for row_id, row, key in zip(of_pattern, rows, keys, strict=True)
        ]
    )
    tokens = common.natural[0][rows], np.pad(common.natural[1][keys], ((0, 0), (0, missing)))
    return ItemMasks(bits, np.arange(n)[:, None], *tokens, common.bias)


@dataclass(eq=False)
class Executor:
    """A form of torch's attention that is ready to be called with q, k and v, see `backends.Executor`.

    queries, keys: int32, places of the tokens that are attended, window by window; None for all as they stand. back:
    the place of each query's result among those, None where they stand in it or some have none. mask: floats that
    broadcast to [windows, H, M, K], or [B, H, M, K]. masks: what the mask is made of where it has a bias.
    """

    name: str
    windows: int
    queries: Tensor | None
    keys: Tensor | None
    back: Tensor | None
    shape: tuple[int, int]
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None
    units: Units | None
    executed: int
    products: bool
    masks: ItemMasks | None = None
    mask: Tensor | None = None
    on_gpu: bool = False
    seen: qkv.Seen = field(init=False, repr=False, default_factory=qkv.Seen)
    joints: qkv.Seen = field(init=False, repr=False, default_factory=qkv.Seen)

    def __post_init__(self) -> None:
        """Calls may be known from now on."""
        _ALL.add(self)

    @property
    def known(self) -> tuple:
        """See `backends.Executor`."""
        return self.seen.last

    @property
    def joint(self) -> tuple:
        """See `backends.Executor`."""
        return self.joints.last

    @property
    def launches(self) -> Sequence[str]:
        """One, of torch's kernel."""
        return (f"torch:{self.name}",)

    @property
    def memory_bytes(self) -> int:
        """Bytes of indices and masks held between calls."""
        held = [x for x in (self.queries, self.keys, self.back, self.mask) if x is not None]
        own = 0 if self.masks is None else self.masks.held_bytes
        return own + sum(x.untyped_storage().nbytes() for x in held)

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that a call holds beyond its arguments: moved tokens, results, and a mask for each image."""
        per_token = batch * self.heads * self.head_dim * self.dtype.itemsize
        mask = 0 if self.mask is None or self.windows == 1 else batch * self.mask.numel() * self.mask.element_size()
        return 2 * (self.shape[0] + self.shape[1]) * per_token + mask

    def spread(self, masks: ItemMasks) -> Tensor:
        """The mask of all windows, or of all heads and images, from those of the distinct ones."""
        mask = masks.take(torch.from_numpy(masks.ids if masks.size > 1 else masks.ids[:1]))[0]
        if self.units is not None and masks.size > 1:
            group = torch.tensor(self.units.group)
            group = group[:, None] if self.units.by == "image" else group.view(-1, self.heads)
            of_head = torch.arange(self.heads) if masks.heads > 1 else torch.zeros(1, dtype=torch.int64)
            mask = mask[group, of_head]
        return mask[..., : (self.shape[1] if self.keys is None else len(self.keys)) // self.windows]

    def moved(self, device: torch.device) -> "Executor":
        """This executor on a GPU, whose kernels take masks of the type of the queries alone, with aligned rows."""
        tables = {name: getattr(self, name) for name in ("queries", "keys", "back")}
        tables = {name: x if x is None else x.to(device) for name, x in tables.items()}
        mask = None
        if self.mask is not None:
            n_keys = self.mask.shape[-1]
            mask = F.pad(self.mask, (0, -n_keys % ALIGNED)).to(device, self.dtype)[..., :n_keys]
        return replace(self, device=device, on_gpu=True, mask=mask, **tables)

    @in_any_state
    def with_bias(self, table: Tensor) -> "Executor":
        """This executor with other values of its bias, float32 [H, T]: see `attention.backends`."""
        assert self.masks is not None
        masks = self.masks.with_table(table)
        return replace(self, masks=masks, mask=self.spread(masks))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the pattern. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        _, call, as_queries = self.ready(q, k, v)
        return qkv.by_token(call(q, k, v)) if as_queries else call(q, k, v)

    def ready(self, q: Tensor, k: Tensor, v: Tensor) -> tuple:
        """What is `known` of such tensors. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        # To compare layouts takes a tenth of the time of the checks, which is a third of that of a small call.
        known = self.known
        if known[0](q, k, v):
            return known
        if isinstance(q, Tensor) and (found := self.seen.find(q, k, v)) is not None:
            return found
        self._check(q, k, v)
        return self.seen.add(qkv.same_layout(q, k, v), *self._prepared(q, k, v), size=q.numel())

    def again(self, *_: Any) -> None:
        """Values of a bias make another executor."""

    def join(self, x: Tensor) -> None:
        """Make calls with the queries, keys and values of `x` known as those with itself, see `backends.Executor`."""
        heads = self.heads
        _, call, as_queries = self.ready(*qkv.split(x, heads))
        if not as_queries:
            joint = lambda x: call(*qkv.split(x, heads)).transpose(1, 2).flatten(2)  # noqa: E731
            self.joints.add(qkv.same_layout(x), joint, size=x.numel())

    def _check(self, q, k, v):
        sizes: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        qkv.check(q, k, v, shape=self.shape, **sizes, device=self.device)
        if self.units is not None:
            self.units.check(len(q))

    def _prepared(self, q, k, v):
        """``(callable(q, k, v), as queries)``: a call for tensors of this layout, which were checked, and whether its
        result may have the layout of queries whose heads lie one after the other."""
        batch, mask = len(q), self._of_batch(len(q))
        if self.products:
            attend = partial(_by_products, q.new_empty(1), self.head_dim**-0.5 if self.scale is None else self.scale)
        else:
            given: Any = {"scale": self.scale, "attn_mask": mask}
            attend = partial(F.scaled_dot_product_attention, **{name: x for name, x in given.items() if x is not None})
        # Of itself it holds nothing: a cycle would keep masks in memory.
        windows, queries, keys, back, n_q = self.windows, self.queries, self.keys, self.back, self.shape[0]
        in_place = windows == 1 and queries is None
        as_queries = in_place and q.is_contiguous()
        move_k, move_v = (_by_layout(x, keys, self.on_gpu) for x in (k, v))
        promised: set[tuple[int, ...]] = set()

        def run_by_token(q, k, v):
            if in_place:
                out = attend(q, k, v) if keys is None else attend(q, move_k(k), move_v(v))
            else:
                taken = _taken(q, queries, windows), _taken(k, keys, windows), _taken(v, keys, windows)
                out = _returned(attend(*taken), q, queries, back, windows, n_q)
            # To ask whether it is contiguous takes a microsecond.
            if out.stride() not in promised:
                if not out.transpose(1, 2).is_contiguous():
                    return qkv.empty(out, n_q).copy_(out)
                promised.add(out.stride())
            return qkv.own(out)

        def run_as_queries(q, k, v):
            return (attend(q, k, v) if keys is None else attend(q, move_k(k), move_v(v))).data

        run = run_as_queries if as_queries else run_by_token
        small = not self.on_gpu and 4 * batch * self.executed * self.heads * self.head_dim < _ALONE
        call = partial(on_one_core, run) if small else run
        # The state of later calls is the same: tensors under autocast have another layout, and forks forget.
        return in_any_state(call, self.device.type) if unusual(self.device.type) else call, as_queries

    def _of_batch(self, batch):
        """The mask for a `batch`: windows of an image follow one another."""
        if self.mask is None or self.windows == 1 or batch == 1 or len(self.mask) == 1:
            return self.mask
        return self.mask.repeat(batch, 1, 1, 1)

    @property
    def differentiates(self) -> bool:
        """Whether this executor has `gradients`: on a CPU."""
        return not self.on_gpu

    @in_any_state
    def gradients(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """``(dq, dk, dv)`` of ``out = self(q, k, v)`` for the gradient `grad` of `out`, by torch's own operators."""
        places = self.queries, self.keys, self.keys
        given = [_taken(x, at, self.windows) for x, at in zip((q, k, v), places, strict=True)]
        mask = self._of_batch(len(q))
        made, logs = attention_with_lse(*given, attn_mask=mask, scale=self.scale)
        found = attention_gradients(
            _taken(grad, self.queries, self.windows), *given, made, logs, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return tuple(self._put(x, like, at) for x, like, at in zip(found, (q, k, v), places, strict=True))

    def _put(self, x, like, places):
        """Gradients of what `_taken` gave of a tensor as those of the tensor."""
        if self.windows > 1:
            x = x.transpose(1, 2).unflatten(0, (len(like), -1)).flatten(1, 2).transpose(1, 2)
        return x if places is None else torch.zeros_like(like).index_copy_(2, places.long(), x)


def _taken(x, places, windows):
    """[B, H, N, D] → [B * windows, H, N / windows, D] of the tokens at `places`."""
    if windows == 1:
        return x if places is None else x.index_select(2, places)
    # The heads of a token are moved together.
    tokens = x.transpose(1, 2) if places is None else x.transpose(1, 2).index_select(1, places)
    return tokens.unflatten(1, (windows, -1)).flatten(0, 1).transpose(1, 2)


def _by_layout(x, places, on_gpu):
    """``callable(x)``: the tokens [B, H, n, D] at `places` of tensors of the layout of `x`."""
    batch, heads, n, width = x.shape
    if heads > 1 and x.transpose(1, 2).is_contiguous():
        # The heads of a token are moved together, in a third of the time.
        return lambda x: x.transpose(1, 2).index_select(1, places).transpose(1, 2)
    if heads > 1 and x.is_contiguous() and not on_gpu and places is not None:
        # Rows of one matrix, in a third of the time, too.
        rows = (torch.arange(batch * heads, device=places.device)[:, None] * n + places).flatten()
        return lambda x: x.view(-1, width).index_select(0, rows).view(batch, heads, -1, width)
    return lambda x: x.index_select(2, places)


def _returned(out, q, queries, back, windows, n_q):
    """The inverse of `_taken` for results: those of queries without keys are zeros."""
    if windows > 1:
        out = out.transpose(1, 2).unflatten(0, (len(q), -1)).flatten(1, 2).transpose(1, 2)
    if back is not None:
        return out.transpose(1, 2).index_select(1, back).transpose(1, 2)
    if queries is None or out.shape[2] == n_q:
        return out
    return qkv.empty(q, n_q).zero_().index_copy_(2, queries.long(), out)


def _by_products(nothing, scale, q, k, v):
    """Attention over all pairs, without torch's kernel."""
    queries, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(nothing, queries, keys.mT, beta=0, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values).unflatten(0, q.shape[:2])

"""How slice lists lie on a device: tensors of a fixed layout, which a CUDA graph can capture.

A *slice* is `rows` consecutive queries of one head, a group, with a list of the keys that it attends to. The stride of
lists is fixed: no prefix sum over groups, no shapes that depend on data. Source: `FG-Attn`, arXiv 2509.16518; the
layout is ours.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright import graph
from tilewright.core import arguments
from tilewright.core.errors import DeviceError, PatternError
from tilewright.core.transforms import values

# Keys that a kernel takes in a step. Lists end at a multiple of it.
STEP = 64
# Fields of `SliceLists.state`: a list that did not fit, a group without keys, the keys listed in low and high 31 bits.
OVERFLOW, EMPTY, LISTED, LISTED_HIGH, STATE = range(5)
# Queries of a group: those of one tensor-core product at least.
FEWEST_ROWS, MOST_ROWS = 16, 128
# Head dims that the kernels are made and measured for.
HEAD_DIMS = (64, 128)
# The count of a group whose shares are NaN: larger than any capacity.
UNKNOWN = 2**30
# The count of groups whose batch entry has a number of keys that is out of range, likewise.
NO_LENGTH = UNKNOWN + 1
# Keys to a word of `SliceLists.pack`.
WORD = 32
# The count of a list of keys that are not there or not ascending: it exceeds every capacity.
INVALID = 2**31 - 1


# Keys, counts, order and state of `SliceLists`.
Lists = tuple[Tensor, Tensor, Tensor, Tensor]


class Layout(NamedTuple):
    """Shapes of the lists of one attention call; `make_layout` makes them.

    Parameters
    ----------
    batch, heads : int
        Batch entries B and heads H.
    queries, keys : int
        Numbers N_q, without queries of text, and N_k.
    rows : int
        Queries of a group, M, a power of two.
    capacity : int
        Keys that a group's list has room for: a multiple of `STEP` and of `width`, at most N_k rounded up to a multiple
        of `STEP`.
    width : int
        Keys of a run, a power of two: lists hold whole aligned runs, of which the last one may be short.
    first, last : int
        Tokens of text at the beginning and at the end. As queries they are in no group and attend to all keys.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    rows: int
    capacity: int
    width: int = 1
    first: int = 0
    last: int = 0

    @property
    def tokens(self) -> int:
        """Queries in all, N_q."""
        return self.first + self.queries + self.last

    @property
    def grouped(self) -> slice:
        """Which of all queries are in groups."""
        return slice(self.first, self.first + self.queries)

    @property
    def text(self) -> tuple[slice, ...]:
        """Which of all queries are text: a range for each place that has some."""
        ranges = (slice(0, self.first), slice(self.grouped.stop, self.tokens))
        return tuple(taken for taken in ranges if taken.start < taken.stop)

    @property
    def groups(self) -> int:
        """Groups of a head, G; the last one may be short."""
        return -(-self.queries // self.rows)

    @property
    def words(self) -> int:
        """Words that hold a bit for each key."""
        return -(-self.keys // WORD)


def make_layout(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    rows: int = 128,
    budget: float = 1.0,
    width: int = 1,
    text: tuple[int, int] = (0, 0),
) -> Layout:
    """Shapes of the lists of an attention call, with room for a share of the keys.

    Parameters
    ----------
    batch, heads : int
        Batch entries B and heads H.
    queries, keys : int
        Numbers N_q and N_k, with those of text.
    rows : int
        Queries of a group, a power of two from 16 to 128.
    budget : float
        Share of the keys, in (0, 1], that a group's list has room for.
    width : int
        Keys of a run, a power of two: lists hold whole aligned runs. 1 lists single keys.
    text : (int, int)
        Tokens of text at the beginning and at the end. They attend to all keys and are in no group.

    Returns
    -------
    Layout

    Raises
    ------
    PatternError
        For sizes that are no layout.

    Examples
    --------
    >>> from tilewright import slices
    >>> layout = slices.make_layout(1, 2, 4096, 4096, rows=128, budget=0.1)
    >>> layout.groups, layout.capacity
    (32, 448)
    """
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "rows": rows, "width": width}
    sizes = {name: arguments.whole(name, value, error=PatternError) for name, value in sizes.items()}
    batch, heads, queries, keys, rows, width = sizes.values()
    if not FEWEST_ROWS <= rows <= MOST_ROWS or rows & (rows - 1):
        raise PatternError(f"rows: expected a power of two from {FEWEST_ROWS} to {MOST_ROWS}, found {rows}")
    if not 1 <= width <= MOST_ROWS or width & (width - 1):
        raise PatternError(f"width: expected a power of two from 1 to {MOST_ROWS}, found {width}")
    if not is_share(budget):
        raise PatternError(f"budget: expected a share of the keys in (0, 1], found {arguments.shown(budget)}")
    first, last = arguments.sizes("text", text, 2, PatternError, least=0)
    if first + last >= min(queries, keys):
        raise PatternError(
            f"text: expected tokens at the beginning and at the end that leave some of {queries} queries and {keys} "
            f"keys, found {first} and {last}"
        )
    capacity = min(rounded(math.ceil(budget * keys), max(STEP, width)), rounded(keys))
    return Layout(batch, heads, queries - first - last, keys, rows, capacity, width, first, last)


def is_share(value: Any) -> bool:
    """Whether a value is a number in (0, 1]."""
    found = arguments.real(value)
    return found is not None and 0 < found <= 1


def rounded(keys: int, step: int = STEP) -> int:
    """So many keys, rounded up to a multiple of `step`."""
    return -(-keys // step) * step


def share_of(keys: int, total: int) -> float:
    """`keys` as a share of `total`, at most 1, rounded up to a thousandth, so that a budget of it holds them."""
    return min(1.0, math.ceil(1000 * keys / total) / 1000)


def with_tails(keys: Tensor, counts: Tensor) -> Tensor:
    """Lists [.., capacity] whose places from `counts` [..] on repeat the last key; any key in lists without one."""
    last = keys.gather(-1, (counts - 1).clamp(0, keys.shape[-1] - 1).long()[..., None])
    return torch.where(torch.arange(keys.shape[-1], device=keys.device) < counts[..., None], keys, last)


@dataclass(frozen=True)
class SliceLists:
    """Lists of the keys that each group of queries attends to, on one device, contiguous.

    Parameters
    ----------
    layout : Layout
        Shapes of the lists.
    keys : Tensor
        int32 [B, H, G, capacity], ascending in each group. The tail up to the next multiple of `STEP` repeats the last
        key, so that loads need no mask; the rest is not defined.
    counts : Tensor
        int32 [B, H, G], keys of each group. A count above the capacity marks a list that did not fit: it holds the
        first keys, and every result is NaN.
    order : Tensor
        int32 [B, H, G], the groups of each head by descending number of keys.
    state : Tensor
        int32 [STATE]: group number + 1 (flat over B, H, G) of a list that did not fit, 0 for none; the same for a group
        without keys; the number of listed keys, in units of 1 and of 2**31.
    lengths : Tensor, optional
        int32 [B], keys of each batch entry from the first one on that queries of text attend to and lists may hold.
        None for all keys.
    """

    layout: Layout
    keys: Tensor
    counts: Tensor
    order: Tensor
    state: Tensor
    lengths: Tensor | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> Lists:
        """keys, counts, order and state, as executors and operators take them."""
        return self.keys, self.counts, self.order, self.state

    def density(self) -> Tensor:
        """Share of the pairs of a query and a key that are listed.

        Returns
        -------
        Tensor
            float32 [B, H], on the device.
        """
        layout = self.layout
        listed = self.counts.clamp(max=layout.capacity)
        # The last group may be short.
        pairs = listed.sum(-1) * layout.rows - listed[..., -1] * (layout.groups * layout.rows - layout.queries)
        of_text = layout.keys if self.lengths is None else self.lengths[:, None]
        pairs = (pairs + (layout.first + layout.last) * of_text).float()
        return pairs / (layout.tokens * layout.keys)

    def pack(self) -> Tensor:
        """Pack the lists to a bit for each group and key, which `unpack` reads.

        Returns
        -------
        Tensor
            int32 [B, H, G, words + 1]. Key j is the bit ``j % 32`` of the word ``j // 32``. The last word of a group is
            its number of keys.
        """
        return torch.ops.tilewright.slices_pack(self.keys, self.counts, [*self.layout])

    def check(self, allow_empty: bool = False) -> None:
        """Wait for the device and check that all lists fit.

        Parameters
        ----------
        allow_empty : bool
            Allow groups without keys.

        Raises
        ------
        PatternError
            For a list that did not fit, and for a group without keys; the message names the group.
        """
        state = values("check: expected lists of one batch", self.state)
        if state[OVERFLOW]:
            b, h, g = self._place(state[OVERFLOW])
            asked = int(self.counts[b, h, g])
            if asked == INVALID:
                raise PatternError(
                    f"keys: expected keys from 0 to {self.layout.keys - 1}, ascending, and as many as counted, found "
                    f"others in group {g} of head {h}, batch entry {b}"
                )
            if asked == NO_LENGTH:
                raise PatternError(
                    f"lengths: expected 1 to {self.layout.keys} first keys, and a mask that leaves them alone in, "
                    f"found others for batch entry {b}"
                )
            if asked == UNKNOWN:
                raise PatternError(
                    f"q, k: expected finite values, found others for group {g} of head {h}, batch entry {b}"
                )
            most = int(self.counts.where(self.counts < UNKNOWN, 0).max())
            raise PatternError(
                f"budget: expected at most {self.layout.capacity} keys a group, found {asked} in group {g} of head {h},"
                f" batch entry {b}; a budget of {share_of(most, self.layout.keys):.3f} holds the lists of all groups"
            )
        if state[EMPTY] and not allow_empty:
            b, h, g = self._place(state[EMPTY])
            raise PatternError(f"expected every group to have a key, found none in group {g} of head {h}, entry {b}")

    def graph(self, b: int, h: int) -> "graph.Graph":
        """The pattern of a head, on the host.

        Parameters
        ----------
        b, h : int
            Batch entry and head.

        Returns
        -------
        Graph

        Raises
        ------
        PatternError
            For lists that did not fit.
        """
        self.check(allow_empty=True)
        counts = self.counts[b, h].cpu().numpy()
        keys = self.keys[b, h].cpu().numpy()
        listed = np.arange(keys.shape[1]) < counts[:, None]
        indptr = np.concatenate([[0], counts.cumsum(dtype=np.int64)])
        row_id = np.arange(self.layout.queries, dtype=np.int32) // self.layout.rows
        found = keys[listed]
        if self.layout.text:
            # One more distinct row: that of all keys.
            row_id = np.pad(row_id, (self.layout.first, self.layout.last), constant_values=self.layout.groups)
            length = self.layout.keys if self.lengths is None else int(self.lengths[b])
            indptr = np.append(indptr, indptr[-1] + length)
            found = np.concatenate([found, np.arange(length, dtype=found.dtype)])
        return graph.from_distinct_rows(indptr, found, row_id, self.layout.keys)

    def _place(self, number):
        """``(b, h, g)`` of a group number + 1."""
        return tuple(map(int, np.unravel_index(number - 1, self.counts.shape)))


def check_inputs(layout: Layout, keys: Tensor, counts: Tensor, order: Tensor, state: Tensor, **inputs: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` unless lists are of `layout` and q, k, v are tensors that they are for.

    inputs: q [B, H, N_q, D], k and v [B, H, N_k, D], and ``out``, where a result is to be written.
    """
    check_lists(layout, keys=keys, counts=counts, order=order, state=state)
    q = inputs["q"]
    for name, x in inputs.items():
        n = layout.queries if name in ("q", "out") else layout.keys
        expected = (layout.batch, layout.heads, n, q.shape[-1])
        if x.ndim != 4 or tuple(x.shape) != expected:
            shape = ", ".join(map(str, (*expected[:3], "D" if x is q else expected[3])))
            raise PatternError(f"{name}: expected shape ({shape}) as the lists are laid out, found {tuple(x.shape)}")
    check_qkv(keys.device, **inputs)


def check_tokens(**inputs: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` unless q [B, H, N_q, D], k and, where it is given, v [B, H, N_k, D] are
    tensors that lists can be made for, on the device of q."""
    q, k = inputs["q"], inputs["k"]
    for name, x in inputs.items():
        if x.ndim != 4 or not x.numel() or (*x.shape[:2], x.shape[3]) != (*q.shape[:2], q.shape[3]):
            raise PatternError(f"{name}: expected shape (B, H, N, D), B, H and D as of q, found {tuple(x.shape)}")
    if (v := inputs.get("v")) is not None and v.shape != k.shape:
        raise PatternError(f"v: expected shape {tuple(k.shape)}, as of k, found {tuple(v.shape)}")
    check_qkv(q.device, **inputs)


def check_lengths(lengths: Tensor, q: Tensor) -> Tensor:
    """The numbers of keys of batch entries as executors take them, int32. Raises `PatternError` or `DeviceError` unless
    `lengths` are int [B] on the device of q."""
    wanted = isinstance(lengths, Tensor) and lengths.dtype in (torch.int32, torch.int64)
    if not wanted or lengths.shape != q.shape[:1]:
        raise PatternError(
            f"lengths: expected int32 or int64 of shape ({q.shape[0]},), found {arguments.shown(lengths)}"
        )
    if lengths.device != q.device:
        raise DeviceError(f"lengths: expected a tensor on {q.device}, as q, found {lengths.device}")
    return lengths.int().contiguous()


def check_qkv(device: torch.device, **inputs: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` for q, k, v or ``out`` of types or head dims that no kernel takes."""
    q = inputs["q"]
    for name, x in inputs.items():
        if x.dtype != q.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise PatternError(
                f"{name}: expected float32, float16 or bfloat16, the same for q, k and v, found {x.dtype}"
            )
        if x.device != device:
            raise _elsewhere(name, device, x)
        if x.stride(-1) != 1:
            raise PatternError(
                f"{name}: expected stride 1 in the last dimension, found {x.stride(-1)}; pass {name}.contiguous()"
            )
    if q.shape[-1] not in HEAD_DIMS:
        raise PatternError(f"q: expected a head dim of {' or '.join(map(str, HEAD_DIMS))}, found {q.shape[-1]}")
    if (out := inputs.get("out")) is not None:
        for name, x in inputs.items():
            if name != "out" and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                raise PatternError(f"out: expected memory that no input uses, found the memory of {name}")


def check_lists(layout: Layout, **lists: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` for tensors of `SliceLists`, by their names, that are not of `layout`."""
    groups = (layout.batch, layout.heads, layout.groups)
    shapes = {"keys": (*groups, layout.capacity), "counts": groups, "order": groups, "state": (STATE,)}
    device = next(iter(lists.values())).device
    for name, x in lists.items():
        if tuple(x.shape) != shapes[name] or x.dtype != torch.int32 or not x.is_contiguous():
            raise PatternError(
                f"{name} of the lists: expected contiguous int32 of shape {shapes[name]}, found {x.dtype} of "
                f"{tuple(x.shape)}, strides {x.stride()}"
            )
        if x.device != device:
            raise _elsewhere(name, device, x)


def _elsewhere(name, device, x):
    return DeviceError(f"{name}: expected a tensor on {device}, as the lists are, found {x.device}")

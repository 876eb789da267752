"""Additive masks of work items: minus infinity for pairs that are not allowed, else the bias (stages T3 to T5).

Items with equal masks share one. Masks are held packed, as bits or as indices into a bias table. They are expanded to
floats once where they fit a memory limit, else for a few items at a time. A pair with a bias of -inf is not allowed.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from tilewright.core.errors import PatternError

# Pairs for which a bias index is evaluated at a time.
_SLAB_PAIRS = 1 << 22
# The largest bias of a row is taken off its scores above this size only. Below, float32 scores lose less than two more
# binary digits than scores of that size lose anyway.
_NEAR = 32.0
# Row b: the eight additive mask values of byte b, least bit first.
_BYTE_VALUES = torch.from_numpy(
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype("f4")
)


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias that is read from a table, such as a relative-position bias.

    Parameters
    ----------
    table : Tensor
        Floats [H, T].
    index : callable
        ``index(rows, cols) -> int array`` of the shape that rows and cols broadcast to, arrays of token numbers in the
        pattern's own order. Values are from 0 to T - 1 wherever the pattern allows the pair.
    """

    table: torch.Tensor
    index: Callable[[Any, Any], Any]


def as_bias(bias: Bias | ArrayLike | None, heads: int, shape: tuple[int, ...]) -> Bias | None:
    """A `Bias` from a `Bias`, a dense tensor [H, N_q, N_k] or None. Raises `PatternError` for another shape."""
    if bias is None:
        return None
    if not isinstance(bias, Bias):
        dense = bias if isinstance(bias, torch.Tensor) else torch.as_tensor(bias, device="cpu")
        if tuple(dense.shape) != (heads, *shape):
            raise PatternError(
                f"bias: expected shape {(heads, *shape)}, which is (heads, N_q, N_k), found {tuple(dense.shape)}"
            )
        bias = Bias(dense.reshape(heads, -1), lambda rows, cols: rows * np.int64(shape[1]) + cols)
    if bias.table.ndim != 2 or bias.table.shape[0] != heads:
        raise PatternError(f"bias table: expected shape ({heads}, T), found {tuple(bias.table.shape)}")
    return bias


class ItemMasks:
    """Masks of n items padded to M rows and K keys, equal ones shared.

    ids: int64 array [n], the mask of each item. size: distinct masks. has_keys: bool [n, M], rows with an allowed key.
    """

    def __init__(self, bits: np.ndarray, run_ids: np.ndarray, rows: np.ndarray, keys: np.ndarray, bias: Bias | None):
        """Build the packed form.

        bits: uint8 [m, M, W/8], bit masks of runs. run_ids: int [n, runs], the mask of each run; -1 for a full run and
        -2 for none. rows [n, M], keys [n, K]: natural token numbers, read with a `bias` only.
        """
        full, none = (np.full_like(bits[:1], 255, shape=(1, *bits.shape[1:])), np.zeros((1, *bits.shape[1:]), np.uint8))
        distinct, self.ids = distinct_rows(run_ids)
        packed = np.concatenate([bits, none, full])[distinct].swapaxes(1, 2)
        packed = np.ascontiguousarray(packed).reshape(len(distinct), bits.shape[1], -1)
        self.has_keys = np.asarray(packed.any(2))[self.ids]
        self._table: Any = None
        self._floats: Any = None
        self._peaks: Any = None
        if bias is not None:
            packed, self.ids = _bias_indices(packed, self.ids, rows, keys, bias)
        self._packed = torch.from_numpy(packed)
        if bias is not None:
            self._fill(bias.table.detach().cpu().float())

    def _fill(self, table):
        """Take the values of `table`, float32 [H, T]."""
        self._table = torch.cat([table, table.new_full((len(table), 1), -torch.inf)], 1)
        step = max(1, _SLAB_PAIRS // (self._packed[0].numel() * self.heads))
        peaks = torch.cat([self._expand(part).amax(-1) for part in self._packed.split(step)])
        peaks[peaks.abs() <= _NEAR] = 0
        self._peaks = peaks if peaks.any() else None

    def with_table(self, table: torch.Tensor) -> "ItemMasks":
        """The same masks with the values of another bias `table`, float32 [H, T]; indices are shared."""
        made = copy.copy(self)
        made._fill(table)
        if self._floats is not None:
            made.expand()
        return made

    @property
    def size(self) -> int:
        """Distinct masks."""
        return len(self._packed)

    @property
    def heads(self) -> int:
        """Heads with masks of their own: 1 without a bias."""
        return 1 if self._table is None else len(self._table)

    @property
    def entries(self) -> int:
        """Values of a head in the bias table; 0 without a bias."""
        return 0 if self._table is None else self._table.shape[1] - 1

    @property
    def float_bytes(self) -> int:
        """Bytes of one mask as floats."""
        per_element = 8 * 4 if self._table is None else self.heads * 4
        return self._packed[0].numel() * per_element

    @property
    def held_bytes(self) -> int:
        """Bytes held between calls."""
        held = (self._packed, self._floats, self._peaks)
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def expand(self) -> None:
        """Hold all masks as floats from now on."""
        self._floats = _lowered(self._expand(self._packed), self._peaks)

    def take(self, ids: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(masks, peaks)`` of n masks `ids` (int64 tensor, or a slice, which copies none): additive masks, float32
        [n, heads, M, K], and what was taken off each row, [n, heads, M], or None for nothing.

        Scores would lose their last digits to a bias far from zero, so that the largest bias of a row is taken off it.
        The peak of a row without an allowed key is -inf.
        """
        peaks = _selected(self._peaks, ids)
        if self._floats is None:
            return _lowered(self._expand(_selected(self._packed, ids)), peaks), peaks
        return _selected(self._floats, ids), peaks

    def places(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """Of masks with a bias: where the values of n masks `ids` stand in its table, int32 [n, M, K], T for pairs that
        are not allowed."""
        return _selected(self._packed, ids)

    def _expand(self, packed):
        n, rows = packed.shape[:2]
        if self._table is None:
            return _BYTE_VALUES.index_select(0, packed.flatten().int()).view(n, 1, rows, -1)
        bias = self._table.index_select(1, packed.flatten())
        return bias.view(self.heads, n, rows, -1).transpose(0, 1).contiguous()


def _selected(held, ids):
    if held is None:
        return None
    return held[ids] if isinstance(ids, slice) else held.index_select(0, ids)


def _lowered(masks, peaks):
    """Masks [n, h, M, K] less the `peaks` [n, h, M] of their rows."""
    return masks if peaks is None else masks - peaks.masked_fill(peaks == -torch.inf, 0)[..., None]


def distinct_rows(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(distinct rows, index of each row among them)`` of an int array [n, c]."""
    whole = np.ascontiguousarray(array).view(np.dtype((np.void, array.dtype.itemsize * array.shape[1]))).ravel()
    _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    return array[first], inverse


def _bias_indices(packed, ids, rows, keys, bias):
    """Distinct bias indices, int32 [u, M, K], T where a pair is not allowed; and the index of each item among them."""
    seen: dict = {}
    held: list = []
    none = bias.table.shape[1]
    number = np.empty(len(ids), np.int64)
    step = max(1, _SLAB_PAIRS // (rows.shape[1] * keys.shape[1]))
    for lo in range(0, len(ids), step):
        item = slice(lo, lo + step)
        allowed = np.unpackbits(packed[ids[item]], axis=2, bitorder="little").astype(bool)
        index = np.broadcast_to(bias.index(rows[item, :, None], keys[item, None, :]), allowed.shape)
        index = np.where(allowed, index, none)
        # Padded rows repeat real ones: an index outside the table comes from the caller.
        if index.min() < 0 or index[allowed].max(initial=0) >= none:
            raise PatternError(
                f"bias index: expected 0..{none - 1} for allowed pairs, found {index.min()}..{index[allowed].max()}"
            )
        for i, values in enumerate(index.astype(np.int32), start=lo):
            digest = hashlib.blake2b(values, digest_size=16).digest()
            number[i] = seen.setdefault(digest, len(held))
            if number[i] == len(held):
                held.append(values)
    return np.stack(held), number

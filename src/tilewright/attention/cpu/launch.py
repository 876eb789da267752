"""One launch: work items of one shape on gathered tokens. The executor runs it and T3 times it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import devices
from tilewright.attention.masks import ItemMasks, distinct_rows
from tilewright.core import _internals

if TYPE_CHECKING:
    from tilewright.attention.blocks import Blocks
    from tilewright.attention.setting import Setting

# A chunk touches this many times the second-level cache of its core, or those of all cores that share it. Measured with
# ViL masks on two cores with 1 MB each: from one to two times, within 5 % of each other; at eight, up to 40 % slower.
_CACHE_SHARE = 2


@dataclass(frozen=True, eq=False)
class Launch:
    """Work items of one shape, in chunks that fit a cache.

    chunks: items that are gathered and attended in one call. n_rows: rows that are written, padded ones included.
    row_of, position_of: int64, the query (in the graph's order) and the written row of each result; padding has none.
    split: results are parts, with log-sum-exps. together: all cores share each operator of a chunk, else a chunk is one
    worker's. memory_bytes: of indices and masks, held between calls.
    """

    chunks: tuple
    heads: int
    scale: float | None
    split: bool
    together: bool
    n_rows: int
    row_of: np.ndarray
    position_of: np.ndarray
    masks: ItemMasks | None
    memory_bytes: int

    def attend(
        self,
        chunk: "_Chunk",
        tokens: tuple[Tensor, Tensor, Tensor],
        entries: tuple[int, int],
        out: Tensor,
        begin: int,
        stats: Tensor,
    ) -> None:
        """Attend the items of `chunk` for the batch entries ``entries = (first, end)``.

        tokens: q, k, v [B, N, H*D]. Results are written to the rows of out [B, R, H*D] from `begin` on. Of parts, the
        same rows of stats [B, R, 2, H] get the log-sum-exps of masks less their peaks, and these peaks: -inf for a row
        without an allowed key.
        """
        (b, e), end = entries, begin + len(chunk.rows)
        n, n_rows = (e - b) * chunk.items, len(chunk.rows)
        queries = self._split_heads(take(tokens[0], chunk.rows, b, e), n)
        keys, values = (self._gather(x, chunk, b, e) for x in tokens[1:])
        ids = chunk.mask_ids
        taken = (None, None) if self.masks is None or ids is None else self.masks.take(ids)
        mask, peaks = (_repeat(x, e - b) for x in taken)
        result, logs = _attend(queries, keys, values, mask, self.scale, self.split)
        out[b:e, begin:end] = result.transpose(1, 2).reshape(e - b, n_rows, -1)
        if self.split:
            logs, peaks = torch.broadcast_tensors(logs, logs.new_zeros(1) if peaks is None else peaks)
            both = torch.stack((logs, peaks)).permute(1, 3, 0, 2)
            stats[b:e, begin:end] = both.reshape(e - b, n_rows, 2, -1)

    def chunk_bytes(self, head_bytes: int) -> int:
        """Most bytes that a chunk holds: gathered tokens of `head_bytes` a head, results, and masks as floats."""
        return max(
            chunk.entries * 2 * (len(chunk.rows) + len(chunk.keys)) * self.heads * head_bytes
            + (0 if self.masks is None else self.masks.float_bytes * chunk.n_masks)
            for chunk in self.chunks
        )

    def _gather(self, tokens, chunk, b, e):
        """Keys or values of `chunk` for batch entries ``b..e`` → [(e-b) * items, H, K, D]."""
        taken = take(tokens, chunk.keys, b, e)
        if chunk.shared:
            return self._split_heads(taken, 1).expand(chunk.items, -1, -1, -1)
        return self._split_heads(taken, (e - b) * chunk.items)

    def _split_heads(self, tokens, n):
        """[n*T, H*D] → [n, H, T, D]."""
        return tokens.view(n, -1, self.heads, tokens.shape[1] // self.heads).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Items that are attended in one call, for `entries` batch entries at a time.

    rows: int32 [items * M]. keys: int32 [items * K], or [K] where `shared` by all items. mask_ids: int64 [items], a
    slice where they follow one another or are one for all items, or None.
    """

    items: int
    entries: int
    shared: bool
    rows: Tensor
    keys: Tensor
    mask_ids: Tensor | slice | None

    @property
    def n_masks(self) -> int:
        """Masks that the items take."""
        ids = self.mask_ids
        return ids.stop - ids.start if isinstance(ids, slice) else 0 if ids is None else len(ids)


def build(
    setting: "Setting",
    blocks: "Blocks",
    form: list[int] | tuple[int, int, bool, bool],
    block: np.ndarray,
    run_lo: np.ndarray,
    run_hi: np.ndarray,
    spare_bytes: int,
) -> Launch:
    """The `Launch` of work items (int columns `block`, `run_lo`, `run_hi`) of one form.

    form: rows, runs, masked and split, see `work.WorkItems.forms`. spare_bytes: memory for masks that are expanded
    before the first call.
    """
    height, n_runs, masked, split = form
    rows, real = _padded_rows(blocks, block, height)
    keys, run_ids = _padded_keys(blocks, run_lo, run_hi, n_runs)
    if setting.units is not None:
        # Each unit sees its own keys.
        n = len(setting.units.group)
        keys = keys + rows[:, :1] // (len(setting.natural[0]) // n) * (len(setting.natural[1]) // n)
    masks = None
    if masked or setting.bias is not None:
        tokens = setting.natural[0][rows], setting.natural[1][keys]
        masks = ItemMasks(blocks.masks[:, :height], run_ids, *tokens, setting.bias)
        if masks.float_bytes * masks.size <= spare_bytes:
            masks.expand()
        real = real & masks.has_keys
    mask_ids = np.zeros(len(block), np.int64) if masks is None else masks.ids
    sizes = item_bytes(setting, height, keys.shape[1], 0 if masks is None else masks.heads)
    # Of what does not fit the cache of a core, another core would have to fetch what one has gathered.
    together = sum(sizes) <= devices.describe("cpu")["l2_bytes"]
    order, cuts, most, shared = _grouped(keys, mask_ids, *sizes, together)
    rows, keys, real, mask_ids = rows[order], keys[order], real[order], mask_ids[order]
    chunks = []
    for lo, hi in pairwise(cuts):
        chunks.append(
            _Chunk(
                items=hi - lo,
                entries=1 if shared else max(1, most // (hi - lo)),
                shared=shared,
                rows=index(setting.taken[0][rows[lo:hi]].ravel()),
                keys=index(setting.taken[1][keys[lo : lo + 1 if shared else hi]].ravel()),
                mask_ids=None if masks is None else _sliced(mask_ids[lo:hi]),
            )
        )
    held = 4 * sum(len(c.rows) + len(c.keys) for c in chunks) + (0 if masks is None else masks.held_bytes)
    results = rows[real].astype(np.int64), np.flatnonzero(real)
    return Launch(tuple(chunks), setting.heads, setting.scale, split, together, rows.size, *results, masks, held)  # type: ignore[arg-type, call-arg]  # mypy does not know the length of what is unpacked


def item_bytes(setting: "Setting", rows: int, keys: int, mask_heads: int) -> tuple[int, int]:
    """``(own, shared)`` bytes of an item: of its queries, result and mask; of its keys and values."""
    token = setting.heads * setting.head_dim * setting.dtype.itemsize
    return 2 * rows * token + 4 * mask_heads * rows * keys, 2 * keys * token


def _grouped(keys, mask_ids, own_bytes, key_bytes, together):
    """``(order, cuts, most, shared)``: an order of the items and the chunks that they form.

    order: items with equal keys, else with equal masks, stand side by side. cuts: bounds of the chunks. most: items of
    a chunk that fit the caches. shared: the items of a chunk have the same keys.
    """
    n, device = len(keys), devices.describe("cpu")
    distinct, key_ids = distinct_rows(keys)
    shared = len(distinct) <= n // 2
    order = np.lexsort([mask_ids, key_ids] if shared else [key_ids, mask_ids])
    cache = _CACHE_SHARE * device["l2_bytes"] * (device["threads"] if together else 1)
    most = max(1, (cache - key_bytes) // own_bytes if shared else cache // (own_bytes + key_bytes))
    # Every worker gets a chunk, and all chunks have one size.
    most = most if together else min(most, -(-n // device["threads"]))
    cuts = [0]
    for end in np.r_[np.flatnonzero(np.diff(key_ids[order])) + 1, n] if shared else [n]:
        n_items, begin = end - cuts[-1], cuts[-1]
        size = -(-n_items // -(-n_items // most))
        cuts += [*range(begin + size, end, size), end]
    return order, [int(cut) for cut in cuts], int(most), shared


def _sliced(ids):
    """The ascending numbers `ids` as an index: a slice where they follow one another, or where there is one."""
    if ids[0] == ids[-1] or (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(ids)


def _padded_rows(blocks, block, height):
    """Queries of each item, int32 [n, height], the last one repeated as padding; and which are real."""
    rows = blocks.row_ptr[block][:, None] + np.arange(height, dtype=np.int32)
    last = blocks.row_ptr[block + 1][:, None] - 1
    return np.minimum(rows, last), rows <= last


def _padded_keys(blocks, run_lo, run_hi, n_runs):
    """Keys of each item, int32 [n, n_runs * W], padded with its first one; and its run masks, -2 where absent."""
    runs = run_lo[:, None] + np.arange(n_runs)
    real = runs < run_hi[:, None]
    runs = np.where(real, runs, run_lo[:, None])
    keys = np.where(real[:, :, None], blocks.run_keys[runs], -1).reshape(len(runs), -1)
    return np.where(keys < 0, keys[:, :1], keys), np.where(real, blocks.run_mask[runs], -2)


def _attend(q, k, v, mask, scale, with_lse):
    """``(attention [n, H, M, D], its log-sum-exps [n, H, M] or None)``. Rows without an allowed key give zeros."""
    if not with_lse:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None
    return _internals.attention_with_lse(q, k, v, attn_mask=mask, scale=scale)


def _repeat(x, entries):
    """Masks or peaks [1 or n, ...] for `entries` batch entries of n items each."""
    if x is None or len(x) == 1 or entries == 1:
        return x
    return x.repeat(entries, *[1] * (x.ndim - 1))


def index(array: np.ndarray) -> Tensor:
    """An int32 tensor: 32-bit indices are gathered twice as fast as 64-bit ones."""
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))


def token_major(x: Tensor) -> Tensor:
    """[B, H, N, D] → [B, N, H*D], contiguous."""
    return x.transpose(1, 2).flatten(2).contiguous()


def take(tokens: Tensor, rows: Tensor, b: int, e: int) -> Tensor:
    """Rows `rows` (int32, flat) of the batch entries ``b..e`` of tokens [B, N, C], one entry after another → [R, C]."""
    if e - b == 1:
        return tokens[b].index_select(0, rows)
    rows = (rows + tokens.shape[1] * torch.arange(b, e, dtype=torch.int32, device=tokens.device)[:, None]).flatten()
    return tokens.flatten(0, 1).index_select(0, rows)

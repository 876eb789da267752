"""The patterns that a plan is made of, from what users have: arrays, tensors, masks of FlexAttention, lists of those.

Masks are evaluated and compressed where they are, some rows at a time: no N × N memory is asked for. One pattern is a
`Graph`; where heads or images differ, patterns that are equal are held once, and `Units` say who has which.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array

from tilewright import devices, graph
from tilewright.attention.units import Units
from tilewright.core import arguments
from tilewright.core.errors import ConfigError, PatternError
from tilewright.graph import Graph

# A mask is evaluated for this many (query, key) pairs at a time; on a CPU, where caches are small, for fewer.
_PAIRS = 1 << 26
_PAIRS_ON = {"cpu": 1 << 24}
# Queries for which a mask_mod is asked whether it depends on heads or batch entries.
_ASKED = 61


def read(
    pattern: Any,
    *,
    heads: int,
    kind: str,
    shape: tuple[int, int] | None = None,
    by: str = "head",
    images: int | None = None,
) -> tuple[list[Graph], Units | None]:
    """``(distinct patterns, units)`` of a pattern of any form that `plan` takes; units: None for one pattern.

    kind: of the device that is planned for. Raises `PatternError`.
    """
    if not isinstance(by, str) or by not in ("head", "image"):
        raise ConfigError(f"by: expected head or image, found {arguments.shown(by)}")
    images = None if images is None else arguments.whole("images", images, error=PatternError)
    if shape is not None:
        n_q, n_k = arguments.sizes("shape", shape, 2, PatternError)
        shape = n_q, n_k
    found, units = _read(pattern, heads, kind, shape, by, images)
    n_q, n_k = found[0].shape
    if shape is not None and (n_q, n_k) != shape:
        raise PatternError(f"shape: expected the pattern's (N_q, N_k), {(n_q, n_k)}, found {shape}")
    return found, units


def _read(pattern, heads, kind, shape, by, images):
    if isinstance(pattern, (list, tuple)) and len(pattern) and not np.isscalar(_innermost(pattern)):
        by_image = by == "image"
        rows = (
            [_by_head(one, heads, kind, shape) for one in pattern]
            if by_image
            else [_listed(pattern, heads, kind, shape)]
        )
        found = [[row[h % len(row)] for h in range(heads)] for row in rows]
        return _shared(found, heads, None if not by_image else _expect_images(len(pattern), images))
    found, depends = _table(pattern, heads, kind, shape, by, images)
    return _shared(found, heads, _expect_images(len(found), images) if depends else None)


def _innermost(pattern):
    while isinstance(pattern, (list, tuple)) and len(pattern):
        pattern = pattern[0]
    return pattern


def _expect_images(n, images):
    if images not in (None, n):
        raise PatternError(f"patterns: expected one for each of {images} images, found {n}")
    return n


def _listed(patterns, heads, kind, shape):
    """The graph of each head, from a list of one a head."""
    if len(patterns) != heads:
        raise PatternError(f"patterns: expected one for each of {heads} heads, found {len(patterns)}")
    return [_single(one, heads, kind, shape) for one in patterns]


def _single(pattern, heads, kind, shape):
    found, _ = _table(pattern, heads, kind, shape, "head", None)
    if len({one.id for row in found for one in row}) > 1:
        raise PatternError("patterns: expected one pattern in each entry, found an entry that differs by head")
    return found[0][0]


def _by_head(pattern, heads, kind, shape):
    """The graphs of the heads of one image: one, or `heads` of them."""
    if isinstance(pattern, (list, tuple)):
        return _listed(pattern, heads, kind, shape)
    found, _ = _table(pattern, heads, kind, shape, "head", None)
    if len(found) > 1:
        raise PatternError(
            f"patterns: expected the patterns of one image in each entry, found an entry of {len(found)} images"
        )
    return found[0]


def _table(pattern, heads, kind, shape, by, images):
    """``(graphs [images or 1][heads or 1], whether images differ)``."""
    if isinstance(pattern, Graph):
        return [[pattern]], False
    if isinstance(pattern, (str, Path)):
        return [[graph.read_mask(arguments.path("pattern", pattern))]], False
    if _is_block_mask(pattern):
        return _of_block_mask(pattern, heads)
    if isinstance(pattern, torch.Tensor) and (pattern.is_meta or pattern.is_nested):
        kind = "nested" if pattern.is_nested else "meta"
        raise PatternError(f"expected a pattern [N_q, N_k] with values, found a {kind} tensor")
    if isinstance(pattern, torch.Tensor) and pattern.layout == torch.strided:
        return _of_slices(pattern, heads, by)
    if isinstance(pattern, torch.Tensor):
        return [[graph.from_pattern(_coo(pattern))]], False
    if callable(pattern):
        if shape is None:
            raise PatternError("a mask_mod needs its shape: plan(mask_mod, shape=(N_q, N_k), …)")
        return _of_mask_mod(pattern, *shape, heads, kind, images)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
    if not hasattr(pattern, "tocsr") and np.ndim(pattern) > 2:
        return _of_slices(torch.from_numpy(np.ascontiguousarray(pattern)), heads, by)
    return [[graph.from_pattern(pattern)]], False


def _shared(found, heads, images):
    """``(distinct patterns, Units or None)`` of graphs [images or 1][heads or 1]. images: None where all are alike."""
    rows = [[row[h % len(row)] for h in range(heads)] for row in found]
    numbers: dict[str, int] = {}
    distinct: list = []
    for one in (one for row in rows for one in row):
        if one.id not in numbers:
            numbers[one.id] = len(distinct)
            distinct.append(one)
    for number, one in enumerate(distinct):
        if one.shape != distinct[0].shape:
            raise PatternError(
                f"patterns: expected one shape (N_q, N_k), found {distinct[0].shape}, and {one.shape} at {number}"
            )
    of = [[numbers[one.id] for one in row] for row in rows]
    if images is None:
        return distinct, None if len(distinct) == 1 else Units("head", heads, tuple(of[0]))
    # A batch of any number where all have one pattern; by image where the heads of each agree; and so on.
    if len(distinct) == 1:
        return distinct, None
    if all(row == of[0] for row in of):
        return distinct, Units("head", heads, tuple(of[0]))
    if all(len(set(row)) == 1 for row in of):
        return distinct, Units("image", heads, tuple(row[0] for row in of))
    return distinct, Units("both", heads, tuple(number for row in of for number in row))


def _is_block_mask(pattern):
    # Who has one has loaded its module, which takes long to load.
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(pattern, flex.BlockMask)


def _coo(mask):
    """A sparse mask tensor as a COO array that `graph.from_pattern` takes."""
    if mask.ndim != 2:
        raise PatternError(f"expected a sparse mask [N_q, N_k], found shape {tuple(mask.shape)}")
    coo = mask.detach().to_sparse_coo().coalesce().cpu()
    return coo_array((_boolean(coo.values()).numpy(), tuple(coo.indices().numpy())), shape=tuple(mask.shape))


def _of_slices(mask, heads, by):
    """`_table` of a dense tensor [..., N_q, N_k], on its device: of equal slices, or by head and image."""
    mask = mask.detach()
    if mask.ndim < 2 or not all(mask.shape):
        raise PatternError(f"expected a pattern [N_q, N_k], found shape {tuple(mask.shape)}")
    n_q, n_k = mask.shape[-2:]
    slices = mask.reshape(-1, n_q, n_k)
    lead = tuple(mask.shape[:-2]) or (1,)
    if len(lead) == 1:
        lead = (1, *lead) if by == "head" else (*lead, 1)
    if len(lead) != 2 or lead[1] not in (1, heads):
        raise PatternError(
            f"expected a mask [{heads}, N_q, N_k] by head, [B, N_q, N_k] with by='image', or "
            f"[B, {heads} or 1, N_q, N_k], found shape {tuple(mask.shape)}"
        )
    if all(torch.equal(one, slices[0]) for one in slices[1:]):
        return [[_of_tensor(slices[0])]], False
    made = [_of_tensor(one) for one in slices]
    return [made[b * lead[1] : (b + 1) * lead[1]] for b in range(lead[0])], lead[0] > 1


def _of_tensor(mask):
    """The graph of a dense mask [N_q, N_k], compressed on its device."""
    return compress(lambda lo, hi: _boolean(mask[lo:hi]), *mask.shape, mask.device)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked


def _boolean(mask):
    """A tensor of booleans, or of zeros and ones, as booleans. Raises `PatternError` for other values, such as those
    of a mask that is added to scores, of which zero stands for what is allowed."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise PatternError(f"expected a boolean or 0/1 pattern, found dtype {mask.dtype}")
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        value = mask[wrong][0].item()
        found = "NaN" if value != value else f"the value {value}"
        raise PatternError(f"expected a boolean or 0/1 pattern, found {found}{graph.added_to_scores(value)}")
    return mask != 0


def compress(rows: Callable[[int, int], torch.Tensor], n_q: int, n_k: int, device: Any) -> Graph:
    """The `Graph` of a mask whose rows lo to hi are ``rows(lo, hi)``, bool [hi - lo, N_k] on `device`.

    It is asked some rows at a time. Keys are listed on the device; the host is given those lists.
    """
    device = torch.device(device)
    step = max(1, _PAIRS_ON.get(device.type, _PAIRS) // n_k)
    counts, indices = [], []
    for lo in range(0, n_q, step):
        allowed = rows(lo, min(lo + step, n_q))
        # The flat form of one index is a third of what `nonzero` of two takes.
        flat = allowed.reshape(-1).nonzero()[:, 0]
        row = torch.div(flat, n_k, rounding_mode="floor")
        counts.append(torch.bincount(row, minlength=len(allowed)))
        indices.append((flat - row * n_k).to(torch.int32))
    indptr = np.concatenate(([0], torch.cat(counts).cumsum(0).cpu().numpy()))
    keys = torch.cat(indices).cpu().numpy()
    if not len(keys):
        raise PatternError(f"the pattern {n_q} x {n_k} has no entry: no query sees any key")
    # Keys ascend in each row already.
    return graph.from_distinct_rows(indptr, keys, np.arange(n_q, dtype=np.int32), n_k)


def _of_mask_mod(mask_mod, n_q, n_k, heads, kind, images):
    """`_table` of ``mask_mod(b, h, q, k)``: on the GPU that the plan is for, or, where that raises since its tensors
    lie in the host's memory, on the CPU."""
    facts = devices.facts(kind)
    try:
        return _evaluated(mask_mod, n_q, n_k, heads, images, facts.TORCH_DEVICE)
    except PatternError as error:
        if not facts.CUDA or not isinstance(error.__cause__, RuntimeError):
            raise
        return _evaluated(mask_mod, n_q, n_k, heads, images, "cpu")


def _evaluated(mask_mod, n_q, n_k, heads, images, device):
    if n_q < 1 or n_k < 1:
        raise PatternError(f"expected at least one query and one key, found shape {n_q} x {n_k}")
    by_image, by_head = _depends(mask_mod, n_q, n_k, heads, images or 2, device)
    if by_image and images is None:
        raise PatternError(
            "mask_mod: expected one pattern for all batch entries, found two that differ; state the number of patterns "
            "by images=…"
        )
    n = images if by_image else 1
    made = [[_at(mask_mod, b, h, n_q, n_k, device) for h in range(heads if by_head else 1)] for b in range(n)]
    return made, by_image


def _call(mask_mod, b, h, queries, keys, device):
    """bool [queries, keys]: what a mask_mod allows, for queries [Q, 1] and keys [K]."""
    try:
        at = torch.tensor((b, h), dtype=torch.int64, device=device)
        found = torch.as_tensor(mask_mod(*at, queries, keys), device=device).expand(len(queries), len(keys))
    # A user's function may raise anything.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PatternError(
            f"mask_mod: a call (b, h, q_idx, kv_idx) with b={b}, h={h} on {device} failed: {reason}"
        ) from error
    try:
        return _boolean(found)
    except PatternError as error:
        raise PatternError(f"mask_mod: {error}") from None


def _at(mask_mod, b, h, n_q, n_k, device):
    """The graph of a mask_mod for one batch entry and head."""
    keys = torch.arange(n_k, device=device)

    def rows(lo, hi):
        return _call(mask_mod, b, h, torch.arange(lo, hi, device=device)[:, None], keys, device)

    return compress(rows, n_q, n_k, device)


def _depends(mask_mod, n_q, n_k, heads, images, device):
    """``(by image, by head)``: whether a mask_mod depends on each.

    It does not where, asked for all of them at once, its answer has no such dimension. Where it cannot be asked so, as
    where Python branches on the head, or has the dimension, all its rows are compared, one entry with the other.
    """
    queries = torch.linspace(0, n_q - 1, min(_ASKED, n_q), dtype=torch.float32, device=device).long()[:, None]
    keys = torch.arange(n_k, device=device)
    entries = [(0, 0), *((b, 0) for b in range(1, images)), *((0, h) for h in range(1, heads))]
    first = None
    for b, h in entries:
        found = _call(mask_mod, b, h, queries, keys, device)
        first = found if first is None else first
        if not torch.equal(found, first):
            return _differs(mask_mod, n_q, n_k, heads, images, device)
    all_b = torch.arange(images, device=device).view(-1, 1, 1, 1)
    all_h = torch.arange(heads, device=device).view(-1, 1, 1)
    try:
        at_once = torch.as_tensor(mask_mod(all_b, all_h, queries, keys), device=device)
    # A user's function may raise anything: it was written for one entry at a time.
    except Exception:
        return _differs(mask_mod, n_q, n_k, heads, images, device)
    if at_once.ndim <= 2:
        return False, False
    return _differs(mask_mod, n_q, n_k, heads, images, device)


def _differs(mask_mod, n_q, n_k, heads, images, device):
    """`_depends`, by all rows of all entries."""
    keys = torch.arange(n_k, device=device)
    step = max(1, _PAIRS_ON.get(torch.device(device).type, _PAIRS) // n_k)
    by_image = by_head = False
    for lo in range(0, n_q, step):
        queries = torch.arange(lo, min(lo + step, n_q), device=device)[:, None]

        def at(b, h, queries=queries):
            return _call(mask_mod, b, h, queries, keys, device)

        for b in range(images):
            if by_image and by_head:
                return True, True
            one = at(b, 0)
            by_image = by_image or (b > 0 and not torch.equal(one, at(0, 0)))
            by_head = by_head or any(not torch.equal(at(b, h), one) for h in range(1, heads))
    return by_image, by_head


def _of_block_mask(mask, heads):
    """`_table` of a FlexAttention ``BlockMask``: its full blocks, and its mask_mod in its other blocks."""
    n_q, n_k = mask.seq_lengths
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    rows, keys = mask.BLOCK_SIZE
    # One of 4 dimensions names the batch entries and heads that it is for; those of fewer are for all.
    partial, full = (x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (partial, full))
    if partial.shape[1] not in (1, heads):
        raise PatternError(f"BlockMask: expected 1 or {heads} heads, found {partial.shape[1]}")

    def allowed(b, h, q_idx, kv_idx):
        at = b, h, q_idx // rows, kv_idx // keys
        inside = torch.as_tensor(mask.mask_mod(b, h, q_idx, kv_idx), device=q_idx.device)
        return full[at] | (partial[at] & _boolean(inside))

    n_images, n_heads = partial.shape[:2]
    made = [[_at(allowed, b, h, n_q, n_k, partial.device) for h in range(n_heads)] for b in range(n_images)]
    return made, n_images > 1


def _blocks(counts, indices):
    """bool [..., rows, columns] of blocks: the first `counts` [..., rows] of `indices` [..., rows, columns]."""
    n = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(n, dtype=torch.int32).scatter_add_(-1, indices.long(), n.int()) > 0

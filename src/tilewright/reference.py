"""The oracle: what every executor and baseline must compute, in the fewest lines that are right (stages T3 to T5)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tilewright.graph import Graph

# Largest `relative_error` of an executor, for standard normal q, k and v and head dims from 16 to 128. A row of the
# result is sum_j w_j v_j, about as long as v is times the length of its weights, whatever the number of keys; so is
# what follows from rounding each weight by a share of itself, with any sign. In units of the roundoff u:
#   - 16 bits, u = 2^-11 (float16), 2^-8 (bfloat16): weights and result are rounded, a result of parts once more: 0.7u
#     of a row's length on average. Of a million rows of 16 values, the shortest has a third of the length that its
#     weights let expect: 2u. Twice that: 4u. Measured on a CPU: 1.1u.
#   - float32, u = 2^-24: a score of at most 16 sums up 128 products: 20u; the sums of 2^17 keys in blocks of 64 pass
#     partial sums, which round, sqrt(2^11 / 2) u = 32u for the weights and for the values; three times that for short
#     rows: 256u. Measured: 28u at 4,097 keys.
# Faults stay visible: without a share f of the keys, a row differs by about sqrt(f) of its length, 0.1 for 1 % of them
# and 0.045 for one of 484.
TOLERANCE = {torch.float32: 256 * 2**-24, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}

# Scores that `attention_rows` computes at a time: a quarter of a gigabyte of float64 on a CPU, a gigabyte on a GPU.
_SLAB_SCORES = {"cpu": 1 << 25, "cuda": 1 << 27}
# Rows whose keys it brings together.
_SLAB_ROWS = 128

# Up to `ALL_ROWS` rows are all checked. Of more, one of every `STRIDE` neighbours is, or one of a longer stretch where
# these were more than `MOST_ROWS`.
ALL_ROWS, STRIDE, MOST_ROWS = 1 << 10, 8, 1 << 13


def relative_error(found: Tensor, expected: Tensor, middle: Tensor | float = 0) -> float:
    """Largest error of a row [..., D] of `found` relative to the length of the row expected, counted from `middle`.

    A row that is to be zero, as that of a query without keys, has the error 0 or infinity. NaN gives NaN.
    """
    expected = expected.double()
    error = torch.linalg.vector_norm(found.double() - expected, dim=-1)
    return float((error / torch.linalg.vector_norm(expected - middle, dim=-1)).masked_fill(error == 0, 0).max())


def attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Dense masked attention in float64: q [B, H, N_q, D], k and v [B, H, N_k, D] → float64 [B, H, N_q, D].

    allowed: bool [N_q, N_k]; bias: [H, N_q, N_k] or None. Queries without an allowed key give zeros, and have gradients
    of zero. A pair with a bias of -inf is not allowed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        # Less the greatest of each row, which softmax does not see: beside a large one, scores would be rounded off.
        bias = bias.double()
        seen = F.pad(bias.detach().masked_fill(~allowed, -torch.inf), (0, 1), value=torch.finfo(bias.dtype).min)
        scores = scores + (bias - seen.amax(-1, keepdim=True))
    scores = scores.masked_fill(~allowed, -torch.inf)
    without = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(without, 0), -1).masked_fill(without, 0) @ v.double()


def stride(n_rows: int) -> int:
    """Length of the stretches of which one row is checked, in a result of `n_rows` rows."""
    return max(1, min(n_rows // ALL_ROWS, STRIDE), n_rows // MOST_ROWS)


def sample_rows(graph: Graph, every: int, seed: int) -> NDArray[np.int64]:
    """int64, ascending: one random row of each stretch of `every`, and the rows with the most and the fewest keys.

    One of 8 overlooks a single wrong row in 7 of 8 cases, 8 neighbouring rows in 16 %, and never 15 rows or more, such
    as a block of 16 or 64.
    """
    first = np.arange(0, graph.n_rows, every)
    some = first + np.random.default_rng(seed).integers(np.minimum(every, graph.n_rows - first))
    return np.unique(np.r_[some, graph.row_degree.argmax(), graph.row_degree.argmin()])


def attention_rows(
    graph: Graph,
    rows: NDArray[np.integer],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Callable[[NDArray, NDArray], Tensor] | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention` of the queries `rows` (int [R]) of a large graph → float64 [B, H, R, D].

    q, k, v: tokens in the order of `graph`; their device computes. bias: ``bias(rows, keys) -> [H, R, K]`` or None.
    Some queries at a time are attended densely over the union of their keys.
    """
    out = torch.empty(*q.shape[:2], len(rows), v.shape[-1], dtype=torch.float64, device=q.device)
    # Queries that share a distinct row meet, and so do neighbours, whose keys are mostly the same.
    _, first, row_id = np.unique(graph.row_id[rows], return_index=True, return_inverse=True)
    by_row_id = np.argsort(first[row_id], kind="stable")
    for lo in range(0, len(rows), _SLAB_ROWS):
        places = by_row_id[lo : lo + _SLAB_ROWS]
        # Equal rows are read once, and one by one: all pairs of some rows at a time take longer than to attend to them.
        distinct, of_row = np.unique(graph.row_id[rows[places]], return_inverse=True)
        each = [graph.indices[graph.indptr[r] : graph.indptr[r + 1]] for r in distinct]
        seen = np.zeros(graph.n_cols, bool)
        for own in each:
            seen[own] = True
        keys, at = np.flatnonzero(seen), np.cumsum(seen) - 1
        seen_by = np.zeros((len(distinct), len(keys)), bool)
        for i, own in enumerate(each):
            seen_by[i, at[own]] = True
        allowed = torch.from_numpy(seen_by).to(q.device)[torch.from_numpy(of_row).to(q.device)]
        taken = k[:, :, keys].double(), v[:, :, keys].double()
        step = max(1, _SLAB_SCORES[q.device.type] // (q.shape[0] * q.shape[1] * max(1, len(keys))))
        for part in range(0, len(places), step):
            here = places[part : part + step]
            added = None if bias is None else bias(rows[here], keys)
            out[:, :, here] = attention(
                q[:, :, rows[here]], *taken, allowed[part : part + step], bias=added, scale=scale
            )
    return out


def dense_rows(rows: NDArray[np.integer], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of the queries `rows` (int [R]) over all keys → float64 [B, H, R, D], some of them at a time."""
    everything = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    step = max(1, _SLAB_SCORES[q.device.type] // (q.shape[0] * q.shape[1] * k.shape[2]))
    k, v = k.double(), v.double()
    parts = [attention(q[:, :, rows[lo : lo + step]], k, v, everything) for lo in range(0, len(rows), step)]
    return torch.cat(parts, 2)


def neighborhood(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: str = "shift",
    scale: float | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens of a grid to boxes around them: q, k, v [B, *grid, H, D] → float64 of q's form, and its
    natural log-sum-exps [B, *grid, H].

    extra: keys and values [B, N, H, D] that all tokens see. k, v and these may have fewer heads, each for as many
    neighbours of q's.
    """
    grid, heads = q.shape[1:-2], q.shape[-2]
    each = [x if isinstance(x, Sequence) else [x] * len(grid) for x in (window, stride, dilation, causal)]
    allowed = torch.ones(1, 1, dtype=torch.int8)
    for n, w, s, d, c in zip(grid, *each, strict=True):
        allowed = torch.kron(allowed, axis_pairs(n, w, s, d, bool(c), border).to(torch.int8))
    k, v = (x.flatten(1, -3) for x in (k, v))
    if extra is not None:
        k, v = torch.cat((k, extra[0]), 1), torch.cat((v, extra[1]), 1)
        allowed = F.pad(allowed, (0, extra[0].shape[1]), value=1)
    keys, values = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    queries, allowed = q.flatten(1, -3).transpose(1, 2), allowed.bool().to(q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = (queries.double() @ keys.double().mT * scale).masked_fill(~allowed, -torch.inf).logsumexp(-1)
    out = attention(queries, keys, values, allowed, scale=scale)
    return out.transpose(1, 2).unflatten(1, grid), lse.transpose(1, 2).unflatten(1, grid)


def axis_pairs(length: int, window: int, stride: int, dilation: int, causal: bool, border: str) -> Tensor:
    """Bool [length, length]: which positions along an axis see which, as NATTEN has it; or with windows that are cut at
    borders."""
    x = torch.arange(length)
    # Tokens of each token's sub-axis, and its place there.
    n, i = -(-(length - x % dilation) // dilation), x // dilation
    left, right = window // 2, window // 2 + window % 2 - 1
    if causal:
        leader = torch.minimum(i // stride * stride + stride - 1, n - 1)
        lo, hi = (leader - left - right).clamp(min=0), torch.minimum(i + 1, n)
    else:
        leader = torch.minimum(i // stride * stride + stride // 2, n - 1)
        lo = (leader - left).clamp(min=0)
        if border == "shift":
            lo = lo + torch.where(leader + right >= n, n - right - leader - 1, 0)
            hi = lo + window
        else:
            hi = torch.minimum(leader + right + 1, n)
    return (x[:, None] % dilation == x % dilation) & (lo[:, None] <= i) & (i < hi[:, None])

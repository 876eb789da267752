"""The oracle: what every executor and baseline must compute, in the fewest lines that are right (stages T3 to T5)."""

import numpy as np
import torch

# Largest absolute error of an executor against the float64 reference, for standard normal q, k, v and head dims up to
# 128. An output is a mean of values |v| < 6 under weights that sum to one, so its error is at most 6 times the relative
# error of the weights, plus that of rounding it. In units of the roundoff u of the type:
#   - 16-bit types round weights and output once each, 6 * 2u; u = 2^-11 (float16), 2^-8 (bfloat16): 6e-3 and 5e-2;
#   - float32, u = 2^-24: a score sums up to 128 products, sqrt(128) u; its exponential is of at most 16, 16 u; the
#     weights of up to 2^17 keys are summed in blocks, about 32 u: 6 * 59 u = 2e-5.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}

# Scores that `attention_rows` computes at a time: a quarter of a gigabyte of float64.
_SLAB_SCORES = 1 << 25


def attention(q, k, v, allowed, *, bias=None, scale=None):
    """Dense masked attention in float64: q [B, H, N_q, D], k and v [B, H, N_k, D] → float64 [B, H, N_q, D].

    allowed: bool [N_q, N_k]; bias: [H, N_q, N_k] or None. Queries without an allowed key give zeros.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    return torch.nan_to_num(weights) @ v.double()


def sample_rows(graph, most, seed):
    """int64, ascending: all queries of `graph`; above `most`, so many and those with the most and the fewest keys."""
    if graph.n_rows <= most:
        return np.arange(graph.n_rows)
    some = np.random.default_rng(seed).choice(graph.n_rows, most, replace=False)
    return np.unique(np.r_[some, graph.row_degree.argmax(), graph.row_degree.argmin()])


def attention_rows(graph, rows, q, k, v, *, scale=None):
    """`attention` of the queries `rows` (int [R]) of a large graph → float64 [B, H, R, D].

    q, k, v: tokens in the order of `graph`; their device computes. Some queries at a time are attended densely over the
    union of their keys.
    """
    out = torch.empty(*q.shape[:2], len(rows), v.shape[-1], dtype=torch.float64, device=q.device)
    step = max(1, min(64, _SLAB_SCORES // (q.shape[0] * q.shape[1] * graph.n_cols)))
    # Queries that share a distinct row meet.
    by_class = np.argsort(graph.row_class[rows], kind="stable")
    for lo in range(0, len(rows), step):
        places = by_class[lo : lo + step]
        lists = [graph.row(row) for row in rows[places]]
        keys = np.unique(np.concatenate(lists)).astype(np.int64)
        allowed = np.zeros((len(places), len(keys)), bool)
        for row, own in enumerate(lists):
            allowed[row, np.searchsorted(keys, own)] = True
        taken = q[:, :, rows[places]], k[:, :, keys], v[:, :, keys]
        out[:, :, places] = attention(*taken, torch.from_numpy(allowed).to(q.device), scale=scale)
    return out

"""The oracle: what every executor and baseline must compute, in the fewest lines that are right (stages T3 to T5)."""

import numpy as np
import torch

# Largest absolute error of an executor against the float64 reference, for standard normal q, k, v and head dims up to 128.
# An output is a mean of values |v| < 6 under weights that sum to one, so its error is at most 6 times the relative error
# of the weights, plus that of rounding the output. With unit roundoff u:
#   16-bit types round the weights and the output once each: 6 * 2u, u = 2^-11 for float16 and 2^-8 for bfloat16, which leaves
#   6e-3 and 5e-2;
#   float32 (u = 2^-24) also accumulates scores |s| < 16 over up to 128 products and sums weights over thousands of keys, each
#   with an error that grows like the root of its length: 6 * (16 * sqrt(128) * u + 64 * u), below 1e-4; 2e-5 is held, since
#   scores of that size come with a weight close to one, whose error cancels in the normalisation.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def attention(q, k, v, allowed, *, bias=None, scale=None):
    """Dense masked attention in float64: q [B, H, N_q, D], k and v [B, H, N_k, D], allowed bool [N_q, N_k], bias [H, N_q, N_k] or
    None → float64 [B, H, N_q, D]. Queries without an allowed key give zeros."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    return torch.nan_to_num(weights) @ v.double()


def sample_rows(graph, most, seed):
    """int64, ascending: all queries of `graph`, or above `most` of them a sample: a row of the largest and of the smallest
    degree and `most` others."""
    if graph.n_rows <= most:
        return np.arange(graph.n_rows)
    some = np.random.default_rng(seed).choice(graph.n_rows, most, replace=False)
    return np.unique(np.r_[some, graph.row_degree.argmax(), graph.row_degree.argmin()])


def attention_rows(graph, rows, q, k, v, *, bias=None, scale=None):
    """Attention of the queries `rows` (int [R]) of a large graph, in float64 → [B, H, R, D].

    q, k, v as in `attention`, tokens in the order of `graph`; bias: ``callable(rows [R], keys [K]) -> [H, R, K]`` or None. Queries
    that share a distinct row are one dense attention over its keys.
    """
    out = torch.zeros(*q.shape[:2], len(rows), v.shape[-1], dtype=torch.float64)
    classes, member = np.unique(graph.row_class[rows], return_inverse=True)
    by_class = np.split(np.argsort(member, kind="stable"), np.cumsum(np.bincount(member))[:-1])
    for c, places in zip(classes, by_class, strict=True):
        keys = torch.from_numpy(graph.indices[graph.indptr[c] : graph.indptr[c + 1]].astype(np.int64))
        queries = torch.from_numpy(rows[places])
        everything = torch.ones(len(places), len(keys), dtype=torch.bool)
        extra = None if bias is None else bias(queries.numpy(), keys.numpy())
        out[:, :, places] = attention(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], everything, bias=extra, scale=scale
        )
    return out

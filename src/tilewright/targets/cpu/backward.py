"""Gradients of a schedule on a CPU: the chunks of its executor once more, with their weights recomputed (training).

A first pass over the chunks gives the log-sum-exp of every query, over all its parts. A second one recomputes the
weights of a chunk from it and adds what the chunk gives to the gradients. The chunks follow one another, so that the
sums have one order, and no two calls differ.
"""

import torch

from tilewright.targets.cpu.launch import take, token_major
from tilewright.targets.cpu.workers import in_forks


@in_forks
def gradients(executor, q, k, v, out, grad):
    """``(dq, dk, dv)`` of ``out = executor(q, k, v)`` for the gradient `grad` [B, H, N_q, D] of `out`.

    They have the shapes and dtypes of q, k and v. Sums are taken in float32.
    """
    delta = (out.float() * grad.float()).sum(-1).transpose(1, 2)
    tokens = [token_major(x) for x in (q, k, v, grad)]
    sums = [torch.zeros(x.shape, dtype=torch.float32) for x in tokens[:3]]
    chunks = _chunks(executor)
    for b in range(len(q)):
        lse = _log_sum_exps(chunks, tokens, b, executor)
        for launch, chunk, real in chunks:
            _add(sums, launch, chunk, real, tokens, b, lse, delta[b])
    shape = executor.heads, executor.head_dim
    return tuple(x.unflatten(-1, shape).transpose(1, 2).to(q.dtype) for x in sums)


def _chunks(executor):
    """``[(launch, chunk, real), …]``, real: bool [items * M], the rows of a chunk that stand for queries with keys."""
    chunks = []
    for launch in executor.launches:
        written, begin = torch.zeros(launch.n_rows, dtype=torch.bool), 0
        written[torch.from_numpy(launch.position_of)] = True
        for chunk in launch.chunks:
            chunks.append((launch, chunk, written[begin : begin + len(chunk.rows)]))
            begin += len(chunk.rows)
    return chunks


def _by_head(taken, n, heads):
    """[n*T, H*D] → float32 [n, H, T, D]."""
    return taken.view(n, -1, heads, taken.shape[1] // heads).transpose(1, 2).float()


def _scores(launch, chunk, tokens, b):
    """``(scores [n, H, M, K], queries, keys, peaks)`` of a chunk; the masks are less the peaks of their rows."""
    queries = _by_head(take(tokens[0], chunk.rows, b, b + 1), chunk.items, launch.heads)
    keys = _by_head(take(tokens[1], chunk.keys, b, b + 1), 1 if chunk.shared else chunk.items, launch.heads)
    scores = queries @ keys.mT * _scale(launch, queries)
    mask, peaks = (None, None) if launch.masks is None else launch.masks.take(chunk.mask_ids)
    return scores if mask is None else scores + mask, queries, keys, peaks


def _scale(launch, queries):
    return queries.shape[-1] ** -0.5 if launch.scale is None else launch.scale


def _flat(x):
    """[n, H, M] → [n * M, H]."""
    return x.transpose(1, 2).flatten(0, 1)


def _log_sum_exps(chunks, tokens, b, executor):
    """float64 [N_q, H]: the log-sum-exp of each query over all its parts, -inf for one without a key."""
    rows, found = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, executor.heads, dtype=torch.float64)]
    for launch, chunk, real in chunks:
        scores, _, _, peaks = _scores(launch, chunk, tokens, b)
        lse = scores.logsumexp(-1).double()
        rows.append(chunk.rows[real].long())
        found.append(_flat(lse if peaks is None else lse + peaks)[real])
    rows, found = torch.cat(rows), torch.cat(found)
    most = found.new_full((executor.shape[0], executor.heads), -torch.inf)
    most.scatter_reduce_(0, rows[:, None].expand_as(found), found, "amax")
    share = (found - most[rows]).exp().nan_to_num()
    return most + torch.zeros_like(most).index_add_(0, rows, share).log()


def _add(sums, launch, chunk, real, tokens, b, lse, delta):
    """Add the gradients of one chunk and batch entry to `sums`, float32 [B, N, H*D] each."""
    scores, queries, keys, peaks = _scores(launch, chunk, tokens, b)
    n, n_keys = chunk.items, 1 if chunk.shared else chunk.items
    values = _by_head(take(tokens[2], chunk.keys, b, b + 1), n_keys, launch.heads)
    grads = _by_head(take(tokens[3], chunk.rows, b, b + 1), n, launch.heads)
    rows = chunk.rows.view(n, -1)
    of_row = lse[rows].transpose(1, 2)
    of_row = of_row if peaks is None else of_row - peaks
    # Padded rows, and rows without a key, have no weights.
    known = real.view(n, 1, -1) & of_row.isfinite()
    weights = (scores - of_row.masked_fill(~known, torch.inf).float()[..., None]).exp()
    d_scores = weights * (grads @ values.mT - delta[rows].transpose(1, 2)[..., None]) * _scale(launch, queries)
    found = d_scores @ keys, d_scores.mT @ queries, weights.mT @ grads
    for x, places, y in zip(sums, (chunk.rows, chunk.keys, chunk.keys), found, strict=True):
        y = y.sum(0, keepdim=True) if places is chunk.keys and chunk.shared else y
        x[b].index_add_(0, places.long(), y.transpose(1, 2).flatten(0, 1).flatten(1))

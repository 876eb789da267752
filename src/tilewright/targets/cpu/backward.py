"""Gradients of a schedule on a CPU: the chunks of its executor once more, with their weights recomputed (training).

Each worker takes a group of heads through all chunks, one after another: no two workers add to the same sums, which
have one order, so that no two calls differ. Rows that have all their keys in one chunk get their weights by a softmax
over it. Those of split blocks need their log-sum-exps over all parts, which a first pass over these parts gives.
"""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch

from tilewright.core import _internals
from tilewright.targets.cpu import _scatter
from tilewright.targets.cpu.launch import token_major
from tilewright.targets.cpu.workers import alone, in_forks, workers


def gradients(executor, q, k, v, out, grad):
    """``(dq, dk, dv)`` of ``out = executor(q, k, v)`` for the gradient `grad` [B, H, N_q, D] of `out`.

    They have the shapes and dtypes of q, k and v. Sums are taken in float32.
    """
    return _gradients(executor, q, k, v, out, grad, None)


def gradients_with_bias(executor, q, k, v, out, grad):
    """``(dq, dk, dv, d_table)`` of an executor with a bias: d_table float32 [H, T], the sums over an entry's pairs."""
    masks = executor.launches[0].masks if executor.launches else None
    return _gradients(executor, q, k, v, out, grad, 0 if masks is None else masks.entries)


@in_forks
def _gradients(executor, q, k, v, out, grad, entries):
    heads = executor.heads
    work = _Work(executor, q, k, v, out, grad, entries)
    n_jobs = min(heads, executor.n_workers)
    bounds = [heads * i // n_jobs for i in range(n_jobs + 1)]
    # All cores share the operators of a job that is alone.
    with alone() if n_jobs > 1 else nullcontext():
        jobs = [slice(lo, hi) for lo, hi in pairwise(bounds)]
        if n_jobs > 1:
            workers(n_jobs).run(work.run, jobs)
        else:
            work.run(jobs[0])
    return work.result(q.dtype)


class _Work:
    """Tokens and sums of a call, that jobs share, each with heads of its own.

    tokens: q, k, v and the gradient of the result, float32 [B * N, H, D]. sums: of dq, dk and dv likewise. table: of
    the bias, [H, T], or None.
    """

    def __init__(self, executor, q, k, v, out, grad, entries):
        self.batch, self.heads = len(q), executor.heads
        self.shape, self.lengths = (executor.heads, executor.head_dim), [x.shape[2] for x in (q, k, v, grad)]
        self.tokens = [token_major(x).float().view(-1, *self.shape).numpy() for x in (q, k, v, grad)]
        self.sums = [np.zeros_like(x) for x in self.tokens[:3]]
        self.table = None if entries is None else np.zeros((self.heads, entries), np.float32)
        # [B * N_q, H]
        self.delta = (out.float() * grad.float()).sum(-1).transpose(1, 2).flatten(0, 1)
        self.chunks = _chunks(executor)
        scale = next((launch.scale for launch in executor.launches), None)
        self.scale = self.shape[1] ** -0.5 if scale is None else scale

    def result(self, dtype):
        """The sums as gradients."""
        found = [
            torch.from_numpy(x).view(self.batch, n, *self.shape).transpose(1, 2).to(dtype)
            for x, n in zip(self.sums, self.lengths[:3], strict=True)
        ]
        return (*found, *([] if self.table is None else [torch.from_numpy(self.table)]))

    def run(self, heads):
        """All chunks for a slice of the heads."""
        lse = self._log_sum_exps(heads)
        for chunk in self.chunks:
            for b in range(0, self.batch, chunk.entries):
                self._add(chunk, heads, b, min(b + chunk.entries, self.batch), lse)

    def _gather(self, which, rows, heads, factor=1.0):
        out = np.empty((heads.stop - heads.start, len(rows), self.shape[1]), np.float32)
        _scatter.gather(self.tokens[which], heads.start, rows, factor, out)
        return torch.from_numpy(out)

    def _rows(self, rows, which, b, e):
        """`rows` of the batch entries ``b..e``, one after another; -1 stays."""
        if e == 1:
            return rows
        steps = self.lengths[which] * np.arange(b, e, dtype=np.int32)[:, None]
        return np.where(rows < 0, np.int32(-1), rows + steps).astype(np.int32).ravel()

    def _scores(self, chunk, heads, b, e):
        """``(scores [h, E * n, M, K], queries, keys, peaks)``; masks are less the peaks of their rows."""
        count, n = heads.stop - heads.start, (e - b) * chunk.items
        together = 1 if chunk.shared else n
        queries = self._gather(0, self._rows(chunk.rows, 0, b, e), heads, self.scale)
        keys = self._gather(1, self._rows(chunk.keys, 1, b, e), heads)
        queries, keys = (x.view(count * together, -1, self.shape[1]) for x in (queries, keys))
        scores = torch.bmm(queries, keys.mT).view(count, n, -1, keys.shape[1])
        mask, peaks = chunk.masks(heads)
        if mask is not None:
            scores.unflatten(1, (e - b, -1)).add_(mask)
        return scores, queries, keys, peaks

    def _log_sum_exps(self, heads):
        """float64 [B * N_q, h]: the log-sum-exps of split queries over all their parts, -inf without a key; or None."""
        rows, found = [], []
        for chunk in self.chunks:
            if not chunk.split:
                continue
            for b in range(0, self.batch, chunk.entries):
                e = min(b + chunk.entries, self.batch)
                scores, _, _, peaks = self._scores(chunk, heads, b, e)
                lse = scores.logsumexp(-1).double()
                lse = lse if peaks is None else lse.unflatten(1, (e - b, -1)).add_(peaks)
                at = torch.from_numpy(self._rows(chunk.real, 0, b, e))
                rows.append(at[at >= 0].long())
                found.append(lse.reshape(len(lse), -1).T[at >= 0])
        if not rows:
            return None
        rows, found = torch.cat(rows), torch.cat(found)
        most = found.new_full((self.batch * self.lengths[0], found.shape[1]), -torch.inf)
        most.scatter_reduce_(0, rows[:, None].expand_as(found), found, "amax")
        share = (found - most[rows]).exp().nan_to_num()
        return most + torch.zeros_like(most).index_add_(0, rows, share).log()

    def _add(self, chunk, heads, b, e, lse):
        """Add the gradients of one chunk for the batch entries ``b..e``."""
        scores, queries, keys, peaks = self._scores(chunk, heads, b, e)
        rows, places = self._rows(chunk.real, 0, b, e), self._rows(chunk.keys, 1, b, e)
        weights = self._weights(chunk, scores, rows, peaks, lse, e - b)
        flat = len(keys), -1, keys.shape[1]
        values, grads = (
            self._gather(i, at, heads).view(len(keys), -1, self.shape[1]) for i, at in ((2, places), (3, rows))
        )
        weights = weights.view(flat)
        d_values = torch.bmm(weights.mT, grads)
        d_weights = torch.bmm(grads, values.mT)
        if chunk.split:
            at = torch.from_numpy(rows).clamp(min=0).long()
            delta = self.delta[:, heads].index_select(0, at).T.reshape(len(keys), -1, 1)
            d_scores = d_weights.sub_(delta).mul_(weights)
        else:
            # More exact than from the result, where one key has nearly all of a row's weight.
            d_scores = _internals.softmax_backward(d_weights, weights)
        if self.table is not None:
            of_pairs = d_scores.view(scores.shape).numpy()
            _scatter.add_places(self.table, heads.start, chunk.places, of_pairs)
        self._put(0, rows, heads, torch.bmm(d_scores, keys), self.scale)
        self._put(1, places, heads, torch.bmm(d_scores.mT, queries))
        self._put(2, places, heads, d_values)

    def _put(self, which, rows, heads, values, factor=1.0):
        values = values.view(heads.stop - heads.start, len(rows), -1).numpy()
        _scatter.add(self.sums[which], heads.start, rows, factor, values)

    def _weights(self, chunk, scores, rows, peaks, lse, entries):
        """Weights of the pairs, in the memory of `scores` [h, E * n, M, K]."""
        if not chunk.split:
            torch.softmax(scores, -1, out=scores)
            # Rows without a key.
            return scores.nan_to_num_() if scores[..., 0].isnan().any() else scores
        of_row = lse[torch.from_numpy(rows).clamp(min=0).long()].T.reshape(scores.shape[:3])
        if peaks is not None:
            of_row = (of_row.unflatten(1, (entries, -1)) - peaks).flatten(1, 2)
        of_row = of_row.masked_fill(~of_row.isfinite(), torch.inf).float()
        return scores.sub_(of_row[..., None]).exp_()


class _Chunk:
    """A chunk of a launch as the backward takes it.

    rows, keys: int32, its tokens. real: rows, -1 for those that stand for no query with a key.
    """

    def __init__(self, launch, chunk, written):
        self.items, self.entries, self.shared, self.split = chunk.items, chunk.entries, chunk.shared, launch.split
        self.rows, self.keys = chunk.rows.numpy(), chunk.keys.numpy()
        self.real = np.where(written, self.rows, np.int32(-1))
        self._masks, self._ids = launch.masks, chunk.mask_ids

    def masks(self, heads):
        """``(mask [h or 1, 1, n or 1, M, K], peaks [h or 1, 1, n or 1, M])``, or None for either."""
        if self._masks is None:
            return None, None
        taken = self._masks.take(self._ids)
        taken = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in taken)
        return tuple(None if x is None else x.transpose(0, 1)[:, None] for x in taken)

    @property
    def places(self):
        """Places of the pairs in the table of the bias, int32 [n or 1, M, K]."""
        return self._masks.places(self._ids).numpy()


def _chunks(executor):
    chunks = []
    for launch in executor.launches:
        written, begin = np.zeros(launch.n_rows, bool), 0
        written[launch.position_of] = True
        for chunk in launch.chunks:
            chunks.append(_Chunk(launch, chunk, written[begin : begin + len(chunk.rows)]))
            begin += len(chunk.rows)
    return chunks

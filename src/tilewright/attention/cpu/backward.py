"""Gradients of a schedule on a CPU: the chunks of its executor once more, with their weights recomputed (training).

Each worker takes a group of heads through all chunks, one after another: no two workers add to the same sums, which
have one order, so that no two calls differ. Rows that have all their keys in one chunk get their weights by a softmax
over it. Those of split blocks need their log-sum-exps over all parts, which a first pass over these parts gives. They
are less the greatest peak of a row's masks, beside which they would vanish.
"""

from contextlib import nullcontext
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.attention.cpu.executor import Executor, OfUnits
from tilewright.core import _internals
from tilewright.devices.cpu import _scatter
from tilewright.devices.cpu.workers import alone, in_any_state, workers

_CPU = torch.device("cpu")


def gradients(
    executor: Executor | OfUnits, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv)`` of ``out = executor(q, k, v)`` for the gradient `grad` [B, H, N_q, D] of `out`.

    They have the shapes and dtypes of q, k and v. Sums are taken in float32.
    """
    if isinstance(executor, OfUnits):
        return _of_units(executor, (q, k, v, out, grad), gradients)
    return _gradients(executor, (q, k, v, out, grad), None)


def gradients_with_bias(
    executor: Executor | OfUnits, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, d_table)`` of an executor with a bias: d_table float32 [H, T], the sums over an entry's pairs."""
    if isinstance(executor, OfUnits):
        *found, table = _of_units(executor, (q, k, v, out, grad), gradients_with_bias)
        # One table of one head may hold those of all.
        return *found, table.view(executor.heads, -1)
    entries = next((launch.masks.entries for launch in executor.launches), 0)
    return _gradients(executor, (q, k, v, out, grad), _zeros(executor.heads, entries))


def _of_units(executor, tensors, differentiated):
    """What `differentiated` gives for the tokens of all units side by side; of q, k and v, heads and images apart."""
    found = differentiated(executor.inner, *map(executor.together, tensors))
    return *(executor.apart(x, len(tensors[0])) for x in found[:3]), *found[3:]


@in_any_state
def _gradients(executor, tensors, table):
    # In memory order: a worker's heads lie side by side.
    sums = [_zeros(*x.shape) for x in tensors[:3]]
    chunks = _chunks(executor)
    n_jobs = min(executor.heads, executor.n_workers)
    bounds = [executor.heads * i // n_jobs for i in range(n_jobs + 1)]
    jobs = [slice(*each) for each in pairwise(bounds)]

    def run(heads):
        _Heads(heads, chunks, tensors, sums, table).run()

    # All cores share the operators of a job that is alone.
    with alone() if n_jobs > 1 else nullcontext():
        if n_jobs > 1:
            workers(executor.n_workers).run(run, jobs)
        else:
            run(jobs[0])
    found = tuple(x.to(tensors[0].dtype) for x in sums)
    return found if table is None else (*found, table)


def _zeros(*shape):
    return torch.zeros(shape, dtype=torch.float32, device=_CPU)


class _Chunk:
    """A chunk of a launch as the backward takes it.

    rows, keys: int32, its tokens. real: rows, -1 for those that stand for no query with a key. keyless: whether a row
    may have no key, which minus infinity in a bias does, too.
    """

    def __init__(self, launch, chunk, written):
        self.items, self.entries, self.shared, self.split = chunk.items, chunk.entries, chunk.shared, launch.split
        self.rows, self.keys, self.scale = chunk.rows.numpy(), chunk.keys.numpy(), launch.scale
        self.real = np.where(written, self.rows, np.int32(-1))
        self._masks, self._ids = launch.masks, chunk.mask_ids
        self.keyless = self._masks is not None and (self._masks.entries > 0 or not written.all())

    def masks(self, heads):
        """``(masks [h or 1, 1, n or 1, M, K], peaks [h or 1, 1, n or 1, M])`` of a slice of heads; None for either."""
        if self._masks is None:
            return None, None
        taken = (None if x is None else x if x.shape[1] == 1 else x[:, heads] for x in self._masks.take(self._ids))
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


class _Heads:
    """The work of one worker: a slice of the heads, h of them, through all chunks.

    Shapes have E batch entries of n items with M rows and K keys each. Keys that all items share are one batch of E * M
    rows, others one for each item: ``[h * batches, rows, D]``.
    """

    def __init__(self, heads, chunks, tensors, sums, table):
        q, k, v, out, grad = (x[:, heads] for x in tensors)
        self.heads, self.chunks, self.table = heads, chunks, table
        self.count, self.dim, self.scale = q.shape[1], q.shape[3], q.shape[3] ** -0.5
        self.tokens = [x.float().contiguous().numpy() for x in (q, k, v, grad)]
        self.sums = [x.numpy() for x in sums]
        # [B, h, N_q], of split rows.
        self.delta: Any = (out.float() * grad.float()).sum(-1) if any(chunk.split for chunk in chunks) else None
        self.stats: Any = None
        self.held = {}

    def run(self):
        """Add the gradients of all chunks."""
        if self.delta is not None:
            self.stats = self._log_sum_exps()
        for chunk, b, e in self._parts():
            self._add(chunk, b, e)

    def _parts(self):
        batch = len(self.tokens[0])
        for chunk in self.chunks:
            for b in range(0, batch, chunk.entries):
                yield chunk, b, min(b + chunk.entries, batch)

    def _memory(self, name, *shape):
        """Memory for a step, used again by the next chunk: new pages take as long to get as to fill."""
        size = prod(shape)
        held = self.held.get(name)
        if held is None or len(held) < size:
            held = self.held[name] = torch.empty(size, dtype=torch.float32, device=_CPU)
        return held[:size].view(shape)

    def _gather(self, which, rows, b, e, batches, factor=1.0):
        """Tokens `rows` of the batch entries ``b..e``, in so many batches, [batches, rows, D]."""
        out = self._memory(("tokens", which), self.count, e - b, len(rows), self.dim)
        _scatter.gather(self.tokens[which], b, rows, factor, out.numpy())
        return out.view(batches, -1, self.dim)

    def _put(self, which, rows, b, e, values, factor=1.0):
        values = values.view(self.count, e - b, len(rows), self.dim).numpy()
        _scatter.add(self.sums[which], b, self.heads.start, rows, factor, values)

    def _product(self, name, x, y):
        return torch.bmm(x, y, out=self._memory(name, len(x), x.shape[1], y.shape[2]))

    def _scores(self, chunk, b, e):
        """``(scores [h, E, n, M, K], queries, keys, peaks)``; masks are less the peaks of their rows."""
        batches = self.count * (1 if chunk.shared else (e - b) * chunk.items)
        scale = self.scale if chunk.scale is None else chunk.scale
        queries = self._gather(0, chunk.rows, b, e, batches, scale)
        keys = self._gather(1, chunk.keys, b, e, batches)
        scores = self._product("scores", queries, keys.mT)
        scores = scores.view(self.count, e - b, chunk.items, -1, keys.shape[1])
        masks, peaks = chunk.masks(self.heads)
        return scores if masks is None else scores.add_(masks), queries, keys, peaks

    def _log_sum_exps(self):
        """float64 ``(lse, peaks)`` [B, h, N_q] of split queries over all their parts: log-sum-exps, -inf without a key,
        less the greatest peaks."""
        shape, exact = self.delta.shape, torch.float64
        peaks, parts = torch.full(shape, torch.finfo(exact).min, dtype=exact, device=_CPU), []
        for chunk, b, e in self._parts():
            if chunk.split:
                scores, _, _, own = self._scores(chunk, b, e)
                logs = scores.logsumexp(-1).double()
                both = torch.broadcast_tensors(logs, torch.zeros_like(logs) if own is None else own.double())
                there = torch.from_numpy(chunk.real)
                logs, own = (x.flatten(2).transpose(0, 1)[..., there >= 0] for x in both)
                rows = there[there >= 0].long().expand(logs.shape)
                peaks[b:e].scatter_reduce_(2, rows, own, "amax")
                parts.append((b, e, rows, logs, own))
        most, total = torch.full_like(peaks, -torch.inf), torch.zeros_like(peaks)
        for b, e, rows, logs, own in parts:
            most[b:e].scatter_reduce_(2, rows, logs.add_(own - peaks[b:e].gather(2, rows)), "amax")
        for b, e, rows, logs, _ in parts:
            total[b:e].scatter_add_(2, rows, (logs - most[b:e].gather(2, rows)).exp().nan_to_num())
        return most + total.log(), peaks

    def _add(self, chunk, b, e):
        """Add the gradients of one chunk for the batch entries ``b..e``."""
        scores, queries, keys, own = self._scores(chunk, b, e)
        weights = self._weights(chunk, scores, own, b, e).view(len(keys), -1, keys.shape[1])
        values = self._gather(2, chunk.keys, b, e, len(keys))
        # Padded rows have no gradient.
        grads = self._gather(3, chunk.real, b, e, len(keys))
        d_weights = self._product("d_scores", grads, values.mT)
        if chunk.split:
            delta = self._of_rows(chunk, self.delta, b, e).reshape(len(keys), -1, 1)
            d_scores = d_weights.sub_(delta).mul_(weights)
        else:
            # More exact than from the result, where one key has nearly all of a row's weight.
            d_scores = _internals.softmax_backward(d_weights, weights)
        if self.table is not None:
            pairs = d_scores.view(self.count, -1, *scores.shape[3:]).numpy()
            _scatter.add_places(self.table.numpy(), self.heads.start, chunk.places, pairs)
        scale = self.scale if chunk.scale is None else chunk.scale
        self._put(0, chunk.real, b, e, self._product("of rows", d_scores, keys), scale)
        self._put(1, chunk.keys, b, e, self._product("of keys", d_scores.mT, queries))
        self._put(2, chunk.keys, b, e, self._product("of keys", weights.mT, grads))

    def _of_rows(self, chunk, values, b, e):
        """Values [B, h, N_q] of a chunk's rows: [h, E, rows]; any for padded ones."""
        return values[b:e].index_select(2, torch.from_numpy(chunk.rows)).transpose(0, 1)

    def _weights(self, chunk, scores, own, b, e):
        """Weights of the pairs, in the memory of `scores` [h, E, n, M, K], whose masks are less their `own` peaks."""
        if not chunk.split:
            torch.softmax(scores, -1, out=scores)
            # Not a number for all keys of a row without any.
            missing = chunk.keyless and scores[..., 0].isnan().any()
            return scores.nan_to_num_() if missing else scores
        lse, peaks = (self._of_rows(chunk, x, b, e).view(scores.shape[:-1]) for x in self.stats)
        lse = lse + (peaks if own is None else peaks - own)
        # Padded rows repeat a real one, whose result has none of their weights.
        padded = torch.from_numpy(chunk.real < 0).view(chunk.items, -1)
        lse = lse.masked_fill(padded | ~lse.isfinite(), torch.inf).float()
        return scores.sub_(lse[..., None]).exp_()

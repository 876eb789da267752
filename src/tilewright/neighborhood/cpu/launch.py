"""Neighbourhood attention on a CPU: workers attend boxes of queries to copies of the boxes of their keys.

The contract is that of `neighborhood.backends`.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from math import prod

import torch
from torch import Tensor

from tilewright.core._internals import attention_with_lse
from tilewright.devices.cpu.workers import alone, in_any_state, workers
from tilewright.neighborhood.boxes import Candidate, Choice, runs
from tilewright.neighborhood.cpu import choice
from tilewright.neighborhood.cpu.columns import Memory, columns, inside, put
from tilewright.neighborhood.rule import Rule

# Scores that a step of the backward computes, a quarter of a megabyte, unless a box has more.
_SCORES = 1 << 16
# Queries of a head whose scores of extra keys are computed at a time.
_ROWS = 1 << 12


@in_any_state
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    scale: float,
    extra: tuple[Tensor, Tensor] | None,
    want_lse: bool,
    bound: float | None = None,
    form: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `neighborhood.backends`. form: a box of queries, None for what `choice.choose` finds."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if want_lse else None
    box, width, threads = form or _box(q, k, v, rule), max(q.shape[-1], v.shape[-1]), torch.get_num_threads()
    memory, extra = Memory(), _by_head(extra, width)
    with alone():
        for here in inside(rule):
            views = [None if x is None else x[here] for x in (q, k, v, out, lse)]
            jobs = columns(rule, box, k[here], width, threads)
            workers(threads).run(partial(_attend, memory, views, scale, extra, width), jobs)
    return out, lse


def choose(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> Choice:
    """See `neighborhood.backends`."""
    return choice.choose(rule, grid, heads, kv_heads, dim, v_dim, torch.get_num_threads())


def candidates(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Candidate]:
    """See `neighborhood.backends`; predicted: in microseconds of a core."""
    found = sorted(choice.candidates(rule, grid, heads, kv_heads, dim, v_dim))
    return [Candidate("x".join(map(str, box)), choice.visited(rule, grid, box), us, box) for us, box in found]


def _box(q, k, v, rule):
    return choice.choose(rule, tuple(q.shape[1:-2]), q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]).box


def _by_head(extra, width):
    """Extra keys and values as float32 [B, H_kv, N, D] each, or None."""
    return None if extra is None else tuple(Memory().copy("", x.transpose(1, 2), width) for x in extra)


def _attend(memory, views, scale, extra, width, column):
    q, k, v, out, lse = views
    group = q.shape[-2] // k.shape[-2]
    copies = [memory.keys(name, x[column.keys], width) for name, x in (("k", k), ("v", v))]
    for run in runs(column.along):
        place = column.queries(run, group)
        queries = memory.queries("q", q[place], run, group, width)
        mask = column.mask(run, group)
        taken = (column.windows(x, run) for x in copies)
        found, sums = attention_with_lse(queries, *taken, attn_mask=mask, scale=scale)
        if extra is not None:
            more = (x[column.entry, column.heads].expand(run.repeats, -1, -1, -1) for x in extra)
            found, sums = _joined((found, sums), attention_with_lse(queries, *more, attn_mask=None, scale=scale))
        put(out[place], run, group, found[..., : v.shape[-1]])
        if lse is not None:
            put(lse[place].unsqueeze(-1), run, group, sums.unsqueeze(-1))


def _joined(one, other):
    """Attention [..., M, D] and log-sum-exps [..., M] over the keys of both."""
    total = torch.logaddexp(one[1], other[1])
    first, second = ((part * (lse - total).exp_().unsqueeze(-1)) for part, lse in (one, other))
    return first.add_(second), total


def prepared(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, scale: float, want_lse: bool, bound: float | None
) -> Callable:
    """See `neighborhood.backends`."""
    return partial(forward, rule=rule, scale=scale, extra=None, want_lse=want_lse)


@in_any_state
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    rule: Rule,
    scale: float,
    extra: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `neighborhood.backends`. Columns that share keys do not run side by side."""
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    box, width, threads = _box(q, k, v, rule), max(q.shape[-1], v.shape[-1]), torch.get_num_threads()
    of_extra = (
        (None, None) if extra is None else (extra[0].new_empty(extra[0].shape), extra[1].new_empty(extra[1].shape))
    )
    memory, extra = Memory(), _by_head(extra, width)
    with alone():
        for here in inside(rule):
            views = [x[here] for x in (q, k, v, out, lse, grad, dq, dk, dv)]
            jobs = columns(rule, box, k[here], width, threads, apart=True)
            for _, some in groupby(sorted(jobs, key=lambda one: one.color), key=lambda one: one.color):
                workers(threads).run(partial(_differentiate, memory, views, scale, extra, width), list(some))
        if extra is not None:
            entries = [(entry, head) for entry in range(len(k)) for head in range(k.shape[-2])]
            given = q, out, lse, grad, extra, of_extra, scale
            workers(threads).run(partial(_differentiate_extra, given), entries)
    return dq, dk.to(q.dtype), dv.to(q.dtype), *of_extra


def _differentiate(memory, views, scale, extra, width, column):
    """Write the gradients of a column's queries, and add those of its keys."""
    q, k, v, out, lse, grad, dq, dk, dv = views
    group = q.shape[-2] // k.shape[-2]
    keys, values = (memory.keys(name, x[column.keys], width) for name, x in (("k", k), ("v", v)))
    sums = [memory.take(name, *x.shape).zero_() for name, x in (("dk", keys), ("dv", values))]
    for run in runs(column.along):
        place = column.queries(run, group)
        queries, results, grads = (
            memory.queries(name, x[place], run, group, width) for name, x in (("q", q), ("out", out), ("grad", grad))
        )
        logs = memory.queries("lse", lse[place].unsqueeze(-1), run, group, 1)
        delta = results.mul_(grads).sum(-1, keepdim=True)
        found = memory.take("dq", *queries.shape)
        taken = [queries, grads, logs, delta, found, *(column.windows(x, run) for x in (keys, values, *sums))]
        mask = column.mask(run, group)
        heads = max(1, _SCORES // (queries.shape[2] * taken[-1].shape[2]))
        for box, first in product(range(run.repeats), range(0, queries.shape[1], heads)):
            _add(memory, scale, mask, *(x[box, first : first + heads] for x in taken))
        if extra is not None:
            k_extra, v_extra = (x[column.entry, column.heads] for x in extra)
            weights = (queries @ k_extra.mT).mul_(scale).sub_(logs).exp_()
            found += (grads @ v_extra.mT).sub_(delta).mul_(weights).mul_(scale) @ k_extra
        put(dq[place], run, group, found[..., : q.shape[-1]])
    for total, own in ((dk, sums[0]), (dv, sums[1])):
        total[column.keys] += own[..., : total.shape[-1]].movedim(0, -2)


def _add(memory, scale, mask, queries, grads, logs, delta, found, keys, values, dk, dv):
    """Write a box's gradients of queries to `found`, and add those of keys and values [heads, N, D]."""
    shape = *queries.shape[:2], keys.shape[1]
    weights, d_scores = memory.take("weights", *shape), memory.take("scores", *shape)
    beta, added = (0, weights) if mask is None else (1, mask)
    torch.baddbmm(added, queries, keys.mT, beta=beta, alpha=scale, out=weights).sub_(logs).exp_()
    torch.bmm(grads, values.mT, out=d_scores).sub_(delta).mul_(weights).mul_(scale)
    torch.bmm(d_scores, keys, out=found)
    dk.baddbmm_(d_scores.mT, queries)
    dv.baddbmm_(weights.mT, grads)


def _differentiate_extra(given, job):
    """The gradients of extra keys and values of one head, by some queries at a time."""
    q, out, lse, grad, extra, found, scale = given
    entry, head = job
    group = q.shape[-2] // extra[0].shape[1]
    keys, values = (x[entry, head] for x in extra)
    dk, dv = (torch.zeros_like(x) for x in (keys, values))
    sides: list = []
    for n in reversed(q.shape[1:-2]):
        sides.insert(0, min(n, max(1, _ROWS // prod(sides))))
    for box in product(*(range(0, n, side) for n, side in zip(q.shape[1:-2], sides, strict=True))):
        place = entry, *(slice(lo, lo + side) for lo, side in zip(box, sides, strict=True))
        place = *place, slice(head * group, (head + 1) * group)
        queries, results, grads = (x[place].flatten(0, -2).float() for x in (q, out, grad))
        weights = (queries @ keys[:, : q.shape[-1]].mT).mul_(scale).sub_(lse[place].flatten()[:, None]).exp_()
        width = grads.shape[-1]
        delta = (results * grads).sum(-1, keepdim=True)
        d_scores = (grads @ values[:, :width].mT).sub_(delta).mul_(weights).mul_(scale)
        dk[:, : q.shape[-1]].addmm_(d_scores.mT, queries)
        dv[:, :width].addmm_(weights.mT, grads)
    for total, own in zip(found, (dk, dv), strict=True):
        total[entry, :, head] = own[:, : total.shape[-1]]

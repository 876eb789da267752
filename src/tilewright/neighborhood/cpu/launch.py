"""Neighbourhood attention on a CPU: workers attend boxes of queries to the boxes of their keys.

The contract is that of `neighborhood.backends`.
"""

from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tilewright.devices.cpu.workers import alone, in_any_state, workers
from tilewright.neighborhood.boxes import Span, spans
from tilewright.neighborhood.rule import Rule

# Queries of a box along each axis, for grids of 1, 2 and 3 axes.
_SIZES = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}


@in_any_state
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    scale: float,
    extra: tuple[Tensor, Tensor] | None,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `neighborhood.backends`."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    threads = torch.get_num_threads()
    with alone():
        for first in product(*map(range, rule.dilation)):
            inside = slice(None), *(slice(x, None, d) for x, d in zip(first, rule.dilation, strict=True))
            views = [x[inside] for x in (q, k, v, out, lse)]
            jobs = _jobs(rule, views[0].shape, k.shape[-2])
            workers(threads).run(partial(_attend, views, scale, extra), jobs)
    return out, lse if want_lse else None


def _jobs(rule, shape, kv_heads):
    """Boxes of all images and heads: ``(batch entry, head of keys, spans)``."""
    grid = shape[1:-2]
    axes = [spans(*one) for one in zip(rule.axes, grid, _SIZES[len(grid)], strict=True)]
    return list(product(range(shape[0]), range(kv_heads), product(*axes)))


def _attend(views, scale, extra, job):
    q, k, v, out, lse = views
    entry, head, box = job
    group = q.shape[-2] // k.shape[-2]
    rows = entry, *(slice(x.lo, x.hi) for x in box), slice(head * group, (head + 1) * group)
    taken = entry, *(slice(x.key_lo, x.key_hi) for x in box), head
    # Rows of the box, for one head after another.
    queries = q[rows].movedim(-2, 0).flatten(1, -2).float()
    keys, values = (x[taken].flatten(0, -2).float() for x in (k, v))
    mask = _mask(tuple(x.seen for x in box), tuple(x.keys for x in box))
    if extra is not None:
        keys, values = (torch.cat((x, y[entry, :, head].float())) for x, y in zip((keys, values), extra, strict=True))
        mask = torch.nn.functional.pad(mask, (0, extra[0].shape[1]))
    scores = torch.add(mask, queries @ keys.mT, alpha=scale)
    top = scores.amax(-1, keepdim=True)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    found = (scores @ values).div_(total)
    out[rows] = found.unflatten(1, out[rows].shape[:-2]).movedim(0, -2)
    lse[rows] = total.log_().add_(top).squeeze(-1).unflatten(1, lse[rows].shape[:-1]).movedim(0, -1)


@lru_cache(256)
def _mask(seen, keys):
    """What is added to the scores of a box, float32 [queries, keys]: -inf where a query does not see a key."""
    allowed = np.ones((1, 1), bool)
    for each, n in zip(seen, keys, strict=True):
        allowed = np.kron(allowed, Span(0, len(each), 0, n, each).allowed())
    return torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))

"""Kept tokens as dense attention to them, gathered where they are scattered, then each pruned query's own key merged by
log-sum-exp."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, kernels, need_gpu, patterns

MASKED = True
DENSE = False
VARIANTS = ("flash", "cudnn")


def prepare(graph, *, batch, heads, head_dim, dtype, device, variant, **_):
    """See the contract of the package."""
    need_gpu(device)
    common = patterns.kept(graph)
    if common is None:
        raise Unavailable("the pattern is not one of kept tokens and each query itself")
    n, n_kept = graph.n_rows, len(common)
    sizes = n, n_kept, n_kept
    kernels.need(variant, *(torch.empty(batch, heads, size, head_dim, dtype=dtype, device=device) for size in sizes))
    keys, pruned = (_places(places, device) for places in (common, np.setdiff1d(np.arange(n), common)))
    merge = torch.compile(_merge_own, dynamic=False, fullgraph=True)

    def run(q, k, v):
        out, lse = kernels.attend(variant, q, _take(k, keys), _take(v, keys), with_lse=True)
        merge(out, lse, q, k, v, pruned)
        return out

    held = sum(8 * len(places) for places in (keys, pruned) if isinstance(places, torch.Tensor))
    return Ready(run, held, n * n_kept)


def _places(places, device):
    """Ascending places as an index of tokens: a slice, of which a tensor is a view, where they follow one another."""
    low, high = int(places[0]), int(places[-1]) + 1
    return slice(low, high) if high - low == len(places) else torch.from_numpy(places).to(device)


def _take(x, places):
    return x[:, :, places] if isinstance(places, slice) else x.index_select(2, places)


def _merge_own(out, lse, q, k, v, pruned):
    """Merge the own pair of the `pruned` queries into `out` [B, H, N, D] with log-sum-exps `lse` [B, H, N, 1]."""
    q, k, v, own, lse = (_take(x, pruned) for x in (q, k, v, out, lse))
    score = (q.float() * k.float()).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
    out[:, :, pruned] = torch.lerp(own.float(), v.float(), torch.sigmoid(score - lse)).to(out.dtype)

"""Kept tokens as dense attention to their gathered keys, then each pruned query's own key merged by log-sum-exp."""

import numpy as np
import torch

from tilewright.kernels.baselines import Ready, Unavailable, backends, need_gpu, patterns

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
    backends.need(variant, *(torch.empty(batch, heads, size, head_dim, dtype=dtype, device=device) for size in sizes))
    keys = torch.from_numpy(common).to(device)
    pruned = torch.from_numpy(~np.isin(np.arange(n), common))[:, None].to(device)
    merged = torch.compile(_with_own, dynamic=False, fullgraph=True)

    def run(q, k, v):
        out, lse = backends.attend(variant, q, k.index_select(2, keys), v.index_select(2, keys), with_lse=True)
        return merged(out, lse, q, k, v, pruned)

    return Ready(run, 8 * n_kept + n, n * n_kept)


def _with_own(out, lse, q, k, v, pruned):
    """`out` [B, H, N, D] with log-sum-exps `lse` [B, H, N, 1], the own pair of `pruned` [N, 1] queries merged in."""
    score = (q.float() * k.float()).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
    weight = torch.where(pruned, torch.sigmoid(score - lse), 0.0)
    return torch.lerp(out.float(), v.float(), weight).to(out.dtype)

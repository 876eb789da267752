"""What several baselines share: torch's dense kernels, rows that are attended apart, tokens of few types."""

import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, kernels, need_gpu, wide

# At the end of a variant's name: wide rows are attended apart.
SPLIT = "-split"


def dense(backend, graph, *, batch, heads, head_dim, dtype, device):
    """`Ready` for attention over all pairs by `backend`, of `kernels.NAMES`. Raises `Unavailable`."""
    need_gpu(device)
    n_q, n_k = graph.shape
    tokens = (torch.empty(batch, heads, n, head_dim, dtype=dtype, device=device) for n in (n_q, n_k, n_k))
    kernels.need(backend, *tokens)
    return Ready(lambda q, k, v: kernels.attend(backend, q, k, v)[0], 0, n_q * n_k)


def split(prepare, graph, *, variant, dtype, device, **setting):
    """``prepare(graph, variant=...)`` of a variant that may end in `SPLIT`; its wide rows are attended apart then."""
    setting |= {"variant": variant.removesuffix(SPLIT), "dtype": dtype, "device": device}
    if not variant.endswith(SPLIT):
        return prepare(graph, **setting)
    narrow, rows = wide.split(graph)
    ready, apart = prepare(narrow, **setting), wide.attending(graph, rows, dtype, device)

    def run(q, k, v):
        return apart(ready.call(q, k, v), q, k, v)

    return Ready(run, ready.held_bytes, ready.executed + len(rows) * graph.n_cols)


def need_tokens(dtype, head_dim, head_dims):
    """Raise `Unavailable` unless tokens are of a 16-bit type, and their head dim is one of these."""
    if dtype.itemsize > 2 or head_dim not in head_dims:
        known = ", ".join(map(str, head_dims))
        raise Unavailable(f"takes 16-bit types and head dims {known}, found {dtype} and {head_dim}")

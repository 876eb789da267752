"""FlashInfer's block-sparse attention with blocks of one key: gathered keys, and a bit for each pair."""

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu

MASKED = True
DENSE = False
VARIANTS = ("64x1",)

ROWS = 64
# What its documentation recommends.
WORKSPACE_BYTES = 128 << 20


def prepare(graph, *, batch, heads, head_dim, dtype, device, max_bytes, **_):
    """See the contract of the package.

    Masks of single pairs need its FlashAttention-2 kernels and whole blocks of rows: missing rows are zeros, added in
    each call. ASSUME: version 0.6 of the interface.
    """
    need_gpu(device)
    try:
        from flashinfer import BlockSparseAttentionWrapper
    except ImportError as error:
        raise Unavailable(f"flashinfer cannot be imported: {error}") from error
    if batch > 1:
        raise Unavailable(f"takes one sequence, found a batch of {batch}")
    indptr, keys, mask = gathered(graph, ROWS, max_bytes)
    padded = (len(indptr) - 1) * ROWS
    wrapper = BlockSparseAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa2")
    tables = (torch.from_numpy(table).to(device) for table in (indptr, keys))
    wrapper.plan(
        *tables, padded, graph.n_cols, ROWS, 1, heads, heads, head_dim,
        mask=torch.from_numpy(mask).to(device), q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip

    def run(q, k, v):
        q = F.pad(q[0], (0, 0, 0, padded - graph.n_rows))
        return wrapper.run(*(x.transpose(0, 1) for x in (q, k[0], v[0])))[: graph.n_rows].transpose(0, 1)[None]

    return Ready(run, 4 * (len(indptr) + len(keys)) + mask.size // 8 + WORKSPACE_BYTES, mask.size)


def gathered(graph, rows, max_bytes):
    """``(indptr int32 [groups + 1], keys int32 [n], mask bool [n, rows, 1])``: the union of the keys of each group of
    `rows` queries, and which of the queries sees which. Raises `Unavailable` above `max_bytes`.
    """
    groups = [graph.row_id[lo : lo + rows] for lo in range(0, graph.n_rows, rows)]
    lists = [[graph.indices[graph.indptr[c] : graph.indptr[c + 1]] for c in group] for group in groups]
    unions = [np.unique(np.concatenate(own)) for own in lists]
    indptr = np.concatenate(([0], np.cumsum([len(union) for union in unions])))
    if (size := int(indptr[-1]) * rows) > max_bytes:
        raise Unavailable(f"the pattern's mask takes {size:,} bytes; at most {max_bytes:,} are allowed")
    mask = np.zeros((indptr[-1], rows, 1), bool)
    for lo, union, own in zip(indptr[:-1], unions, lists, strict=True):
        for row, seen in enumerate(own):
            mask[lo + np.searchsorted(union, seen), row] = True
    return indptr.astype(np.int32), np.concatenate(unions).astype(np.int32), mask

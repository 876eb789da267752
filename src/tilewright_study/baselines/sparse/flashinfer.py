"""FlashInfer's block-sparse attention: over a pattern, blocks of one key, gathered, and a bit for each pair."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu
from tilewright_study.baselines.sparse._forms import need_tokens

MASKED = True
DENSE = False
# Queries x keys. It splits long rows by itself.
VARIANTS = ("64x1", "128x1")

# Those that its kernels are made for.
HEAD_DIMS = (64, 128, 256)
# Four times what its documentation recommends: parts of the rows of 65,537 tokens take more than that.
WORKSPACE_BYTES = 512 << 20


def prepare(graph, *, variant, batch, heads, head_dim, dtype, device, max_bytes, **_):
    """See the contract of the package.

    Masks of single pairs need its FlashAttention-2 kernels, which the package compiles for a head dim and dtype when
    they are first planned for. ASSUME: version 0.6 of the interface.
    """
    package = _need(head_dim, dtype, device)
    if batch > 1:
        raise Unavailable(f"takes one sequence, found a batch of {batch}")
    rows = int(variant.removesuffix("x1"))
    indptr, keys, mask = gathered(graph, rows, max_bytes)
    wrapper = package.BlockSparseAttentionWrapper(_workspace(device), backend="fa2")
    tables = (torch.from_numpy(table).to(device) for table in (indptr, keys))
    wrapper.plan(
        *tables, graph.n_rows, graph.n_cols, rows, 1, heads, heads, head_dim,
        mask=torch.from_numpy(mask).to(device), q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip

    def run(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        # Its kernels write rows one after the other, whatever the strides of the queries.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return wrapper.run(q, k, v, out=out).transpose(0, 1)[None]

    return Ready(run, 4 * (len(indptr) + len(keys)) + mask.size // 8 + WORKSPACE_BYTES, mask.size)


def blocks(flags, shape, *, block, head_dim, dtype, device):
    """See the contract of the package. Its FlashAttention-3 kernels run where the package has them for the GPU."""
    package = _need(head_dim, dtype, device)
    heads = flags.shape[1]
    sizes = [
        torch.full((heads, count), each, dtype=torch.int32, device=flags.device)
        for count, each in zip(flags.shape[2:], block, strict=True)
    ]
    for of_block, tokens in zip(sizes, shape, strict=True):
        of_block[:, -1] -= int(of_block[0].sum()) - tokens
    wrapper = package.VariableBlockSparseAttentionWrapper(_workspace(flags.device), backend="auto")
    wrapper.plan(flags[0], *sizes, heads, heads, head_dim, q_data_type=dtype, kv_data_type=dtype)
    return lambda q, k, v: wrapper.run(q[0], k[0], v[0])[None]


def _need(head_dim, dtype, device):
    """The package. Raises `Unavailable` unless it is there and takes such tokens."""
    need_gpu(device)
    try:
        import flashinfer
    except ImportError as error:
        raise Unavailable(f"flashinfer cannot be imported: {error}") from error
    need_tokens(dtype, head_dim, HEAD_DIMS)
    return flashinfer


def _workspace(device):
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


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

"""cuDNN's flex attention: a plan made of the intervals of keys that each query sees."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu
from tilewright_study.baselines.sparse import _forms

MASKED = True
DENSE = False
# It splits no row.
VARIANTS = ("plan", "plan" + _forms.SPLIT)

# Query and key tiles of its Hopper kernel, up to head dim 96 and above.
TILES = {96: (192, 128), 128: (128, 128)}


def prepare(graph, **setting):
    """See the contract of the package.

    executed: pairs of the tiles that hold some pair. ASSUME: version 1.32 of the frontend, whose interface is called
    experimental.
    """
    return _forms.split(_prepare, graph, **setting)


def _prepare(graph, *, batch, heads, head_dim, dtype, device, max_bytes, **_):
    need_gpu(device)
    try:
        from cudnn import FlexAttentionFwd, create_mask_plan
    except ImportError as error:
        raise Unavailable(f"cudnn's flex attention cannot be imported: {error}") from error
    tile = next((tile for most, tile in TILES.items() if head_dim <= most), None)
    if tile is None or head_dim % 8 or dtype == torch.float32:
        raise Unavailable(f"takes 16-bit types and head dims 8, 16, ..., 128, found {dtype} and {head_dim}")
    bounds = endpoints(graph)
    size = 4 * batch * graph.n_rows * bounds.shape[1]
    if size > max_bytes:
        raise Unavailable(f"the pattern's intervals take {size:,} bytes; at most {max_bytes:,} are allowed")
    per_query = torch.from_numpy(np.tile(bounds[graph.row_id].T, batch)[None].copy()).to(device)
    q, k, v = (
        torch.empty(batch, heads, n, head_dim, dtype=dtype, device=device).transpose(1, 2)
        for n in (graph.n_rows, graph.n_cols, graph.n_cols)
    )
    out = torch.empty_like(q)
    before = torch.cuda.memory_allocated()
    plan = create_mask_plan(per_query, q, k, v, build_backward=False)
    held = torch.cuda.memory_allocated() - before
    kernel = FlexAttentionFwd(q, k, v, out, plan)
    kernel.check_support()
    kernel.compile()
    workspace = torch.empty(kernel.workspace_size, dtype=torch.uint8, device=device)

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.empty_like(q)
        kernel.execute(q, k, v, out, plan, workspace=workspace)
        return out.transpose(1, 2)

    return Ready(run, held + workspace.numel(), _visited(graph, *tile) * tile[0] * tile[1])


def endpoints(graph):
    """int32 [C, odd]: the keys of each distinct row as [0, a) and [b, c) and [d, e) ..., empty intervals at the end."""
    owner = graph.entry_row_id
    follows = (np.diff(owner, prepend=-1) == 0) & (np.diff(graph.indices, prepend=-2) == 1)
    first = np.flatnonzero(~follows)
    last = np.concatenate((first[1:], [len(owner)])) - 1
    low, high, row = graph.indices[first], graph.indices[last] + 1, owner[first]
    # The first interval begins at 0, empty unless the row's does.
    number = np.arange(len(row)) - np.searchsorted(row, row) + (low[np.searchsorted(row, row)] > 0)
    bounds = np.full((graph.n_distinct, 2 * number.max(initial=0) + 2), -1, np.int32)
    bounds[row, 2 * number], bounds[row, 2 * number + 1] = low, high
    bounds[:, :2] = np.maximum(bounds[:, :2], 0)
    # Endpoints do not decrease.
    return np.maximum.accumulate(bounds, axis=1)[:, 1:].astype(np.int32)


def _visited(graph, rows, keys):
    """Tiles of so many rows and keys that hold some pair."""
    n_tiles = -(-graph.n_cols // keys)
    holds = np.zeros((graph.n_distinct, n_tiles), bool)
    holds[graph.entry_row_id, graph.indices // keys] = True
    starts = range(0, graph.n_rows, rows)
    return sum(int(holds[graph.row_id[lo : lo + rows]].any(0).sum()) for lo in starts)

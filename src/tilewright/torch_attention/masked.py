"""The pattern as a dense additive mask of `scaled_dot_product_attention`, by torch's choice of kernel or by cuDNN."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright import devices
from tilewright.core.errors import Unavailable
from tilewright.torch_attention import ALIGNED, Ready, need_gpu

VARIANTS = ("torch", "cudnn")


def prepare(graph: Any, *, dtype: Any, max_bytes: int, device: Any, variant: str = "torch", **_: Any) -> Ready:
    """Attention with a mask in `dtype` (a boolean one is converted in every call); see `flex.prepare`."""
    if variant == "cudnn":
        need_gpu(device)
    width = -(-graph.n_cols // ALIGNED) * ALIGNED if devices.facts(device).CUDA else graph.n_cols
    size = graph.n_rows * width * dtype.itemsize
    if size > max_bytes:
        raise Unavailable(f"the dense mask takes {size:,} bytes; at most {max_bytes:,} are allowed")
    distinct = torch.full((graph.n_distinct, width), -torch.inf, dtype=dtype, device=device)
    distinct[tuple(torch.from_numpy(x.astype(np.int64)).to(device) for x in (graph.entry_row_id, graph.indices))] = 0
    mask = distinct.index_select(0, torch.from_numpy(graph.row_id).to(device))[:, : graph.n_cols]

    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def run_cudnn(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return run(q, k, v)

    return Ready(run_cudnn if variant == "cudnn" else run, size, graph.n_rows * graph.n_cols)

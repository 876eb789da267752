"""What inference runs where tokens are pruned: the kept ones alone, dense attention among them.

Pruned queries are not in it: it computes a part of the pattern, with tokens that were gathered once, at the pruning.
"""

import numpy as np
import torch.nn.functional as F

from tilewright import graph as graphs
from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, kernels, patterns
from tilewright_study.baselines.sparse import _forms

MASKED = True
DENSE = False
VARIANTS = ("torch", *kernels.NAMES)


def part(graph):
    """The pattern of the kept tokens alone. Raises `Unavailable` for a pattern that keeps none."""
    common = patterns.kept(graph)
    if common is None:
        raise Unavailable("the pattern is not one of kept tokens and each query itself")
    n = len(common)
    return graphs.from_distinct_rows(
        np.array([0, n]), np.arange(n, dtype=np.int32), np.zeros(n, np.int32), n, meta=graph.meta
    )


def prepare(graph, *, variant, batch, heads, head_dim, dtype, device, **_):
    """See the contract of the package; graph: a `part`."""
    if variant == "torch":
        return Ready(F.scaled_dot_product_attention, 0, graph.n_rows * graph.n_cols)
    return _forms.dense(variant, graph, batch=batch, heads=heads, head_dim=head_dim, dtype=dtype, device=device)

"""Dense attention over all pairs by FlashAttention-4's kernel in CuTe."""

from tilewright.torch_attention import Ready
from tilewright_study.baselines.sparse import fa4

MASKED = False
DENSE = True
VARIANTS = ("cute",)


def prepare(graph, *, head_dim, dtype, device, **_):
    """See the contract of the package. ASSUME: as `fa4`."""
    _, interface = fa4.need(head_dim, dtype, device)

    def run(q, k, v):
        out, *_ = interface._flash_attn_fwd(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)

    return Ready(run, 0, graph.n_rows * graph.n_cols)

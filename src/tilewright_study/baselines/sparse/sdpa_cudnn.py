"""Dense attention over all pairs by cuDNN's fused attention."""

from tilewright_study.baselines.sparse import _forms

MASKED = False
DENSE = True
VARIANTS = ("cudnn",)


def prepare(graph, *, batch, heads, head_dim, dtype, device, **_):
    """See the contract of the package."""
    return _forms.dense("cudnn", graph, batch=batch, heads=heads, head_dim=head_dim, dtype=dtype, device=device)

"""Dense attention over all pairs by FlashAttention-2 as torch has it."""

from tilewright_study.baselines.sparse import _forms

MASKED = False
DENSE = True
VARIANTS = ("flash",)


def prepare(graph, *, batch, heads, head_dim, dtype, device, **_):
    """See the contract of the package."""
    return _forms.dense("flash", graph, batch=batch, heads=heads, head_dim=head_dim, dtype=dtype, device=device)

"""FlashAttention-2's kernel for packed batches, by torch's own operator."""

from tilewright.torch_attention import kernels
from tilewright_study.baselines.packed import Ready, lengths, need_flash, rows


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    need_flash(packing, heads, head_dim, dtype)
    starts, longest = packing.starts, max(lengths(packing))
    return Ready(lambda q, k, v: kernels.varlen(q, k, v, starts, longest), *rows(packing))

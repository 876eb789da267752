"""FlashAttention-2's kernel for packed batches, by torch's own operator."""

from tilewright.kernels.baselines import backends
from tilewright.kernels.ragged_baselines import Ready, lengths, need_flash, rows


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    need_flash(packing, heads, head_dim, dtype)
    starts, longest = packing.starts, max(lengths(packing))
    return Ready(lambda q, k, v: backends.varlen(q, k, v, starts, longest), *rows(packing))

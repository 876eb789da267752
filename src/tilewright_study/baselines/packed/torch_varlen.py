"""``torch.nn.attention.varlen``."""

from tilewright_study.baselines.packed import Ready, lengths, need_flash, rows


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    from torch.nn.attention.varlen import varlen_attn

    need_flash(packing, heads, head_dim, dtype)
    starts, longest = packing.starts, max(lengths(packing))
    return Ready(lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest), *rows(packing))

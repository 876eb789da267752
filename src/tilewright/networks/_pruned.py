"""Attention over all tokens of which some have been pruned, where who is kept differs from image to image.

Every token sees the kept ones and itself, ``A = 1 keepᵀ | I``, but with `unmasked`. Contract of what `HIDING` names:
``prepare(seen, dtype) -> run(q, k, v)`` for bool seen [B, N], who is kept, and q, k, v [B, H, N, D].
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.networks.attentions.dense import MASK_BYTES
from tilewright.torch_attention import flex


def masked(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """Masked scaled-dot-product attention, the oracle; a mask too large for memory is made some rows at a time."""
    n_batch, n = seen.shape
    place = torch.arange(n, device=seen.device)
    step = max(1, MASK_BYTES // (n_batch * n * dtype.itemsize))

    def rows(lo):
        sees = seen[:, None] | (place[lo : lo + step, None] == place)
        return torch.zeros(sees.shape, dtype=dtype, device=seen.device).masked_fill_(~sees, -torch.inf)[:, None]

    whole = rows(0) if step >= n else None

    def run(q, k, v):
        if whole is not None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=whole)
        parts = [
            F.scaled_dot_product_attention(q[:, :, lo : lo + step], k, v, attn_mask=rows(lo))
            for lo in range(0, n, step)
        ]
        return torch.cat(parts, dim=2)

    return run


def flexed(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """The same attention by compiled FlexAttention; the block mask is this batch's, the code that of the shape."""
    mask, compiled = block_mask(seen), compiled_flex(seen.device.type)

    def run(q, k, v):
        # FlexAttention has no backward on a CPU and refuses inputs that ask for one.
        with torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)

    return run


def block_mask(seen: torch.Tensor) -> BlockMask:
    """FlexAttention's mask of tokens that see themselves and those in seen [B, N], which reads no single pairs."""
    n = seen.shape[1]
    n_blocks = -(-n // flex.BLOCK)
    entries = F.pad(seen, (0, n_blocks * flex.BLOCK - n)).unflatten(1, (n_blocks, flex.BLOCK)).sum(2)
    own = torch.eye(n_blocks, dtype=torch.bool, device=seen.device)
    # As torch has it, blocks over the edge are never full.
    inside = torch.arange(1, 1 + n_blocks, device=seen.device) * flex.BLOCK <= n
    full = (entries == flex.BLOCK)[:, None] & inside[:, None]
    tables = []
    for kind in (((entries > 0)[:, None] | own) & ~full, full):
        first = (~kind).to(torch.int8).argsort(dim=2, stable=True)
        tables += [kind.sum(2, dtype=torch.int32)[:, None], first.to(torch.int32)[:, None]]

    def mask_mod(b, h, q, kv):
        return seen[b, kv] | (q == kv)

    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=flex.BLOCK, mask_mod=mask_mod, seq_lengths=(n, n))  # type: ignore[misc]  # mypy does not know the length of what is unpacked


def unmasked(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """Attention among all tokens, pruned or not: what pruning is to save."""
    return F.scaled_dot_product_attention


@functools.cache
def compiled_flex(device: torch.device | str) -> Callable:
    """FlexAttention compiled for `device`, a kind. Raises `Unavailable` without a compiler."""
    flex.need_compiler(device)
    # fullgraph: beyond its limit of recompilations torch would otherwise run uncompiled, without a warning.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


# Attention that keeps all tokens and hides the pruned ones; the others drop them.
HIDING = {"dense": masked, "flex": flexed, "full": unmasked}

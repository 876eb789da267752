"""FlexAttention over lists of whole blocks that differ between heads and lie on the device, as choosers leave them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.core import _internals
from tilewright.torch_attention import flex


def prepare(flags: torch.Tensor, shape: tuple[int, int], **_: Any) -> Callable:
    """``attend(q, k, v)``: FlexAttention of blocks of `flex.BLOCK` queries to whole blocks of keys.

    flags: bool [B, H, blocks of queries, blocks of keys], where the tokens are. shape: (N_q, N_k). The first call
    compiles, later ones only for other shapes. Raises `Unavailable`.
    """
    flex.need_compiler(flags.device.type)
    n_keys = shape[1]
    # A block over the edge is not full: its keys are asked for one by one.
    whole = torch.arange(flags.shape[3], device=flags.device) < n_keys // flex.BLOCK
    tables = [listed(flags & kind) for kind in (~whole, whole)]
    mask = BlockMask.from_kv_blocks(  # type: ignore[misc]  # mypy does not know the length of what is unpacked
        *tables[0], *tables[1], BLOCK_SIZE=flex.BLOCK, mask_mod=lambda b, h, q, kv: kv < n_keys, seq_lengths=shape
    )
    limit = _internals.recompile_limit(flex.COMPILATIONS)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q, k, v):
        with limit, torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)

    return attend


def listed(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [..., Q] and numbers [..., Q, K] of the flagged blocks, those that count first; int32, on their device."""
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.uint8).argsort(dim=-1, stable=True).int()

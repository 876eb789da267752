"""FlashAttention-4's block-sparse attention in CuTe, which asks for single pairs in the blocks that it fills partly."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu, patterns

MASKED = True
DENSE = False
# Block sizes that its Hopper kernel takes.
VARIANTS = ("128", "64")

# Bits are there for all places of a tile, also behind the last token.
_PADDED = 256


def prepare(graph, *, device, max_bytes, variant, **_):
    """See the contract of the package.

    The pattern's bits are looked up by the mask function, row by row. ASSUME: version 4.0.0b36 of the interface.
    """
    need_gpu(device)
    try:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
        from flash_attn.cute.interface import _flash_attn_fwd
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute cannot be imported: {error}") from error
    block = int(variant)
    found = patterns.kinds(graph, block)
    lists = [table for kind in found for table in patterns.listed(kind, device)]
    tables = [torch.from_numpy(table).to(device) for table in _tables(graph, max_bytes)]
    sparse = BlockSparseTensorsTorch(*lists, block_size=(block, block))
    mask_mod = _mask_mod()

    def run(q, k, v):
        tokens = (x.transpose(1, 2) for x in (q, k, v))
        out, *_ = _flash_attn_fwd(*tokens, mask_mod=mask_mod, block_sparse_tensors=sparse, aux_tensors=tables)
        return out.transpose(1, 2)

    return Ready(run, sum(4 * table.numel() for table in (*lists, *tables)), int(np.sum(found)) * block * block)


def _tables(graph, max_bytes):
    """int32 [N_q, padded], the distinct row of each query, and [C, words], the bits of the distinct rows."""
    bits = patterns.bits(graph, max_bytes)
    bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % (_PADDED // 8))))
    return np.pad(graph.row_id, (0, -graph.n_rows % _PADDED)).astype(np.int32), bits.view("<i4")


def _mask_mod():
    """FlashAttention-4's mask function over `_tables`."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def mask_mod(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        row_id, bits = aux_tensors
        word = bits[row_id[m_idx[0]], n_idx[0] // 32]
        bit = utils.scalar_to_ssa((word >> (n_idx[0] % 32)) & 1, cutlass.Int32)
        return bit != utils.scalar_to_ssa(0, cutlass.Int32)

    return mask_mod

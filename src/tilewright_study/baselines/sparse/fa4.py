"""FlashAttention-4's block-sparse attention in CuTe, which asks for single pairs in the blocks that it fills partly."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu, patterns
from tilewright_study.baselines import flex_blocks
from tilewright_study.baselines.sparse import _forms

MASKED = True
DENSE = False
# Blocks that its Hopper kernel takes, queries x keys. It splits no row there.
_BLOCKS = ("128x128", "64x64", "64x32", "64x16")
VARIANTS = (*_BLOCKS, *(block + _forms.SPLIT for block in _BLOCKS))

# Bits are there for all places of a tile, also behind the last token.
_PADDED = 256


def prepare(graph, **setting):
    """See the contract of the package.

    The pattern's bits are looked up by the mask function, row by row. ASSUME: version 4.0.0b36 of the interface.
    """
    return _forms.split(_prepare, graph, **setting)


def blocks(flags, shape, *, block, head_dim, dtype, device):
    """See the contract of the package."""
    package = need(head_dim, dtype, device)
    # No block is filled partly: what a kernel attends first, the last block, it cuts off behind the last key by itself.
    none = flags[..., :1] & False
    return _attending(package, [*flex_blocks.listed(none), *flex_blocks.listed(flags)], block)


def _prepare(graph, *, variant, head_dim, dtype, device, max_bytes, **_):
    package = need(head_dim, dtype, device)
    rows, keys = map(int, variant.split("x"))
    found = patterns.kinds(graph, rows, keys)
    lists = [table for kind in found for table in patterns.listed(kind, device)]
    tables = [torch.from_numpy(table).to(device) for table in _tables(graph, max_bytes)]
    attend = _attending(package, lists, (rows, keys), mask_mod=_mask_mod(), aux_tensors=tables)
    return Ready(attend, sum(4 * table.numel() for table in (*lists, *tables)), int(np.sum(found)) * rows * keys)


def need(head_dim, dtype, device):
    """The package's modules of lists and of calls. Raises `Unavailable` unless it is there and takes such tokens."""
    need_gpu(device)
    try:
        from flash_attn.cute import block_sparsity, interface
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute cannot be imported: {error}") from error
    if dtype == torch.float32 or head_dim % 8 or head_dim > 256:
        raise Unavailable(f"takes 16-bit types and head dims 8, 16, ..., 256, found {dtype} and {head_dim}")
    return block_sparsity, interface


def _attending(package, lists, block, **masked):
    """``attend(q, k, v)`` by the counts and numbers of blocks that are filled partly, and of full ones."""
    block_sparsity, interface = package
    sparse = block_sparsity.BlockSparseTensorsTorch(*lists, block_size=block)

    def attend(q, k, v):
        tokens = (x.transpose(1, 2) for x in (q, k, v))
        out, *_ = interface._flash_attn_fwd(*tokens, block_sparse_tensors=sparse, **masked)
        return out.transpose(1, 2)

    return attend


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

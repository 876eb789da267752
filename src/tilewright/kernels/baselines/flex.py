"""FlexAttention, compiled: block-sparse attention that reads the pattern's bits in the blocks that it fills partly."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.kernels.baselines import Ready, Unavailable

MASKED = True
DENSE = False

# Block size of FlexAttention's masks; its default.
BLOCK = 128
# Patterns, shapes and dtypes that one process may compile; torch's own limit of 8 is less than a few networks need.
COMPILATIONS = 256


def prepare(graph, *, dtype, max_bytes, mask_mod=None, score_mod=None):
    """Compiled FlexAttention over `graph` in its own order; see the contract of the package.

    mask_mod: a FlexAttention ``mask_mod`` of the same pattern; default one that looks the pair up in the bits of the
    distinct rows. score_mod: FlexAttention's, for a bias. The first call compiles.
    """
    need_compiler()
    size = 0
    if mask_mod is None:
        size = graph.n_classes * -(-graph.n_cols // 8)
        if size > max_bytes:
            raise Unavailable(f"the pattern's bits take {size:,} bytes; at most {max_bytes:,} are allowed")
        mask_mod = _lookup(graph)
    kinds = _kinds(graph)
    tables = list(_listed(*kinds))
    mask = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=graph.shape)
    # fullgraph: past the limit an error, where otherwise torch would go on without compiling.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def run(q, k, v):
        # FlexAttention has no backward on a CPU and refuses inputs that ask for one. Results are not inference tensors:
        # the layers of a network that read them may be asked for theirs.
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask, score_mod=score_mod)

    held = size + 4 * sum(table.numel() for table in tables)
    return Ready(run, held, int(np.sum(kinds)) * BLOCK * BLOCK)


def _lookup(graph):
    """A ``mask_mod`` that reads a bitmap [C, ceil(N_k / 8)] of the distinct rows."""
    bits = np.zeros((graph.n_classes, -(-graph.n_cols // 8)), np.uint8)
    owner = np.repeat(np.arange(graph.n_classes), np.diff(graph.indptr))
    np.bitwise_or.at(bits, (owner, graph.indices >> 3), (1 << (graph.indices & 7)).astype(np.uint8))
    bits, row_class = torch.from_numpy(bits), torch.from_numpy(graph.row_class)

    def mask_mod(b, h, q, kv):
        return (bits[row_class[q], kv >> 3] >> (kv & 7)) & 1 == 1

    return mask_mod


def _kinds(graph):
    """bool [Q, K] twice: blocks that hold some pair but not all, and full ones. Blocks over the edge are never full."""
    n_q, n_k = (-(-n // BLOCK) for n in graph.shape)
    owner = np.repeat(np.arange(graph.n_classes), np.diff(graph.indptr))
    of_class = np.bincount(owner * n_k + graph.indices // BLOCK, minlength=graph.n_classes * n_k).reshape(-1, n_k)
    entries = np.stack([of_class[graph.row_class[lo : lo + BLOCK]].sum(0) for lo in range(0, n_q * BLOCK, BLOCK)])
    full = entries == BLOCK * BLOCK
    return (entries > 0) & ~full, full


def _listed(*kinds):
    """For each bool [Q, K]: int32 [1, 1, Q] counts and [1, 1, Q, K] block numbers, those that count first."""
    for kind in kinds:
        yield torch.from_numpy(kind.sum(1, dtype=np.int32))[None, None]
        yield torch.from_numpy(np.argsort(~kind, axis=1, kind="stable").astype(np.int32))[None, None]


def need_compiler():
    """Raise `Unavailable` unless torch finds a C++ compiler that works."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise Unavailable(f"no C++ compiler to compile FlexAttention with: {error}") from error

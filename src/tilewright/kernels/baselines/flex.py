"""FlexAttention, compiled: block-sparse attention that asks for single pairs in the blocks that it fills partly."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.kernels.baselines import Ready, Unavailable, patterns

MASKED = True
DENSE = False
# Block size of its masks: the default.
VARIANTS = ("128",)

BLOCK = 128
# Patterns, shapes and dtypes that one process may compile; torch's own limit of 8 is less than a few networks need.
COMPILATIONS = 256


def prepare(graph, *, max_bytes, device="cpu", variant="128", mask_mod=None, score_mod=None, **_):
    """Compiled FlexAttention over `graph` in its own order; see the contract of the package.

    mask_mod: a FlexAttention ``mask_mod`` of the same pattern, or of more pairs in blocks that `graph` fills partly;
    default `pairs`. score_mod: FlexAttention's, for a bias. The first call compiles.
    """
    need_compiler(device)
    size = 0
    if mask_mod is None:
        mask_mod, size = pairs(graph, max_bytes, device)
    block = int(variant)
    found = patterns.kinds(graph, block)
    tables = [table for kind in found for table in patterns.listed(kind, device)]
    mask = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=graph.shape)
    # On a GPU a tile may be larger than a block of less than the default size, unless told.
    options = {"BLOCK_M": block, "BLOCK_N": block} if device == "cuda" and block < BLOCK else None
    # Made once: that takes the host as long as a small pattern takes a GPU. fullgraph: past the limit an error, where
    # otherwise torch would go on without compiling.
    limit = torch._dynamo.config.patch(recompile_limit=COMPILATIONS)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def run(q, k, v):
        # FlexAttention has no backward on a CPU and refuses inputs that ask for one. Results are not inference tensors:
        # the layers of a network that read them may be asked for theirs.
        q, k, v = q.detach(), k.detach(), v.detach()
        with torch.no_grad(), limit:
            return compiled(q, k, v, block_mask=mask, score_mod=score_mod, kernel_options=options)

    held = size + 4 * sum(table.numel() for table in tables)
    return Ready(run, held, int(np.sum(found)) * block * block)


def pairs(graph, max_bytes, device):
    """``(mask_mod, bytes)``: by arithmetic on the places of tokens where a rule is known, else by the pattern's bits.

    Raises `Unavailable` above `max_bytes`.
    """
    if (rule := patterns.rule(graph)) is not None:
        of_query, of_key = (torch.from_numpy(np.ascontiguousarray(places)).to(device) for places in rule[:2])
        return _arithmetic(of_query, of_key, rule[2]), 4 * (len(of_query) + len(of_key))
    table = torch.from_numpy(patterns.bits(graph, max_bytes)).to(device)
    row_class = torch.from_numpy(graph.row_class).to(device)

    def mask_mod(b, h, q, kv):
        return (table[row_class[q], kv >> 3] >> (kv & 7)) & 1 == 1

    return mask_mod, table.numel()


def _arithmetic(of_query, of_key, reach):
    """The ``mask_mod`` of a `patterns.rule`."""

    def mask_mod(b, h, q, kv):
        here, there = of_query[q], of_key[kv]
        far = ((here >> 15) - (there >> 15)).abs().maximum(((here & 0x7FFF) - (there & 0x7FFF)).abs())
        return (here < 0) | (there < 0) | (far <= reach)

    return mask_mod


def need_compiler(device="cpu"):
    """Raise `Unavailable` unless torch can compile for `device`: for a CPU it needs a C++ compiler that works."""
    from torch._inductor import cpp_builder, exc

    if device == "cuda":
        return
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise Unavailable(f"no C++ compiler to compile FlexAttention with: {error}") from error

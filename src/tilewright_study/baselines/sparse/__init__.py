"""What a schedule is measured against (stage T5).

Contract of a member module:
    ``MASKED``: whether it computes the pattern, or attention over all pairs.
    ``DENSE``: whether it works through all pairs in any case.
    ``VARIANTS``: names of the forms that it comes in, such as block sizes; the fastest that is right is reported.
    ``prepare(graph, *, variant, batch, heads, head_dim, dtype, device, max_bytes) -> Ready``: one form, ready to be
        timed, for tokens on `device` (``cpu`` or ``cuda``) in the order of `graph`, with tables of at most `max_bytes`.
        What a network does once, compiling included, is done by then or in the first call. Arguments that make no
        difference to a member end in its ``**_``. Raises `Unavailable`.
    ``part(graph) -> Graph``: of a member that computes a part of the pattern only, that part, which takes the graph's
        place in all that is measured and reported. Raises `Unavailable`.
    ``blocks(flags, shape, *, block, head_dim, dtype, device) -> attend(q, k, v)``: of a member of `BLOCKS`, attention
        of blocks of queries to whole blocks of keys. flags: bool [1, H, blocks of queries, blocks of keys], where the
        tokens are. shape: (N_q, N_k). block: queries and keys of one. Raises `Unavailable`.
"""

from tilewright.core import registry
from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu

__all__ = ("BLOCKS", "COMPILED", "DENSE", "NAMES", "Ready", "Unavailable", "member", "need_gpu")

NAMES = (
    "sdpa_dense", "sdpa_mask", "flex", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_windows", "sdpa_kept",
    "sdpa_compacted", "fa4", "cudnn_flex", "flashinfer", "natten",
    "fa4_dense", "flash3_dense", "cudnn_blocks",
)  # fmt: skip

# Those that attend over all pairs, whatever the pattern: the fastest of them is what "dense" means.
DENSE = ("sdpa_dense", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "fa4_dense", "flash3_dense")
# Those that attend by lists of whole blocks that differ between heads, and the blocks that they take, queries x keys.
_SMALLER = ("128x128", "128x64", "64x64")
BLOCKS = {"flex": ("128x128",), "fa4": _SMALLER, "flashinfer": _SMALLER, "cudnn_blocks": ("64x64",)}
# Those that torch compiles in their first call, and keeps on disk.
COMPILED = ("flex",)


def member(name):
    """The module of a baseline. Raises `UnknownNameError`."""
    return registry.member(__name__, "baseline", name, NAMES)

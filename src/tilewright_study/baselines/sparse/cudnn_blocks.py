"""cuDNN's block-sparse attention, by lists of whole blocks; on Hopper it takes no masks of single pairs.

Never run against the package itself: the interface is that of its documentation, which calls it experimental.
"""

import torch
import torch.nn.functional as F

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import need_gpu
from tilewright_study.baselines import flex_blocks
from tilewright_study.baselines.sparse._forms import need_tokens

MASKED = True
DENSE = False
VARIANTS = ("64x64",)
# Head dims of its Hopper kernel.
HEAD_DIMS = (64, 96, 128)


def prepare(graph, *, head_dim, dtype, device, **_):
    """See the contract of the package: it attends by `blocks` alone."""
    _need(head_dim, dtype, device)
    raise Unavailable("attends to whole blocks of keys, and takes no pattern of single pairs")


def blocks(flags, shape, *, block, head_dim, dtype, device):
    """See the contract of the package. ASSUME: versions 1.29 to 1.32 of the frontend."""
    attend = _need(head_dim, dtype, device).block_sparse_attention_forward
    (rows, keys), (n_q, n_k) = block, shape
    counts, numbers = flex_blocks.listed(flags)
    sizes = torch.full((flags.shape[3],), keys, dtype=torch.int32, device=flags.device)
    sizes[-1] -= keys * len(sizes) - n_k
    lists = {"q2k_block_nums": counts, "block_sizes": sizes, "sparse_block_size": keys}

    def run(q, k, v):
        # Its queries are whole blocks.
        q = F.pad(q, (0, 0, 0, -n_q % rows))
        return attend(q, k, v, numbers, **lists)["o_tensor"][:, :, :n_q]

    return run


def _need(head_dim, dtype, device):
    """The package. Raises `Unavailable` unless it is there and takes such tokens."""
    need_gpu(device)
    try:
        from cudnn import BSA
    except ImportError as error:
        raise Unavailable(f"cudnn's block-sparse attention cannot be imported: {error}") from error
    need_tokens(dtype, head_dim, HEAD_DIMS)
    return BSA

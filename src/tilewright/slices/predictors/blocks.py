"""What block-sparse attention chooses by: means of queries against means of keys, a code for each block of keys.

Source: SpargeAttn (Zhang et al., arXiv 2502.18137) and the Top-CDF baseline of FG-Attn (arXiv 2509.16518). The softmax
of the scores of means, each block weighed by its keys, is chosen from by ``mass``. Blocks whose keys are unlike each
other are listed by all groups, groups whose queries are unlike each other list all keys; neither counts as mass.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from tilewright.slices.predictors import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.slices.cpu.selection import Selection
    from tilewright.slices.layout import Layout


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """block: keys of a block. similarity: blocks whose mean cosine to their mean is smaller are kept whole; published
    are 0.5 to 0.6, -1 keeps none."""

    block: Literal[16, 64, 128] = 64
    similarity: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.5

    free = True


def group_bytes(params: Params, layout: "Layout", head_dim: int) -> int:
    """See the contract: codes of blocks, and the means of queries and keys."""
    blocks = -(-layout.keys // params.block)
    return layout.keys + blocks + 4 * head_dim * (1 + -(-blocks // layout.groups)) + 128


def codes(selection: "Selection", q: "Tensor", k: "Tensor", params: Params, *, scale: float) -> "Tensor":
    """See the contract."""
    return selection.blocks(q, k, params.block, params.similarity, scale)

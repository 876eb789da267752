"""Attention by lists of blocks of 64 keys for groups of 128 queries: the peers' granularity, by the kernel of slices.

Blocks are chosen as block-sparse attention does it, by means of queries and keys
(`tilewright.slices.predictors.blocks`).
"""

from tilewright.networks.video_attentions import slices


class Settings(slices.Settings, frozen=True, forbid_unknown_fields=True):
    """See `slices.Settings`; width: keys of a block."""

    by: str = "blocks"
    width: int = 64


Attention = slices.Attention

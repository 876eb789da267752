"""Attention by lists of blocks of 64 keys for groups of 128 queries: the peers' granularity, by the kernel of slices.

Blocks are chosen as block-sparse attention does it, by means of queries and keys
(`tilewright.slices.predictors.blocks`).
"""

from tilewright.networks.video_attentions import _lists


class Settings(_lists.StepSettings, frozen=True, forbid_unknown_fields=True):
    """See `_lists.StepSettings`; width: keys of a block."""

    by: str = "blocks"
    width: int = 64


Attention = _lists.Attention

"""Slices: attention of groups of queries to lists of single keys, chosen on the device.

A group is `rows` consecutive queries of a head; its list says which keys they attend to. Lists are tensors of a fixed
layout (`Layout`, `SliceLists`): they are made and used on the device, and the host never waits. Results are softmax
attention over the listed keys alone, without keys that nobody chose. Where a list does not fit its room all results are
NaN, and `SliceLists.check` says which one. Source: `FG-Attn`, arXiv 2509.16518.
"""

from tilewright.slices.attention import attend, dense, merge, recall
from tilewright.slices.layout import Layout, SliceLists, make_layout
from tilewright.slices.making import from_indices, from_mask, from_mask_mod, unpack
from tilewright.slices.prediction import predict
from tilewright.slices.remainder import rest
from tilewright.slices.steps import Steps

__all__ = [
    "Layout",
    "SliceLists",
    "Steps",
    "attend",
    "dense",
    "from_indices",
    "from_mask",
    "from_mask_mod",
    "make_layout",
    "merge",
    "predict",
    "recall",
    "rest",
    "unpack",
]

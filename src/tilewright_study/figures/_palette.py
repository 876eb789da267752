"""Names, colours and marks of contenders: one look for each, by its name, in every figure. No job that measures imports
this module."""

import zlib
from dataclasses import dataclass

from tilewright.networks.batching import UNPRUNED


@dataclass(frozen=True)
class Look:
    """How a contender is shown: its `label`, the `colour` of its bars and lines, and the `marker` on its lines."""

    label: str
    colour: str
    marker: str

    @property
    def line(self):
        """Arguments of a line, which its label stands beside."""
        return {"color": self.colour, "marker": self.marker, "markersize": 4.5, "linewidth": 1.5}


# Okabe and Ito's palette and Tol's, distinct under every common colour blindness within each group below.
TILEWRIGHT = Look("Tilewright", "#0072B2", "o")
BLUE = TILEWRIGHT.colour
DENSE = "#777777"
# Attention of one layer, of whole networks and of packed images.
ATTENTION = {
    "tilewright": TILEWRIGHT,
    "full": Look("dense SDPA", DENSE, "s"),
    "dense": Look("masked SDPA", "#E377C2", "v"),
    "native": Look("as published", "#999933", "D"),
    "flex": Look("FlexAttention", "#E69F00", "^"),
}
SPARSE = {
    "tilewright": TILEWRIGHT,
    "sdpa_dense": Look("dense SDPA", DENSE, "s"),
    "sdpa_flash": Look("dense FlashAttention", "#111111", "X"),
    "sdpa_cudnn": Look("dense cuDNN", "#999999", "P"),
    "sdpa_efficient": Look("memory-efficient SDPA", "#BBBBBB", "8"),
    "sdpa_mask": Look("masked SDPA", "#E377C2", "v"),
    "flex": ATTENTION["flex"],
    "sdpa_windows": Look("SDPA of windows", "#332288", ">"),
    "sdpa_kept": Look("SDPA of gathered keys", "#117733", "<"),
    "sdpa_compacted": Look("SDPA of kept tokens", "#DDCC77", "d"),
    "fa4": Look("FlashAttention 4", "#882255", "D"),
    "cudnn_flex": Look("cuDNN flex", "#009E73", "p"),
    "flashinfer": Look("FlashInfer", "#56B4E9", "h"),
    "natten": Look("NATTEN", "#D55E00", "*"),
    "fa4_dense": Look("dense FlashAttention 4", "#8000E0", "1"),
    "flash3_dense": Look("dense FlashAttention 3", "#400040", "2"),
    "cudnn_blocks": Look("cuDNN blocks", "#661100", "H"),
}
PACKED = {
    "tilewright": TILEWRIGHT,
    "sdpa_mask": Look("padded, masked SDPA", "#E377C2", "v"),
    "sdpa_flash": Look("padded, no mask (a bound)", "#111111", "X"),
    "flash_varlen": Look("FlashAttention varlen", "#D55E00", "s"),
    "flash3_varlen": Look("FlashAttention-3 varlen", "#882255", "D"),
    "torch_varlen": Look("torch varlen", "#009E73", "P"),
    "nested": Look("NestedTensor", "#56B4E9", "p"),
    "flex": ATTENTION["flex"],
}
BATCHINGS = {
    "ragged": Look("Tilewright, packed", BLUE, "o"),
    "varlen": Look("FlashAttention, packed", "#D55E00", "s"),
    "gathered": Look("gathered", "#009E73", "D"),
    "padded_kept": Look("padded to the longest kept", "#E69F00", "^"),
    "padded": Look("padded to the full length", DENSE, "v"),
    "padded_unfused": Look("as published, unfused", "#999933", "<"),
}
WHOLE = {UNPRUNED: Look("not pruned", "#222222", "X")}
ORDERS = {
    "none": Look("none", "#56B4E9", "X"),
    "rcm": Look("RCM", "#E69F00", "s"),
    "hc": Look("HC", "#CC79A7", "^"),
    "ic": Look("IC", "#009E73", "D"),
    "window": Look("window", BLUE, "o"),
}
FAMILIES = {
    "vil": Look("Vision Longformer", BLUE, "o"),
    "regionvit": Look("RegionViT", "#E69F00", "s"),
    "dynamicvit": Look("DynamicViT", "#009E73", "^"),
}
# Lists of keys: by the shape of their groups, queries x keys, where all are exact, and by who chooses the keys.
GROUPS = {
    "128x1": Look("slices, 128 × 1", BLUE, "o"),
    "64x1": Look("slices, 64 × 1", "#56B4E9", "p"),
    "128x16": Look("blocks, 128 × 16", "#009E73", "D"),
    "128x64": Look("blocks, 128 × 64", "#D55E00", "s"),
    "128x128": Look("blocks, 128 × 128", "#882255", "^"),
}
CHOOSERS = {
    "oracle": Look("exact shares", BLUE, "o"),
    "pooled32": Look("pools of 32", "#CC79A7", "P"),
    "pooled128": Look("pools of 128", "#999933", "X"),
    "column": Look("columns", "#117733", "v"),
    "blocks": Look("blocks", "#D55E00", "s"),
}
# Who chooses how many keys each head lists.
BUDGETS = {
    "single": Look("one share for all heads", DENSE, "s"),
    "mass": Look("one mass for all heads", "#E69F00", "^"),
    "greedy": Look("each head, greedy", "#CC79A7", "P"),
    "highs": Look("each head, integer program", BLUE, "o"),
    "gurobi": Look("each head, Gurobi", "#56B4E9", "p"),
}
PRUNERS = {
    "threshold_l2": Look("Threshold-L2", "#E69F00", "^"),
    "dynamicvit": Look("DynamicViT", BLUE, "o"),
    "evit": Look("EViT", "#009E73", "D"),
    "ats": Look("ATS", "#CC79A7", "s"),
}
RUNNERS = {
    "closed": Look("paths, controlled", BLUE, "o"),
    "target": Look("paths, some late", "#CC79A7", "P"),
    "open": Look("paths, open loop", "#56B4E9", "p"),
    "full": Look("best path always", DENSE, "v"),
    "fixed": Look("one path", "#E69F00", "^"),
    "static": Look("static networks", "#882255", "D"),
    "joint": Look("paths and static networks", "#332288", "*"),
    "oracle": Look("oracle", "#009E73", "X"),
}
MEMORIES = {
    "pub": Look("pub: wide words, one port", BLUE, "o"),
    "dp": Look("dp: single words, two ports", "#E69F00", "^"),
}
NEIGHBORHOODS = {
    "tilewright": TILEWRIGHT,
    "natten": SPARSE["natten"],
    "flex": ATTENTION["flex"],
    "gather": Look("gathered keys, eager torch", "#117733", "<"),
    "sdpa_dense": SPARSE["sdpa_dense"],
}
# In one figure stand members of one group.
GROUPED = {
    "attention": ATTENTION,
    "sparse": SPARSE,
    "packed": PACKED,
    "batchings": BATCHINGS | WHOLE,
    "orders": ORDERS,
    "families": FAMILIES,
    "groups": GROUPS,
    "choosers": CHOOSERS,
    "budgets": BUDGETS,
    "pruners": PRUNERS,
    "runners": RUNNERS,
    "memories": MEMORIES,
    "neighborhoods": NEIGHBORHOODS,
}
# Of what bears a name that no group holds; all are away from the blue of Tilewright.
_FURTHER = ("#44AA99", "#999933", "#117733", "#AA4499", "#D55E00", "#882255")
_MARKERS = "<>dHP*8"


def look(name, group):
    """The `Look` of a name in a group; one that the group does not hold is the same in every figure."""
    known = GROUPED[group]
    if name in known:
        return known[name]
    code = zlib.crc32(name.encode())
    return Look(name, _FURTHER[code % len(_FURTHER)], _MARKERS[code % len(_MARKERS)])


def in_order(names, group):
    """`names`, once each: as the group has them, then others by name."""
    known = list(GROUPED[group])
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))

"""Slices: attention of groups of queries to lists of single keys, chosen on the device.

A group is `rows` consecutive queries of a head; its list says which keys they attend to. Lists are tensors of a fixed
layout (`Layout`, `SliceLists`): they are made and used on the device, and the host never waits. Results are softmax
attention over the listed keys alone, without keys that nobody chose. Where a list does not fit its room all results are
NaN, and `SliceLists.check` says which one. Source: `FG-Attn`, arXiv 2509.16518.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.slices.attention import attend, dense, merge, recall
    from tilewright.slices.budgets import Budgets
    from tilewright.slices.layout import Layout, SliceLists, make_layout
    from tilewright.slices.lists import from_indices, from_mask, from_mask_mod, unpack
    from tilewright.slices.prediction import predict
    from tilewright.slices.remainder import rest
    from tilewright.slices.steps import Steps

# Loaded when asked for: Snakemake imports `predictors`, and must not load torch.
_LATER = {
    **dict.fromkeys(("attend", "dense", "merge", "recall"), "attention"),
    **dict.fromkeys(("Layout", "SliceLists", "make_layout"), "layout"),
    **dict.fromkeys(("from_indices", "from_mask", "from_mask_mod", "unpack"), "lists"),
    **{"predict": "prediction", "rest": "remainder", "Steps": "steps", "Budgets": "budgets"},
}

__all__ = [
    "Budgets",
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


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_LATER[name]}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

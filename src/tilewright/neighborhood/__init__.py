"""Neighbourhood attention: each token of a 1-, 2- or 3-D grid attends to a box of tokens around it, by rule.

No list of pairs is held, so that a grid may have millions of tokens. Tokens stay in the order of the grid, row by row.
`Rule` says which keys a query sees: the windows of NATTEN, moved inwards at borders, or cut there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.neighborhood.attention import attend
    from tilewright.neighborhood.plans import NeighborhoodPlan, plan
    from tilewright.neighborhood.rule import Rule

# Loaded when asked for: the models of patterns import `rule`, and must not load torch.
_LATER = {"attend": "attention", "NeighborhoodPlan": "plans", "plan": "plans", "Rule": "rule"}

__all__ = ["NeighborhoodPlan", "Rule", "attend", "plan"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_LATER[name]}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Hierarchical clustering: the closest clusters merge until none fits (stage T2).

Takes the boxes of a grid where tokens turn out to lie on one (see `tilewright.attention.reorder._grid`). Else it merges
similar rows by the least increase of work under a cap and then puts the clusters in an order (see
`tilewright.attention.reorder._linkage`).
"""

from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder import _tuning
from tilewright.attention.reorder._axes import WIDE

if TYPE_CHECKING:
    from tilewright.graph import Graph

GRID = {
    "wide": (WIDE, 1.25, 8.0),
    "chain": ("tree", "growth"),
    "cap": (8, 16, 64),
    "neighbors": (8,),
    "col_block": (1, 8),
}


class Params(_tuning.Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings; None is tuned.

    col_block: columns of a quotient block. neighbors: candidates of each row. cap: most queries in a cluster. wide:
    rows that see more than this multiple of the median number of keys are ordered apart. chain: what orders the
    clusters, the tree of further merges or growth into groups of 64. grid: whether clusters are boxes where tokens turn
    out to lie on a grid; None where no setting of the clustering is given.
    """

    neighbors: Annotated[int, msgspec.Meta(ge=1)] | None = None
    chain: Literal["tree", "growth"] | None = None


def order(graph: "Graph", params: Params) -> tuple[NDArray[np.int32], NDArray[np.int32], _tuning.Settings]:
    """Order of the clusters, and of the rows within by the tree of merges (see `tilewright.attention.reorder`)."""
    from tilewright.attention.reorder import _quotient

    parts = cache(_quotient.parts)

    @cache
    def similar(q, neighbors):
        return _linkage().similar(q, neighbors)

    def arrange(graph, used):
        found = parts(graph, used["col_block"], used["wide"])
        near = [similar(q, used["neighbors"]) for q in found]
        chained = [
            _linkage().link(q, n, cap=used["cap"], chain=used["chain"]) for q, n in zip(found, near, strict=True)
        ]
        return _quotient.join(graph, list(zip(found, chained, strict=True)))

    return _tuning.order("hc", graph, params, GRID, arrange)


def _linkage():
    # Here: what is compiled takes long to load.
    from tilewright.attention.reorder import _linkage

    return _linkage

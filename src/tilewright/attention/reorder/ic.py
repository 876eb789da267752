"""Iterative clustering: groups grown from a seed by rows that fit the union of their keys (stage T2).

After Labini et al., "Blocking sparse matrices to leverage dense-specific multiplication" (arXiv 2202.05868), and the
IPDPS'26 artifact. Takes the boxes of a grid where tokens turn out to lie on one (see
`tilewright.attention.reorder._grid`), and else grows groups by the least added work (see
`tilewright.attention.reorder._growth`).
"""

from functools import cache
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder import _tuning
from tilewright.attention.reorder._axes import WIDE

if TYPE_CHECKING:
    from tilewright.graph import Graph

GRID = {"wide": (WIDE, 1.25, 8.0), "cap": (64, 32, 128), "col_block": (1, 8), "tau": (1.0, 0.5)}


class Params(_tuning.Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings; None is tuned.

    col_block: columns of a quotient block. tau: largest share of a group's rows x keys area that is empty. cap: most
    queries in a group. wide: rows that see more than this multiple of the median number of keys are ordered apart.
    grid: whether groups are boxes where tokens turn out to lie on a grid; None where no setting of the growth is given.
    """

    tau: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


def order(graph: "Graph", params: Params) -> tuple[NDArray[np.int32], NDArray[np.int32], _tuning.Settings]:
    """Order of the groups in which they were grown (see `tilewright.attention.reorder`)."""
    from tilewright.attention.reorder import _quotient

    parts = cache(_quotient.parts)

    def arrange(graph, used):
        # Here: what is compiled takes long to load.
        from tilewright.attention.reorder import _growth

        found = parts(graph, used["col_block"], used["wide"])
        return _quotient.join(graph, [(q, _growth.grow(q, cap=used["cap"], tau=used["tau"])) for q in found])

    return _tuning.order("ic", graph, params, GRID, arrange)

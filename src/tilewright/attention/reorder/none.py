"""The natural order: what every other order is compared with (stage T2)."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tilewright.attention.reorder._axes import key_order

if TYPE_CHECKING:
    from tilewright.graph import Graph


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """symmetric: as for every order, though keys keep their place either way."""

    symmetric: bool | None = None


def order(graph: "Graph", params: Params) -> tuple[np.ndarray, np.ndarray, dict[str, bool]]:
    """Identity permutations (see `tilewright.attention.reorder`)."""
    rows = np.arange(graph.n_rows, dtype=np.int32)
    cols, symmetric = key_order(graph, rows, params.symmetric)
    return rows, cols, {"symmetric": symmetric}

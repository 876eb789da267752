"""The natural order: what every other order is compared with (stage T2)."""

import msgspec
import numpy as np

from tilewright.attention.reorder._axes import key_order


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """symmetric: as for every order, though keys keep their place either way."""

    symmetric: bool | None = None


def order(graph, params):
    """Identity permutations (see `tilewright.attention.reorder`)."""
    rows = np.arange(graph.n_rows, dtype=np.int32)
    cols, symmetric = key_order(graph, rows, params.symmetric)
    return rows, cols, {"symmetric": symmetric}

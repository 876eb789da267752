"""The analytic order: tokens of one window of the model side by side (stage T2)."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tilewright.attention.reorder._axes import key_order
from tilewright.core.errors import PatternError

if TYPE_CHECKING:
    from tilewright.graph import Graph


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """symmetric: None sorts the keys by their own windows, where the model declares them."""

    symmetric: bool | None = None


def order(graph: "Graph", params: Params) -> tuple[np.ndarray, np.ndarray, dict[str, bool]]:
    """Stable sort of queries and keys by the windows that the model declares (see `tilewright.attention.reorder`).

    Raises `PatternError` when the model declares none.
    """
    if graph.row_hint is None:
        raise PatternError(
            f"order window: expected a pattern with declared windows, found none in "
            f"{graph.meta.get('model', 'this pattern')!r}; use one of none, rcm, hc, ic"
        )
    rows = np.argsort(graph.row_hint, kind="stable").astype(np.int32)
    if params.symmetric is None and graph.col_hint is not None:
        cols = np.argsort(graph.col_hint, kind="stable").astype(np.int32)
        return rows, cols, {"symmetric": bool(np.array_equal(rows, cols))}
    cols, symmetric = key_order(graph, rows, params.symmetric)
    return rows, cols, {"symmetric": symmetric}

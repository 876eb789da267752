"""How good an order is: the work of attention over the gathered keys of consecutive queries (stage T2)."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.attention.blocks.cut import best_gathered, gathered

if TYPE_CHECKING:
    from tilewright.graph import Graph


def work_fraction(graph: "Graph", row_order: np.ndarray | None = None, rows: int = 64, best_cut: bool = False) -> float:
    """Gathered work as a fraction of dense attention, see `attention.blocks.cut.gathered`.

    `row_order` int [N_q] (``order[new] = old``; None: as the graph stands). Groups are `rows` consecutive queries,
    the last one padded to as many; with `best_cut`, those of the best 1-D cut into at most `rows`, each counted with
    its own rows.
    """
    if row_order is not None:
        graph = replace(graph, row_id=graph.row_id[row_order])
    if best_cut:
        return best_gathered(graph, rows)[1]
    return gathered(graph, np.append(np.arange(0, graph.n_rows, rows), graph.n_rows), rows)

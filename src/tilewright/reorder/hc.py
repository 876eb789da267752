"""Hierarchical clustering: the closest clusters merge until none fits (stage T2).

The procedure of the IPDPS'26 artifact is ``variant: paper``. The default merges similar rows by the least increase of
work under a cap and goes on without it to order the clusters: see `tilewright.reorder.linkage`.
"""

from typing import Annotated, Literal

import msgspec

from tilewright.reorder import tuning
from tilewright.reorder.axes import WIDE, key_order

PUBLISHED = {"col_block": 16, "neighbors": 64, "mean_size": 8}
GRID = {"wide": (WIDE, 1.25, 8.0), "cap": (16, 8, 64), "neighbors": (8,), "col_block": (1, 8)}


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings; None is tuned (default) or the published value (paper).

    col_block: columns of a quotient block. neighbors: candidates of each row. cap: most queries in a cluster (default
    only). wide: rows that see more than this multiple of the median number of keys are ordered apart (default only).
    mean_size: mean rows of a cluster at which merging stops (paper only).
    """

    variant: Literal["default", "paper"] = "default"
    symmetric: bool | None = None
    col_block: Annotated[int, msgspec.Meta(ge=1)] | None = None
    neighbors: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cap: Annotated[int, msgspec.Meta(ge=1)] | None = None
    wide: Annotated[float, msgspec.Meta(ge=1)] | None = None
    mean_size: Annotated[float, msgspec.Meta(ge=1)] | None = None


def order(graph, params):
    """Order of the leaves of the tree of merges (see `tilewright.reorder`)."""
    from tilewright.reorder import published, quotient
    from tilewright.reorder.linkage import link

    def arrange(graph, used, **budget):
        def cluster(q):
            return link(q, cap=used["cap"], neighbors=used["neighbors"])

        return quotient.arrange(graph, cluster, col_block=used["col_block"], wide=used["wide"], **budget)

    part = tuning.sample(graph) if params.variant == "default" else None
    used = tuning.resolve(
        "hc",
        params,
        PUBLISHED,
        GRID,
        lambda used: tuning.score(part, arrange(part, used, budget=tuning.TUNE_BUDGET)),
    )
    rows = published.hierarchical(graph, **used) if params.variant == "paper" else arrange(graph, used)
    cols, symmetric = key_order(graph, rows, params.symmetric)
    return rows, cols, {**used, "variant": params.variant, "symmetric": symmetric}

"""The orders of the study: those of `tilewright.attention.reorder`, and the published procedures of ``ic`` and ``hc``.

``variant: paper`` among the settings of an order asks for the procedure of the IPDPS'26 artifact (stage T2).
"""

from functools import partial
from typing import Annotated, Literal

import msgspec

from tilewright.attention import reorder
from tilewright.attention.reorder._axes import key_order
from tilewright.core import registry

Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """symmetric: as for every order. col_block: columns of a quotient block."""

    variant: Literal["paper"]
    symmetric: bool | None = None
    col_block: Positive = 16


class Iterative(_Published, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tau: largest Jaccard distance of a row to its group. cap: most queries in a group. rounds: scans for candidates
    of each group."""

    tau: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.6
    cap: Positive | None = None
    rounds: Positive = 2


class Hierarchical(_Published, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """neighbors: candidates of each cluster. mean_size: mean rows of a cluster at which merging stops."""

    neighbors: Positive = 64
    mean_size: Annotated[float, msgspec.Meta(ge=1)] = 8


PUBLISHED = {"ic": Iterative, "hc": Hierarchical}


def parse(name, params=None):
    """``(name of the module, callable(graph))`` of an order with settings, see `reorder.parse`.

    The callable returns what the module's ``order`` does.
    """
    given = dict(params or {})
    if name in PUBLISHED:
        variant = given.get("variant", "default")
        registry.check("variant", variant, ("default", "paper"))
        if variant == "paper":
            settings = reorder.settings(name, given, PUBLISHED[name])
            return "tilewright_study.published_orders", partial(_published, settings=settings)
        given.pop("variant", None)
    module, settings = reorder.parse(name, given)
    return module.__name__, partial(module.order, params=settings)


def apply(graph, name, params=None):
    """What `reorder.apply` returns."""
    return reorder.timed(graph, name, parse(name, params)[1])


def _published(graph, settings):
    # Here: what is compiled takes long to load.
    from tilewright_study import published_orders

    procedure = {Iterative: published_orders.iterative, Hierarchical: published_orders.hierarchical}[type(settings)]
    stated = msgspec.structs.asdict(settings)
    rows = procedure(graph, **{key: value for key, value in stated.items() if key not in ("variant", "symmetric")})
    cols, symmetric = key_order(graph, rows, settings.symmetric)
    return rows, cols, stated | {"symmetric": symmetric}

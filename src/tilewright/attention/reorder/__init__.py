"""Orders of queries and keys that bring similar rows together (stage T2).

Contract of a member module:
    ``Params``: a frozen `msgspec.Struct` (``forbid_unknown_fields``); None means "tuned on the graph".
    ``order(graph, params) -> (row_order, col_order, info)``: int32 permutations, ``order[new] = old``, and
        a JSON-able dict with the parameters used (tuned ones included).

Every ``Params`` has ``symmetric: bool | None``: True puts queries and keys in one order (a square pattern is needed),
False orders the queries alone, and None takes the former where the pattern is square and else orders the keys by the
queries.
"""

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import msgspec

from tilewright.core import contents, registry
from tilewright.core.errors import ConfigError
from tilewright.graph import Graph

NAMES = ("none", "rcm", "hc", "ic", "window")


def parse(name: str, params: dict[str, Any] | None = None) -> tuple[ModuleType, msgspec.Struct]:
    """``(module, Params)`` of the order `name` with the settings `params` (dict or None), read strictly.

    Raises `UnknownNameError` for the name and `ConfigError` for a setting that is unknown, of a wrong type or out of
    range.
    """
    module = registry.member("tilewright.attention.reorder", "order", name, NAMES)
    return module, settings(name, params or {}, module.Params)


def settings(name: str, params: dict[str, Any], kind: Any) -> Any:
    """`params` as a struct of this kind. Raises `ConfigError` as `parse`."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"order {name}: {contents.said(error, kind)}; known settings: {known}") from None


def apply(graph: Graph, name: str, params: dict[str, Any] | None = None) -> tuple[Graph, dict[str, Any]]:
    """``(reordered graph, info)``: `graph` in the order `name`.

    info: ``order``, ``params`` (as used), ``seconds`` (of the ordering alone) and ``work_fraction``, the gathered
    work of groups of 64 consecutive queries over dense attention. Raises `UnknownNameError`, `ConfigError` and
    `PatternError`.
    """
    module, given = parse(name, params)
    return timed(graph, name, partial(module.order, params=given))


def timed(graph: Graph, name: str, order: Callable[[Graph], tuple]) -> tuple[Graph, dict[str, Any]]:
    """What `apply` returns, of an `order` with its settings."""
    from tilewright.attention.reorder._quality import work_fraction

    begin = time.perf_counter()
    row_order, col_order, used = order(graph)
    seconds = time.perf_counter() - begin
    info = {"order": name, "params": used, "seconds": seconds, "work_fraction": work_fraction(graph, row_order)}
    return graph.reordered(row_order, col_order), info

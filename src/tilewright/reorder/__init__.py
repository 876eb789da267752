"""Orders of queries and keys that bring equal-looking rows together (stage T2).

Contract of a member module:
    ``Params``: a frozen `msgspec.Struct` (``forbid_unknown_fields``); None means "tuned on the graph".
    ``order(graph, params) -> (row_order, col_order, info)``: int32 permutations, ``order[new] = old``, and a JSON-able dict with
        the parameters used (tuned ones included).
"""

NAMES = ("none", "rcm", "hc", "ic", "window")

"""Model families whose attention becomes a graph (stage T1).

Contract of a member module:
    ``Params``: a frozen `msgspec.Struct` (``forbid_unknown_fields``) of everything that decides the graph.
    ``parse(name) -> Params | None``: read a workload name such as ``vil-tiny-224-s1``; None when it is not of this family.
    ``graph(params) -> Graph``: the exact pattern, with ``meta`` holding ``model`` facts, ``heads`` and ``head_dim``.
"""

NAMES = ("vision_longformer", "regionvit", "dynamicvit", "file")

"""How the networks attend, by name.

Contract of a member module:
    ``order(site) -> tensor | None``: the order in which tokens stand at a site, None for the model's own.
    ``prepare(site, bias, dtype, device) -> run(q, k, v)``: attention over the site's pattern for q, k, v [B, H, N, D]
        in that order; bias [H, n] or None.
    ``taking(site, dtype, device) -> run(q, k, v, bias)``, optional: the same with a bias that is differentiated; None
        where it cannot be. Without it a bias is a constant.
    ``READS``, optional: True where ``taking`` costs little more than ``prepare``'s result. On a GPU, where values are
        not compared, a bias is then given in every call. Other members know it by the versions of its tables.
    ``TRACED``: what a compiler sees of a layer with a bias: ``"operator"``, one that it does not look into, which has
        no backward; ``"formula"``, the site's own; ``"everything"``, attention to all keys; or None, nothing: compiled
        code is interrupted there.

All of them have the logits of the first, but `OTHERS`, which compute another function of the same weights.
"""

WHAT = "attention"
NAMES = ("dense", "tilewright", "flex", "native", "full")
OTHERS = ("full",)
# Those that torch compiles in their first call, and keeps on disk.
COMPILED = ("flex",)

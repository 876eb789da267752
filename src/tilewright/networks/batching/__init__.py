"""How images that keep different numbers of tokens share a batch, by name: same weights, same logits, other latencies.

Contract of a member module:
    ``narrow(x, layout, choice, capacity) -> (x, layout)``: the chosen ones of the tokens x, which stand as `layout`
        says (see `networks.token_layouts`), in a new layout. choice: a `tilewright.packed.pruners.Choice`. capacity:
        most tokens of the batch, or None, see `tilewright.networks.deit.Network.forward`; members that have no use for
        it end in ``*_``. Raises `tilewright.core.errors.Unavailable` where it cannot run.
    ``ROOM``: what a capacity is to it: ``"shared"`` by the images, ``"even"``, as much for each, or None, of no use.
"""

WHAT = "batching"
NAMES = ("padded", "padded_unfused", "padded_kept", "gathered", "ragged", "varlen")
# A contender of theirs: the network that drops no token has nothing to batch.
UNPRUNED = "unpruned"
# How a network is run with any of them. eager: kernel by kernel; graph: one CUDA graph, replayed; compile:
# ``torch.compile``, which is slow to begin with; compile_graph: what it made as a CUDA graph.
MODES = ("eager", "graph", "compile", "compile_graph")

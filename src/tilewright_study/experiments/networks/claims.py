"""What is claimed of the experiment `networks`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.attention import (
    table_speedup,
)
from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, error, passed, with_batch


def _end_to_end(suffix):
    """Of the columns of one way of running, see `end_to_end.WAYS`."""

    def values(frame, case):
        """Over an attention, or over the fastest ``peer``, in networks whose names begin so: ``<network>/<peer>``."""
        network, peer = case.split("/")
        rows = frame[frame["network"].str.startswith(network)]
        asked = peer == "peer" or peer in set(rows["attention"])
        # Only a GPU runs graphs.
        if not asked or (suffix and rows[f"best_us{suffix}"].isna().all()):
            return ()
        rows = with_batch(rows[rows["attention"] == table_end_to_end.OURS])
        named = ["peer" + suffix] if peer == "peer" else []
        return by_name(rows, f"over_{peer}{suffix}", "network", "batch", *named, noise=f"noise_{peer}{suffix}")

    return values


def _beside_paper(inputs):
    """`end_to_end` with ``paper_speedup``, the paper's best over FlashAttention of the same family and resolution."""
    found = _read.sort(inputs, ("networks", "paper_latency"))
    (paper,) = _read.frames(found["paper_latency"], "paper_latency")
    bars = table_speedup.best_of_paper(_read.paper_speedups(paper)).rename("paper_speedup")
    return table_end_to_end.table(found["networks"]).join(bars, on=["family", "resolution"])


def _paper_network(suffix):
    def values(frame, network):
        """A whole network with one image over the same one with attention to all pairs, as the paper has it. Where that
        was not run, over masked SDPA, which takes no less: a miss over it is a miss, more than that is no value."""
        rows = frame[
            (frame["network"] == network) & (frame["batch"] == 1) & (frame["attention"] == table_end_to_end.OURS)
        ]
        # Only a GPU runs graphs.
        if suffix and rows[f"best_us{suffix}"].isna().all():
            return ()
        full, masked = rows[f"over_full{suffix}"], rows[f"over_dense{suffix}"]
        rows = rows.assign(
            value=full.fillna(masked.where(masked < rows["paper_speedup"])),
            over=full.isna().map({True: "over masked SDPA", False: "over dense attention"}),
        )
        return by_name(rows, "value", "network", "over")

    return values


MEASURES = {
    "end_to_end": (table_end_to_end.table, _end_to_end("")),
    "end_to_end_graph": (table_end_to_end.table, _end_to_end("_graph")),
    "paper_network": (_beside_paper, _paper_network(""), "paper_latency"),
    "paper_network_graph": (_beside_paper, _paper_network("_graph"), "paper_latency"),
}
# Whether what was timed is right.
CHECKS = {
    "network_error": (table_end_to_end.table, error("network", "attention", "batch")),
    "network_attention": (
        table_end_to_end.table,
        error("network", "attention", "batch", error="attention_error", tolerance="attention_tolerance"),
    ),
    "network_passed": (table_end_to_end.table, passed("attention", table_end_to_end.OURS)),
}

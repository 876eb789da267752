"""What is claimed of the experiment `networks`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.attention import (
    table_speedup,
)
from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases, passed, with_batch


def _end_to_end(suffix):
    """Of the columns of one way of running, see `end_to_end.WAYS`."""

    def values(frame, family):
        """Over the fastest other attention, for each network of a family and batch."""
        # Only a GPU runs graphs.
        if suffix and frame[f"best_us{suffix}"].isna().all():
            return ()
        rows = frame[(frame["family"] == family) & (frame["attention"] == table_end_to_end.OURS)]
        names = ("network", "batch", f"peer{suffix}")
        return by_name(with_batch(rows), f"over_peer{suffix}", *names, noise=f"noise_peer{suffix}")

    return values


def beside_paper(inputs):
    """Our rows of whole networks with one image and a speed-up in the paper, ``paper_speedup``: its best
    over FlashAttention of the same family and resolution. ``over<suffix>``: the speed-up over attention to all pairs in
    each way of running, ``best``: in the better one. Where that was not run it is over masked SDPA, which takes no
    less: less than the paper's is less, and for the best more says nothing and is left out."""
    found = _read.sort(inputs, ("networks", "paper_latency"))
    (paper,) = _read.frames(found["paper_latency"], "paper_latency")
    # In the digits that the paper gives.
    bars = table_speedup.best_of_paper(_read.paper_speedups(paper)).rename("paper_speedup").round(2)
    rows = table_end_to_end.table(found["networks"]).join(bars, on=["family", "resolution"])
    rows = rows[(rows["batch"] == 1) & (rows["attention"] == table_end_to_end.OURS)].dropna(subset="paper_speedup")
    for suffix in table_end_to_end.WAYS:
        rows[f"over{suffix}"] = rows[f"over_full{suffix}"].fillna(rows[f"over_dense{suffix}"])
    most, sure = (
        rows[[f"{over}{suffix}" for suffix in table_end_to_end.WAYS]].max(axis=1) for over in ("over", "over_full")
    )
    return rows.assign(best=most.where(most < rows["paper_speedup"], sure.where(sure >= rows["paper_speedup"])))


def _paper_network(frame, family):
    """Share of the paper's speed-up that is reached, for each size of a family."""
    rows = frame[frame["family"] == family]
    said = [
        f"{n}: {ours:.2f} of {paper:.2f} ×" for n, ours, paper in rows[["network", "best", "paper_speedup"]].to_numpy()
    ]
    return cases(rows["best"] / rows["paper_speedup"], said)


MEASURES = {
    "end_to_end": (table_end_to_end.table, _end_to_end("")),
    "end_to_end_graph": (table_end_to_end.table, _end_to_end("_graph")),
    "paper_network": (beside_paper, _paper_network, "paper_latency"),
    "network_passed": (table_end_to_end.table, passed("attention", table_end_to_end.OURS)),
}

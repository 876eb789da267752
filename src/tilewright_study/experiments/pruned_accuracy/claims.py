"""What is claimed of the experiment `pruned_accuracy`: the measures of its claims, see `tables.claims`."""

from tilewright.networks.batching import UNPRUNED
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.pruned_accuracy import table_pruned_accuracy
from tilewright_study.tables._values import by_name


def _accuracy_whole(frame, network):
    """Top-1 of the network without a pruner, in percent: of the training where it is least."""
    rows = frame[(frame["batching"] == UNPRUNED) & (frame["network"] == network)].head(1)
    return by_name(rows.assign(percent=100 * rows["least_top1"]), "percent", "network")


def _accuracy_same(frame, network):
    """Share of the crops, in percent, that packed tokens name as padded ones, with every pruner and setting."""
    rows = frame[(frame["batching"] == table_pruned.OURS) & (frame["network"] == network)]
    return by_name(
        rows.assign(percent=100 * (1 - rows["changed"] / rows["crops"])), "percent", "pruner", "setting", "mode"
    )


def _accuracy_over(frame, case):
    """The greatest speed-up over the network without a pruner, packed, that loses at most so many points of top-1:
    ``<points>/<network>``."""
    points, network = case.split("/")
    rows = frame[
        (frame["batching"] == table_pruned.OURS) & (frame["network"] == network) & (frame["lost"] <= float(points))
    ]
    return by_name(rows.nlargest(1, "over_unpruned"), "over_unpruned", "pruner", "setting")


MEASURES = {
    "accuracy_whole": (table_pruned_accuracy.table, _accuracy_whole),
    "accuracy_same": (table_pruned_accuracy.table, _accuracy_same),
    "accuracy_over": (table_pruned_accuracy.table, _accuracy_over),
}

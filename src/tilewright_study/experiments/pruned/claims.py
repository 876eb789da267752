"""What is claimed of the experiment `pruned`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.tables._values import by_name, passed, with_batch


def _pruned_over(frame, case):
    """Our speed-up over a peer, ``unpruned``, ``padded``, ``published``, or the best ``dense`` or ``fair`` one, called
    alike: ``<mode, or graph or called for both modes of a way>/<peer>[/<network>[/<setting>]]``, ``any`` for all."""
    mode, peer, *rest = case.split("/")
    rows = frame[
        (frame["batching"] == table_pruned.OURS) & ((frame["mode"] == mode) | (frame["way"] == mode) | (mode == "any"))
    ]
    for column, value in zip(("network", "setting"), rest, strict=False):
        rows = rows[rows[column] == value]
    return _at_batch(rows, f"over_{peer}", noise=f"noise_{peer}")


def _pruned_best(frame, case):
    """The greatest speed-up of a case."""
    return _pruned_over(frame, case).nlargest(1, "value")


def _pruned_differ(frame, case):
    """Where images of a batch keep different numbers of tokens, by more than the class token."""
    return _pruned_over(frame[frame["spread"] > 1], case)


def _pack_share(frame, mode):
    rows = frame[(frame["mode"] == mode) & (frame["batching"] == table_pruned.OURS)]
    return _at_batch(rows.assign(percent=100 * rows["pack_share"]), "percent")


def _pruned_logits(frame, case):
    """Largest difference of a logit in the type `case`, of images that kept the same tokens."""
    return _at_batch(frame[frame["dtype"] == case], "max_abs_error")


def _pruned_top1(column):
    def values(frame, _):
        return _at_batch(frame.assign(percent=100 * frame[column]), "percent")

    return values


def _at_batch(rows, column, noise=None):
    return by_name(with_batch(rows), column, "network", "setting", "batching", "mode", "batch", noise=noise)


MEASURES = {
    "pruned_over": (table_pruned.table, _pruned_over),
    "pruned_best": (table_pruned.table, _pruned_best),
    "pruned_differ": (table_pruned.table, _pruned_differ),
    "pack_share": (table_pruned.table, _pack_share),
    "pruned_top1": (table_pruned.table, _pruned_top1("same_top1")),
    "pruned_top1_all": (table_pruned.table, _pruned_top1("same_top1_all")),
    "pruned_passed": (table_pruned.table, passed("batching", table_pruned.OURS)),
    "pruned_logits": (table_pruned.table, _pruned_logits),
}

"""What is claimed of the experiment `attention`: the measures of its claims, see `tables.claims`."""

import pandas as pd

from tilewright_study.experiments.attention import (
    table_policy,
    table_prediction,
    table_speedup,
)
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases, passed


def _over_peer(frame, family):
    """Headline over the fastest peer for each workload of a family, and in each form."""
    rows = frame[frame["model"].str.startswith(family)]
    found = [
        by_name(
            rows.assign(form=form), f"over_peer{suffix}", "model", "form", f"peer{suffix}", noise=f"noise_peer{suffix}"
        )
        for suffix, form in zip(
            table_speedup.FORMS, ("plan order, over", "natural order, over", "cold, over"), strict=True
        )
    ]
    return pd.concat(found)


def _over_rival(frame, case):
    """A rival's time over that of the ILP's schedule: ``<rival>/median``, or of ``each`` workload and order."""
    rival, what = case.split("/")
    rows = frame.dropna(subset=f"over_{rival}")
    if what == "median":
        return _median(rows[f"over_{rival}"], rows[f"noise_{rival}"])
    return by_name(rows, f"over_{rival}", "model", "reorder", noise=f"noise_{rival}")


def _saved(frame, rival):
    """Share of a rival's time that the ILP's schedule saves, in percent, in the median."""
    over = frame[f"over_{rival}"].dropna()
    return _median(100 * (1 - 1 / over))


def _over_order(frame, order):
    """Time of the headline's tiles and solver under an order over that under the headline's own, in the median."""
    rows = _read.plans(frame)
    rows = rows[(rows["tiles"] == _read.HEADLINE["tiles"]) & (rows["solver"] == _read.HEADLINE["solver"])]
    theirs, ours = (
        rows[rows["reorder"] == name].set_index("model")[["p50_us", "rse"]]
        for name in (order, _read.HEADLINE["reorder"])
    )
    over = (theirs["p50_us"] / ours["p50_us"]).dropna()
    return _median(over, _read.noise(over, ours["rse"], theirs["rse"]).reindex(over.index))


def _median(values, noise=None):
    """The median, which is beyond noise where at least half of its cases are."""
    if values.empty:
        return ()
    less = 0 if noise is None else noise.fillna(0)
    return cases([values.median()], [f"median of {len(values)}"], [values.median() - (values - less).median()])


def _prediction_error(frame, case):
    """Relative error in percent, the ``median`` or the 90th percentile, ``p90``."""
    errors = 100 * frame["error"].abs()
    value = errors.quantile({"median": 0.5, "p90": 0.9}[case])
    return cases([value], [f"of {len(errors)} schedules"])


def _workload(column):
    def values(frame, case):
        return by_name(frame[frame["model"] == case].head(1), column, "model")

    return values


def _bench(inputs):
    return _read.bench(_read.frames(inputs, "attention")[0])


MEASURES = {
    "over_peer": (table_speedup.table, _over_peer, "paper_latency"),
    "tokens": (_bench, _workload("tokens")),
    "density": (_bench, _workload("density")),
    "prediction_error": (table_prediction.table, _prediction_error),
    "policy_over": (table_policy.table, _over_rival, "paper_latency"),
    "policy_saved": (table_policy.table, _saved, "paper_latency"),
    "order_over": (_bench, _over_order),
    "bench_passed": (_bench, passed("provider", "tilewright")),
}

"""What is claimed of the experiment `attention`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.attention import (
    table_policy,
    table_prediction,
    table_speedup,
)
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases, error, passed


def _speedup(frame, case):
    return by_name(frame[frame["model"].str.startswith(case)], "speedup", "model", noise="noise_dense")


def _over_peer(frame, case):
    """Headline over the fastest peer in a form, ``<plan, natural or cold>/<first part of the workload's name>``."""
    form, name = case.split("/")
    suffix = "" if form == "plan" else f"_{form}"
    # A device without a cache that can be emptied times nobody in the cold form.
    if frame[[f"plan_us{suffix}", f"peer_us{suffix}"]].isna().all(axis=None):
        return ()
    rows = frame[frame["model"].str.startswith(name)]
    return by_name(rows, f"over_peer{suffix}", "model", f"peer{suffix}", noise=f"noise_peer{suffix}")


def _over_rival(frame, case):
    """A rival's time over that of the ILP's schedule: ``<rival>/median``, or of ``each`` workload and order."""
    rival, what = case.split("/")
    rows = frame.dropna(subset=f"over_{rival}")
    if what == "median" and len(rows):
        over = rows[f"over_{rival}"]
        # A median is beyond noise where at least half of its cases are.
        noise = over.median() - (over - rows[f"noise_{rival}"].fillna(0)).median()
        return cases([over.median()], [f"median of {len(rows)}"], [noise])
    return by_name(rows, f"over_{rival}", "model", "reorder", noise=f"noise_{rival}")


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
    "speedup": (table_speedup.table, _speedup, "paper_latency"),
    "over_peer": (table_speedup.table, _over_peer, "paper_latency"),
    "tokens": (_bench, _workload("tokens")),
    "density": (_bench, _workload("density")),
    "prediction_error": (table_prediction.table, _prediction_error),
    "policy_over": (table_policy.table, _over_rival, "paper_latency"),
}
# Whether what was timed is right.
CHECKS = {
    "bench_error": (_bench, error("model", "provider", "reorder")),
    "bench_passed": (_bench, passed("provider", "tilewright")),
}

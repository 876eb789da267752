"""The study's claims against this run: what was expected, the worst that was measured, and the verdict.

``expected/claims.csv`` lists them; an id names one of the measures below and, after the colon, its case.
"""

import operator

import numpy as np

from tilewright.tables import end_to_end, prediction, pruned, ragged, read, reorder_time, select, solvers, speedup

SHOWN = {
    "claim": ("claim", ""),
    "relation": ("", ""),
    "expected": ("expected", ",.4g"),
    "measured": ("measured", ",.4g"),
    "unit": ("unit", ""),
    "verdict": ("verdict", ""),
    "where": ("worst case", ""),
}
_RELATIONS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "=": lambda found, expected: round(found, _decimals(expected)) == expected,
}


def _decimals(value):
    """Decimals in which a value was claimed."""
    return len(f"{value:.12g}".partition(".")[2])


def needs(config):
    """Bench files, networks, schedules, reordered graphs, reorder times, the paper's bars and the list of claims."""
    windowed = [m for m in config.workloads if select.family(m) in ("vil", "regionvit")]
    files = [*select.bench(config, config.workloads), *select.networks(config), *select.schedules(config)]
    files += [*select.ragged(config), *select.pruned(config)]
    files += [f"results/graphs/{m}/{r}.npz" for m in windowed for r in config.orders]
    files += [select.REORDER_TIME] if config.reorder_times.workloads else []
    return [select.CLAIMS, select.PAPER_LATENCY, *files]


def table(inputs):
    """One row per claim; a claim whose case is not among the inputs is "not measured".

    Raises `ArtifactError` for a claim of an unknown measure or relation.
    """
    kinds = ("claims", "paper_latency", "bench", "network", "schedule", "graph", "reorder_time", "ragged", "pruned")
    found = read.sort(inputs, kinds, optional=kinds[2:])
    (frame,) = read.frames(found["claims"], "claims")
    read.known(found["claims"][0], "relation", frame["relation"], _RELATIONS)
    read.known(found["claims"][0], "measure", [name.partition(":")[0] for name in frame["id"]], _MEASURES)
    results = []
    tables = {}
    for row in frame.itertuples():
        measure, _, case = row.id.partition(":")
        kinds, make, values = _MEASURES[measure]
        if all(found[kind] for kind in kinds) and make not in tables:
            tables[make] = make([path for kind in kinds for path in found[kind]])
        cases = values(tables[make], case).dropna() if make in tables else ()
        results.append(_worst(row, cases))
    frame[["measured", "verdict", "where"]] = results
    return frame.astype({"measured": float})


def _worst(claim, values):
    """``(measured, verdict, where)`` for the values of a claim, a Series indexed by where each was found."""
    if not len(values):
        return np.nan, "not measured", ""
    short = {">": -values, ">=": -values, "<=": values, "=": (values - claim.expected).abs()}[claim.relation]
    at = short.argmax()
    worst = float(values.iloc[at])
    met = all(_RELATIONS[claim.relation](float(value), claim.expected) for value in values)
    return worst, "met" if met else "not met", str(values.index[at])


def _by_name(frame, column, *names):
    where = [" ".join(filter(None, words)) for words in zip(*(frame[name] for name in names), strict=True)]
    return frame[column].set_axis(where)


def _speedup(frame, case):
    return _by_name(frame[frame["model"].str.startswith(case)], "speedup", "model")


def _ilp_gain(frame, _):
    return 100 * _by_name(frame[frame["solver"] != "greedy"], "gain", "model", "reorder", "solver")


def _ilp_gap(frame, _):
    return 100 * _by_name(frame[frame["solver"] != "greedy"], "gap", "model", "reorder", "solver")


def _solve_s(frame, _):
    return _by_name(frame[frame["solver"] != "greedy"], "solve_s", "model", "reorder", "solver")


def _prediction_error(frame, _):
    return (100 * frame["error"].abs().agg(["median"])).rename({"median": f"median of {len(frame)}"})


def _error_over_tolerance(frame, _):
    ratio = frame["max_abs_error"] / frame["tolerance"]
    return _by_name(frame.assign(ratio=ratio), "ratio", "model", "provider", "reorder")


def _logits(frame, _):
    frame = frame.assign(batch=frame["batch"].map("{:.0f}".format), ratio=frame["max_abs_error"] / frame["tolerance"])
    return _by_name(frame, "ratio", "network", "attention", "batch")


def _end_to_end(frame, case):
    network, peer = case.split("/")
    rows = frame[(frame["network"] == network) & (frame["attention"] == "tilewright")]
    return _by_name(rows, f"over_{peer}", "network")


def _ragged_over(frame, case):
    """A peer's time over ours, ``<peer>/<fewest images>-<most>``, with six heads."""
    peer, span = case.split("/")
    low, high = map(float, span.split("-"))
    rows = frame[(frame["provider"] == peer) & frame["images"].between(low, high) & (frame["heads"] == 6)]
    return _at_images(rows, rows["over_ours"])


def _ragged_host(frame, _):
    rows = frame[(frame["provider"] == ragged.OURS) & (frame["call"] == "attend")]
    return _at_images(rows, rows["host_us"])


def _ragged_floor(frame, case):
    rows = frame[(frame["provider"] == ragged.OURS) & (frame["call"] == "attend") & (frame["heads"] == 6)]
    rows = rows[rows["images"] == float(case)]
    return _at_images(rows, 1 / rows["floor_fraction"])


def _at_images(rows, values):
    where = zip(rows["heads"], rows["head_dim"], rows["lengths"], rows["images"], strict=True)
    return values.set_axis([f"{h:.0f}x{d:.0f}, {images:.0f} images of {span}" for h, d, span, images in where])


def _pruned_rows(frame, case):
    """``(peer, rows)``: ours of the case ``<peer>[/<network>[/<setting>]]``."""
    peer, *rest = case.split("/")
    rows = frame[frame["strategy"] == pruned.OURS]
    for column, value in zip(("network", "setting"), rest, strict=False):
        rows = rows[rows[column] == value]
    return peer, rows


def _pruned_over(frame, case):
    """Speed-up over a peer, ``padded``, ``published``, or the best ``dense`` or ``fair`` one, in the same mode."""
    peer, rows = _pruned_rows(frame, case)
    return _at_batch(rows, f"over_{peer}")


def _pruned_best(frame, case):
    """The greatest speed-up of a case."""
    return _pruned_over(frame, case).nlargest(1)


def _pruned_differ(frame, case):
    """Where images of a batch keep different numbers of tokens, by more than the class token."""
    return _pruned_over(frame[frame["spread"] > 1], case)


def _pack_share(frame, _):
    return 100 * _at_batch(frame, "pack_share")


def _pruned_logits(frame, case):
    """Largest difference of a logit in the type `case`."""
    return _at_batch(frame[frame["dtype"] == case], "max_abs_error")


def _pruned_top1(frame, _):
    return 100 * _at_batch(frame, "same_top1")


def _at_batch(rows, column):
    rows = rows.assign(batch=rows["batch"].map("batch {:.0f}".format))
    return _by_name(rows, column, "network", "setting", "strategy", "mode", "batch")


def _workload(column):
    def values(frame, case):
        return _by_name(frame[frame["model"] == case].head(1), column, "model")

    return values


def _gathered(frame, case):
    """Pairs gathered by slices of 64 consecutive rows over dense, under the orders found from the graph alone."""
    return _by_name(
        frame[(frame["model"] == case) & frame["reorder"].isin(["ic", "hc"])], "gathered", "model", "reorder"
    )


def _gathered_over_window(frame, case):
    """How much more an order found from the graph alone gathers than the window order, in percent."""
    window = frame[frame["reorder"] == "window"].set_index("model")["gathered"]
    rows = frame[frame["reorder"] == case]
    return _by_name(
        rows.assign(more=100 * (rows["gathered"] / rows["model"].map(window) - 1)), "more", "model", "reorder"
    )


def _reorder(column):
    def values(frame, case):
        order, tokens = case.split("/")
        rows = frame[(frame["reorder"] == order) & (frame["tokens"] >= float(tokens))]
        return _by_name(rows, column, "model", "reorder")

    return values


def _gathered_work(inputs):
    """One row per reordered graph: workload, order and its gathered work."""
    import pandas as pd

    from tilewright import graph
    from tilewright.reorder.quality import work_fraction

    rows = []
    for path, pattern in read.by_kind(inputs, graph=graph.load)["graph"].items():
        work = work_fraction(pattern, np.arange(pattern.n_rows))
        rows.append({"model": path.parent.name, "reorder": path.stem, "gathered": work})
    return pd.DataFrame(rows)


def _bench(inputs):
    return read.bench(read.frames(inputs, "bench")[0])


# Measure: kinds of files it is made from, the table of them, and the values of a case, each under where it was found.
_MEASURES = {
    "speedup": (("bench", "paper_latency"), speedup.table, _speedup),
    "tokens": (("bench",), _bench, _workload("tokens")),
    "density": (("bench",), _bench, _workload("density")),
    "error_over_tolerance": (("bench",), _bench, _error_over_tolerance),
    "logits": (("network",), end_to_end.table, _logits),
    "end_to_end": (("network",), end_to_end.table, _end_to_end),
    "ragged_over": (("ragged",), ragged.table, _ragged_over),
    "ragged_host": (("ragged",), ragged.table, _ragged_host),
    "ragged_floor": (("ragged",), ragged.table, _ragged_floor),
    "pruned_over": (("pruned",), pruned.table, _pruned_over),
    "pruned_best": (("pruned",), pruned.table, _pruned_best),
    "pruned_differ": (("pruned",), pruned.table, _pruned_differ),
    "pack_share": (("pruned",), pruned.table, _pack_share),
    "pruned_logits": (("pruned",), pruned.table, _pruned_logits),
    "pruned_top1": (("pruned",), pruned.table, _pruned_top1),
    "prediction_error": (("bench",), prediction.table, _prediction_error),
    "ilp_gain": (("schedule",), solvers.table, _ilp_gain),
    "ilp_gap": (("schedule",), solvers.table, _ilp_gap),
    "solve_s": (("schedule",), solvers.table, _solve_s),
    "gathered": (("graph",), _gathered_work, _gathered),
    "gathered_over_window": (("graph",), _gathered_work, _gathered_over_window),
    "reorder_s": (("reorder_time",), reorder_time.table, _reorder("seconds")),
    "reorder_gib": (("reorder_time",), reorder_time.table, _reorder("peak_gib")),
}

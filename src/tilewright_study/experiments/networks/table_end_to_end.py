"""Whole networks, from images to logits: latency of each attention at each batch, and its speed-up over the peers
and over the fastest of them, called from Python and as a CUDA graph, or a tie where the two are within noise.

Whole networks on photographs, from images to logits: p50 latency of each attention at batch 1 and at a batch for
throughput, split into attention (without its projections) and the rest of the network. All have the same random
weights; before a time was taken, the logits were compared with those of masked dense attention, and the table holds the
relative error beside its tolerance. The fastest peer of each network and batch is named; a difference within two
standard errors of the two times is a tie. "As published" (native) is the formulation of the network's own paper:
sliding chunks, batched windows, gathered tokens. What is done once, building plans or compiling, is in the first call
and not in the latency. What did not run is blank, with the reason. Each attention counts with the faster of its rows,
compiled or not, in either way of running; with a compiled one only against what was compiled as well. Attention
tilewright has its own plans; the table ``network_plans`` shows others.
"""

from tilewright_study.tables import _read, _select

OURS = "tilewright"
# Each has a column of speed-ups over it. ``full`` attends to all pairs, without the mask.
PEERS = ("native", "dense", "flex", "full")
# Ways of running a network: suffix of the columns, and the time.
WAYS = {"": "p50_us", "_graph": "gpu_us"}
_KEY = ["network", "batch"]

SHOWN = {
    "network": ("network", ""),
    "attention": ("attention", ""),
    "batch": ("batch", ".0f"),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.0f"),
    "p20_us": ("p20 (µs)", ",.0f"),
    "p80_us": ("p80 (µs)", ",.0f"),
    "attention_us": ("attention (µs)", ",.0f"),
    "rest_us": ("rest (µs)", ",.0f"),
    "images_per_s": ("images/s", ",.1f"),
    "gpu_us": ("as a CUDA graph (µs)", ",.0f"),
    "compiled_us": ("compiled (µs)", ",.0f"),
    "compiled_gpu_us": ("compiled, as a CUDA graph (µs)", ",.0f"),
    **{
        f"{name}{suffix}": (f"{way}: {header}", form)
        for suffix, way in {"": "called", "_graph": "graph"}.items()
        for name, header, form in (
            ("best_us", "the faster (µs)", ",.0f"),
            *((f"over_{peer}", f"× {peer}", ".2f") for peer in PEERS),
            ("peer", "fastest peer", ""),
            ("peer_form", "its form", ""),
            ("peer_us", "its time (µs)", ",.0f"),
            ("over_peer", "× fastest peer", ".2f"),
            ("verdict", "than it", ""),
        )
    },
    "peak_bytes": ("peak memory (bytes)", ",.0f"),
    "relative_error": ("relative error of logits", ".1e"),
    "attention_error": ("of attention", ".1e"),
    "max_abs_error": ("largest logit difference", ".1e"),
    "tolerance": ("tolerance", ".0e"),
    "same_top1": ("same top-1", ".0%"),
    "first_call_s": ("first call (s)", ",.1f"),
    "parameters": ("parameters", ",.0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "networks")


def table(inputs):
    """One row per network, attention and batch, by family, resolution and batch; a row that failed has no time.

    best_us: the least time of the attention when called from Python, compiled or not; over_<peer>: how many times as
    fast it is as a peer; peer, peer_form, peer_us: the fastest one, and ``compiled`` where it is. The same with
    ``_graph`` are of CUDA graphs. Rows of ours with other plans than its own are no part of it.
    """
    rows = networks(inputs)
    rows = rows[rows["reorder"] == ""]
    # A row that is compiled alone stands for itself.
    shown = rows.sort_values("compiled", kind="stable").drop_duplicates([*_KEY, "attention"]).sort_index()
    shown.loc[shown["compiled"], _read.NETWORK_TIMES] = float("nan")
    compiled = rows[rows["compiled"]].drop_duplicates([*_KEY, "attention"]).set_index([*_KEY, "attention"])
    shown = shown.join(compiled[["p50_us", "gpu_us"]].add_prefix("compiled_"), on=[*_KEY, "attention"])
    shown = shown.rename(columns={"compiled_p50_us": "compiled_us"})
    for suffix, column in WAYS.items():
        shown = _compared(shown, rows, suffix, column)
    return _in_order(shown)


def _compared(shown, rows, suffix, column):
    """`shown` with the columns of one way of running, of `rows`, those with their own plans."""
    # A graph's own scatter was not measured.
    whose, values = [*_KEY, "attention"], [column, "rse"]
    rows = rows[[*whose, "compiled", *values]]
    rows = rows if column == "p50_us" else rows.assign(rse=float("nan"))
    best, plain = (_read.best(of, whose, column)[values] for of in (rows, rows[~rows["compiled"]]))
    found = {"best_us": shown[whose].join(best[column], on=whose)[column]}
    others = rows[rows["attention"] != OURS]
    for peer, theirs in {**{peer: others[others["attention"] == peer] for peer in PEERS}, "peer": others}.items():
        fastest = shown[_KEY].join(_read.best(theirs, _KEY, column)[[*values, "attention", "compiled"]], on=_KEY)
        compiled = shown[_KEY].join(_read.best(theirs[theirs["compiled"]], _KEY, column)[column], on=_KEY)[column]
        own = shown[whose].join(best, on=whose).where(compiled.notna(), shown[whose].join(plain, on=whose))
        ratio = fastest[column] / own[column]
        found |= {
            f"over_{peer}": ratio,
            f"noise_{peer}": _read.noise(ratio, own["rse"].astype(float), fastest["rse"]),
        }
    verdict = _read.verdict(ratio, found["noise_peer"]).where(shown["attention"] == OURS, "")
    form = fastest["compiled"].eq(True).map({True: "compiled", False: ""})
    found |= {"peer": fastest["attention"].fillna(""), "peer_form": form, "peer_us": fastest[column]}
    return shown.assign(**{name + suffix: value for name, value in (found | {"verdict": verdict}).items()})


def _in_order(rows):
    rows = rows.rename(columns={"network": "model"}).sort_values("batch", kind="stable")
    return _read.in_order(rows).rename(columns={"model": "network"})


def networks(inputs):
    """All rows of networks: a row that failed has no time; ``compiled`` is a bool."""
    (rows,) = _read.frames(inputs, "networks")
    rows["family"] = rows["network"].map(_select.family)
    rows["compiled"] = rows["compiled"].str.lower() == "true"
    rows.loc[rows["status"] != "ok", _read.NETWORK_TIMES] = float("nan")
    return rows

"""What integer programming gains, measured: the time of the best fixed tile, of local search and of the plain greedy
over that of the ILP's schedule, per workload and order.

The measured gain of integer programming for each workload and order, tokens in plan order: the time of a rival's
schedule over that of the ILP's. The rivals are the best schedule of one fixed tile, local search over the same tiles
("descent") and the plain greedy. Above 1 the ILP's schedule is faster. A difference within two standard errors of the
two times is a tie. The best of several fixed tiles is the least of as many measurements, noise included, which favours
it. Schedules that run torch's own attention are left out: no choice of tiles is measured there.
"""

from tilewright_study.tables import _read, _select

# Rivals, and their names.
RIVALS = {
    "fixed": "the best fixed tile",
    "descent": "local search (descent)",
    "greedy": "plain greedy",
    "published": "the published objective",
}
_KEY = ["family", "resolution", "model", "reorder"]

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "us": ("p50 (µs)", ",.1f"),
    "left": ("left to gain, predicted, at most", ".2%"),
    "fixed": ("best fixed tile", ""),
    "fixed_us": ("its p50 (µs)", ",.1f"),
    "over_fixed": ("fixed / it", ".3f"),
    "verdict_fixed": ("it is", ""),
    "descent_us": ("descent p50 (µs)", ",.1f"),
    "over_descent": ("descent / it", ".3f"),
    "verdict_descent": ("it is", ""),
    "greedy_us": ("greedy p50 (µs)", ",.1f"),
    "over_greedy": ("greedy / it", ".3f"),
    "verdict_greedy": ("it is", ""),
    "published_us": ("published objective p50 (µs)", ",.1f"),
    "over_published": ("published / it", ".3f"),
    "verdict_published": ("it is", ""),
    "predicted_gain": ("predicted gain on greedy", "+.1%"),
    "paper_gain": ("paper's gain on greedy", "+.1%"),
}


def needs(config):
    """Bench files of every plan, and the paper's bars; none without an ILP solver or a workload."""
    _, solvers = _select.method(config)
    if not {"greedy"} < set(solvers) or not config.workloads:
        return []
    files = _select.attention(config, config.workloads)
    return [*files, _select.PAPER_LATENCY] if files else []


def table(inputs):
    """One row per workload, order, set of tiles and solver of an ILP, tokens being in plan order.

    ``left`` is the share of the prediction that no choice of the program's options can gain more than.
    ``over_<rival>`` is above 1 where the schedule is faster than the rival, ``noise_<rival>`` two standard errors of
    it, and ``verdict_<rival>`` what follows, see `read.verdict`. The best of several fixed tiles is the least of as
    many measurements, noise included: a comparison in its favour.
    """
    rows, paper = _read.frames(inputs, "attention", "paper_latency")
    rows = _read.plans(_read.bench(rows))
    rows = rows[rows["variant"].fillna("") == ""]
    # ASSUME: a set of one tile bears the tile's name, as in all configurations of this project.
    one = rows["tiles"].str.fullmatch(r"\d+x\d+")
    values = ["p50_us", "rse", "predicted_us"]
    columns = [*_KEY, "tiles", "solver", *values, "gap"]
    frame = rows.loc[~one & (rows["policy"] == "ilp"), columns]
    renamed = {"p50_us": "us", "predicted_us": "predicted_us_ilp", "gap": "left"}
    frame = frame.rename(columns=renamed).reset_index(drop=True)
    for rival in RIVALS:
        key = _KEY if rival == "fixed" else [*_KEY, "tiles"]
        others = rows[one if rival == "fixed" else ~one & (rows["policy"] == rival)]
        theirs = frame[key].join(_read.best(others, key)[[*values, *(["tiles"] if rival == "fixed" else [])]], on=key)
        over = theirs["p50_us"] / frame["us"]
        noise = _read.noise(over, frame["rse"], theirs["rse"])
        frame[f"{rival}_us"], frame[f"over_{rival}"], frame[f"noise_{rival}"] = theirs["p50_us"], over, noise
        frame[f"verdict_{rival}"] = _read.verdict(over, noise)
        if rival == "fixed":
            frame["fixed"] = theirs["tiles"].fillna("")
        if rival == "greedy":
            frame["predicted_gain"] = 1 - frame["predicted_us_ilp"] / theirs["predicted_us"]
    bars = paper[paper["provider"] == "pipeline"]
    bars = bars.pivot(index=["family", "resolution", "reorder"], columns="policy", values="latency_ms")
    gain = (1 - bars["ilp"] / bars["greedy"]).rename("paper_gain")
    return frame.join(gain, on=["family", "resolution", "reorder"])

"""What a whole network gains at its size: the time of Tilewright's form and how many times as fast it is as the fastest
other form of the network, in each way of calling.

What a whole network gains at its size. A form is what computes a network's attention. In each way of calling (from
Python, by torch.compile, by its mode reduce-overhead, and as a CUDA graph that was captured by hand) Tilewright's form
stands against the fastest other one that was called in this way, all timed in turns in one process, on photographs.
Networks of timm attend to windows with Tilewright and to all keys without it, which is another function of the same
weights. Each form was compared with its own oracle in float32 before its time was taken. A difference within two
standard errors of the two times is a tie.
"""

from tilewright_study.experiments.gains import EAGER, GRAPH, OURS, WAYS
from tilewright_study.tables import _read, _select

NAMES = {EAGER: "called", "compile": "compiled", "reduce-overhead": "reduce-overhead", GRAPH: "CUDA graph"}
_KEY = ["network", "batch"]

SHOWN = {
    "network": ("network", ""),
    "resolution": ("pixels", ".0f"),
    "batch": ("batch", ".0f"),
    "pattern": ("pattern", ""),
    **{
        f"{name} {way}": (f"{NAMES[way]}: {header}", form)
        for way in WAYS
        for name, header, form in (
            ("us", "Tilewright (µs)", ",.0f"),
            ("peer", "fastest other form", ""),
            ("peer_us", "its time (µs)", ",.0f"),
            ("over", "× it", ".2f"),
            ("verdict", "than it", ""),
        )
    },
    "relative_error": ("relative error of logits, at most", ".1e"),
    "tolerance": ("tolerance", ".0e"),
    "device": ("device", ""),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "gains")


def table(inputs):
    """One row per network and batch, by family, resolution and batch.

    Of each way, after a blank: us of Tilewright's form; peer, peer_us: the fastest other form; over: how many times as
    fast as that ours is; noise: two standard errors of it; verdict. reason: of our forms that have no time.
    """
    (frame,) = _read.frames(inputs, "gains")
    frame.loc[frame["status"] != "ok", ["p50_us", "rse"]] = float("nan")
    ours = frame[frame["form"].isin(OURS)]
    worst = ours.groupby(_KEY)[["relative_error", "tolerance"]].max()
    found = ours.drop_duplicates(_KEY)[[*_KEY, "family", "resolution", "pattern", "dtype", "device"]]
    found = found.join(worst, on=_KEY)
    for way in WAYS:
        rows = frame[frame["way"] == way]
        own, peer = (_read.best(rows[mine], _KEY) for mine in (rows["form"].isin(OURS), ~rows["form"].isin(OURS)))
        own, peer = (found[_KEY].join(each[["form", "p50_us", "rse"]], on=_KEY) for each in (own, peer))
        ratio = peer["p50_us"] / own["p50_us"]
        noise = _read.noise(ratio, own["rse"], peer["rse"])
        columns = {"us": own["p50_us"], "peer": peer["form"].fillna(""), "peer_us": peer["p50_us"], "over": ratio}
        columns |= {"noise": noise, "verdict": _read.verdict(ratio, noise)}
        found = found.assign(**{f"{name} {way}": values for name, values in columns.items()})
    reasons = ours[ours["reason"] != ""].drop_duplicates(_KEY).set_index(_KEY)["reason"]
    found = found.join(reasons, on=_KEY).fillna({"reason": ""})
    found = found.rename(columns={"network": "model"}).sort_values("batch", kind="stable")
    return _read.in_order(found).rename(columns={"model": "network"})

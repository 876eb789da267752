"""The headline plan of each workload against dense attention and the fastest peer of the same run, in three forms,
beside the paper's best against FlashAttention.

The headline plan of each workload over the fastest dense attention of the same run: torch's default, FlashAttention,
cuDNN or the memory-efficient kernel. The headline is one policy, chosen before measuring: window order, mixed tiles,
HiGHS. Beside it stand the fastest of all peers, masked SDPA and FlexAttention. The table has three forms: tokens in
plan order with a warm cache, as in the figure; tokens in natural order, where a call permutes them itself if it needs a
different order; and plan order with a cold second-level cache. The best of all plans stands apart, with the number of
plans. Above 1 is faster. A peer that did not run is missing, and the reason is given. DynamicViT's pattern, all queries
by the kept keys, is what training masks. Inference computes dense attention over the kept tokens; it is shown, and it
is no peer, since its result differs. Peers take turns with the headline plan: times of
theirs are over what it took in these turns, times what stands beside them.
"""

import numpy as np

from tilewright_study.baselines.sparse import DENSE
from tilewright_study.tables import _read, _select

# Where the tokens stand, and in which state the cache is. Suffix of the columns: whether the tokens stand in plan order
# already, or are permuted inside the calls that need a different order; the time.
FORMS = {"": (True, "p50_us"), "_natural": (False, "p50_us"), "_cold": (True, "cold_us")}

SHOWN = {
    "model": ("workload", ""),
    "case": ("case", ""),
    "tokens": ("tokens", ",.0f"),
    "density": ("density", ".3f"),
    "plan": ("headline plan", ""),
    "plan_us": ("headline p50 (µs)", ",.1f"),
    "dense_us": ("dense p50 (µs)", ",.1f"),
    "dense": ("dense by", ""),
    "speedup": ("× dense, measured", ".2f"),
    "paper_speedup": ("× FlashAttention, paper", ".2f"),
    "peer": ("fastest peer", ""),
    "peer_us": ("its p50 (µs)", ",.1f"),
    "over_peer": ("× fastest peer", ".2f"),
    "plan_us_natural": ("natural order: headline (µs)", ",.1f"),
    "speedup_natural": ("natural order: × dense", ".2f"),
    "peer_natural": ("natural order: fastest peer", ""),
    "peer_us_natural": ("natural order: its p50 (µs)", ",.1f"),
    "over_peer_natural": ("natural order: × fastest peer", ".2f"),
    "plan_us_cold": ("cold L2: headline (µs)", ",.1f"),
    "speedup_cold": ("cold L2: × dense", ".2f"),
    "peer_cold": ("cold L2: fastest peer", ""),
    "peer_us_cold": ("cold L2: its time (µs)", ",.1f"),
    "over_peer_cold": ("cold L2: × fastest peer", ".2f"),
    "best": ("best plan", ""),
    "best_us": ("its p50 (µs)", ",.1f"),
    "plans": ("plans measured", ",.0f"),
    "sdpa_mask": ("masked SDPA, × dense", ".2f"),
    "flex": ("FlexAttention, × dense", ".2f"),
    "flex_natural": ("FlexAttention in natural order, × dense", ".2f"),
    "inference_us": ("inference, dense over kept (µs)", ",.1f"),
    "device": ("device", ""),
    "reason": ("why blank", ""),
}


# Columns of the rows that the table is made of; selecting them halves its time.
_USED = [
    *("family", "resolution", "model", "heads", "head_dim", "tokens", "density", "provider", "variant", "reorder"),
    *("tiles", "solver", "ordered", "status", "reason", "speedup", "p50_us", "rse", "cold_us", "device"),
    *("plan_us", "plan_rse"),
]


def needs(config):
    """Every bench file, and the paper's bars."""
    files = _select.attention(config, config.workloads)
    return [*files, _select.PAPER_LATENCY] if files else []


def table(inputs):
    """One row per workload, by family and resolution; ``reason`` gathers why peers or plans are missing."""
    import pandas as pd

    rows, paper = _read.frames(inputs, "attention", "paper_latency")
    rows, paper = _read.bench(rows)[_USED], _read.paper_speedups(paper)
    paper = best_of_paper(paper)
    result = []
    for model, group in rows.groupby("model", sort=False):
        family, resolution = group[["family", "resolution"]].iloc[0]
        plans = _read.plans(group).dropna(subset="p50_us")
        best, best_us, _ = _fastest(plans, "p50_us")
        # Inference's form is of a part of the pattern.
        whole = group[group["provider"] != _select.INFERENCE]
        # Who was measured in one order is not missing.
        ran = group.loc[group["status"] == "ok", "provider"]
        blank = group[(group["status"] != "ok") & group["reason"].ne("") & ~group["provider"].isin(ran)]
        forms = [_compared(group, suffix, *form) for suffix, form in FORMS.items()]
        flex = group[group["provider"].str.startswith("flex")]
        result.append(
            {
                "family": family,
                "resolution": resolution,
                "model": model,
                "case": _select.case(model),
                **{name: whole[name].max() for name in ("heads", "head_dim", "tokens", "density")},
                "paper_speedup": paper.get((family, resolution)),
                **{name: value for form in forms for name, value in form.items()},
                "best": best,
                "best_us": best_us,
                "plans": len(plans),
                "sdpa_mask": group.loc[group["provider"] == "sdpa_mask", "speedup"].max(),
                "flex": flex["speedup"].max(),
                "flex_natural": flex.loc[_in_natural(flex), "speedup"].max(),
                "inference_us": group.loc[group["provider"] == _select.INFERENCE, "p50_us"].min(),
                "device": _read.devices(group),
                "reason": "; ".join(sorted({f"{r.provider}: {r.reason}" for r in blank.itertuples()})),
            }
        )
    return pd.DataFrame(result).astype({"paper_speedup": float})


def best_of_paper(paper):
    """The paper's best speed-up by family and resolution, of its bars with their speed-ups."""
    return paper[paper["provider"] == "pipeline"].groupby(["family", "resolution"])["speedup"].max()


def _compared(group, suffix, ordered, column):
    """Columns of one form of a workload: the headline plan, the fastest dense attention and the fastest peer."""
    mine = _read.headline(group)
    peers = _paced(group[~group["provider"].isin(["tilewright", _select.INFERENCE])], mine)
    mine = mine[mine["ordered"] == ordered]
    if not ordered:
        natural = _in_natural(peers)
        # Who was not run in natural order counts there, without the permutation: in its favour.
        natural |= ~peers["provider"].isin(peers.loc[natural & peers["p50_us"].notna(), "provider"])
        peers = peers[natural]
    found, rows = {}, {"plan": mine, "dense": peers[peers["provider"].isin(DENSE)], "peer": peers}
    best = {name: _fastest(of, column) for name, of in rows.items()}
    for name, (words, us, _) in best.items():
        found |= {name: words, f"{name}_us": us}
    _, plan_us, plan_rse = best["plan"]
    for name, over in (("dense", "speedup"), ("peer", "over_peer")):
        _, us, rse = best[name]
        found |= {over: us / plan_us, f"noise_{name}": _read.noise(us / plan_us, plan_rse, rse)}
    return {name + suffix: value for name, value in found.items()}


def _paced(peers, mine):
    """`peers` as if the machine had been as fast as when the plan of the rows `mine` was timed: a plan that took turns
    with them says how fast it was. The error of that is added to theirs."""
    us = mine.loc[mine["ordered"], "p50_us"].min()
    pace = (us / peers["plan_us"]).fillna(1)
    times = peers[["p50_us", "cold_us"]].mul(pace, axis=0)
    return peers.assign(**times, rse=np.hypot(peers["rse"], peers["plan_rse"].fillna(0)))


def _in_natural(rows):
    """Which rows are of whoever keeps the natural order: no order, permuted inside the call, or whatever the order."""
    return (rows["reorder"] == "none") | ~rows["ordered"] | rows["provider"].isin(DENSE)


def _fastest(rows, column):
    """Name, time and its relative standard error, which a cold one has none of, of the row with the least `column`."""
    rows = rows.dropna(subset=column)
    if rows.empty:
        return "", float("nan"), float("nan")
    row = rows.loc[rows[column].idxmin()]
    return _name(row), row[column], row["rse"] if column == "p50_us" else float("nan")


def _name(row):
    if row["provider"] == "tilewright":
        return f"{row['reorder']} + {row['solver']} ({row['tiles']})"
    if row["provider"] in DENSE:
        return row["provider"]
    inside = "" if row["ordered"] else "permuted inside"
    # A member that has one form names the package that it is from.
    form = "" if row["variant"] in ("torch", row["provider"]) else row["variant"]
    return f"{row['provider']} ({', '.join(filter(None, [row['reorder'] or 'none', form, inside]))})"

"""Latency of attention by resolution and order: dense attention, greedy and ILP schedules.

Latency of one attention layer by resolution, as in the paper's figure. Above, milliseconds on this device: dense
attention by its fastest kernel, and for each order the greedy (pale) and the ILP schedule (full); bars are p50,
whiskers reach from p20 to p80, and each panel has its own scale. Below, the same bars as speed-ups over that dense
attention; diamonds are the paper's speed-ups over its FlashAttention bar (A100, whole networks). Milliseconds of
different devices do not compare; ratios do. The tokens stand in plan order, as inside a network, where the order is
applied once per stage. DynamicViT's mask, all queries by the kept keys, is what training computes; the dashed line is
what inference does, dense attention over the kept tokens alone.
"""

from tilewright_study.baselines.sparse import DENSE
from tilewright_study.figures import _style
from tilewright_study.tables import _read, _select

# From the left, where they were run.
_POLICY = {"greedy": "greedy", "published": "ILP, published objective", "ilp": "ILP"}
_WIDTH = 0.76


def needs(config, family):
    """Bench files of the family's workloads under the tile set that policies are compared on, and the paper's bars."""
    files = _select.attention_of_method(config, _select.of_family(config.workloads, family))
    return [*files, _select.PAPER_LATENCY] if files else []


def draw(inputs, family):
    """One column of two panels per workload of `family`, in order of resolution."""
    rows, paper = _read.frames(inputs, "attention", "paper_latency")
    rows = _read.bench(rows)
    rows = _compared(rows[(rows["family"] == family) & (rows["policy"] != "descent")])
    paper = _read.paper_speedups(paper)
    paper = paper[(paper["family"] == family) & paper["resolution"].isin(rows["resolution"])]
    columns = _read.labels(rows)
    orders = _style.sorted_orders(_read.plans(rows)["reorder"])
    policies = [name for name in _POLICY if name in set(rows["policy"]) | set(paper["policy"])]
    drawn = _style.figure(max(7.6, 3.4 * len(columns)), 6.4)
    panels = drawn.subplots(2, len(columns), squeeze=False, height_ratios=[1.15, 1], sharex=True)
    top = 1.15 * max(1.0, rows["speedup"].max(), paper["speedup"].max())
    why = {}
    for (above, below), (model, label) in zip(panels.T, columns.items(), strict=True):
        here = rows[rows["model"] == model]
        theirs = paper[paper["resolution"] == here["resolution"].iloc[0]]
        # Inference's form is of a part of the pattern.
        whole = here[here["provider"] != _select.INFERENCE]
        _latencies(above, here, orders, policies, why)
        _speedups(below, here, theirs, orders, policies, top)
        above.set_title(f"{label}\n{whole['tokens'].max():,.0f} tokens, density {whole['density'].max():.3f}")
        below.set_xticks(range(-1, len(orders)), ["dense", *map(_style.order_name, orders)])
    panels[0, 0].set_ylabel("latency, p50 (ms)")
    panels[1, 0].set_ylabel("× dense, same device")
    title = f"{_style.layer_name(family)}: latency of one attention layer"
    _style.head(drawn, title, _handles(rows, len(paper) > 0))
    tiles = " + ".join(sorted(set(_read.plans(rows)["tiles"])))
    device = _read.devices(rows)
    _style.notes(
        drawn,
        [
            f"Ours: {device}; tile set {tiles or 'none'}; tokens in plan order, whiskers p20 to p80; "
            f"each panel above has its own scale. Dense: the fastest kernel ({_style.dense_names(rows)}). "
            "Paper: A100, whole networks, speed-up over its FlashAttention bar.",
            *(f"× {_style.listed(names, 12)}: {reason}." for reason, names in why.items()),
        ],
    )
    return drawn


def _compared(rows):
    """Of the plans among `rows` those of one set of tiles, which policies are compared on, and of one solver for each
    policy: each bar has a place of its own, whatever else was timed."""
    mine = rows["provider"] == "tilewright"
    plans = rows[mine]
    if plans.empty:
        return rows
    policies = plans.groupby("tiles", sort=False)["policy"].nunique()
    tiles = max(policies.index, key=lambda name: (policies[name], name == _read.HEADLINE["tiles"]))
    plans = plans[plans["tiles"] == tiles]
    solvers = plans.sort_values("solver", key=lambda found: found != _read.HEADLINE["solver"], kind="stable")
    solvers = solvers.drop_duplicates("policy")["solver"]
    return rows[~mine | ((rows["tiles"] == tiles) & rows["solver"].isin(solvers))]


def bar_at(orders, order, policy, policies=("greedy", "ilp")):
    """Where the bar of a plan stands: about its order's tick, greedy to the left, ILP to the right."""
    return orders.index(order) + ((policies.index(policy) + 0.5) / len(policies) - 0.5) * _WIDTH


def _latencies(axes, rows, orders, policies, why):
    """Bars of p50 with whiskers; collects in `why` which bars are missing under each reason."""
    width = _WIDTH / len(policies)
    for row in _shown(rows).itertuples():
        dense = row.provider in DENSE
        x = -1 if dense else bar_at(orders, row.reorder, row.policy, policies)
        name = "dense" if dense else f"{_style.order_name(row.reorder)} + {_POLICY[row.policy]}"
        if row.status != "ok":
            axes.text(x, 0, "×", ha="center", va="bottom", color=_style.PAPER, fontsize=11)
            why.setdefault(f"{row.status}, {row.reason}", []).append(f"{row.model} {name}")
            continue
        p20, p50, p80 = row.p20_us / 1e3, row.p50_us / 1e3, row.p80_us / 1e3
        axes.bar(x, p50, width, **_bar_style(row, orders))
        axes.errorbar(x, p50, [[max(0, p50 - p20)], [max(0, p80 - p50)]], color=_style.INK, linewidth=0.8, capsize=1.5)
    for row in rows[rows["provider"] == _select.INFERENCE].dropna(subset="p50_us").itertuples():
        axes.axhline(row.p50_us / 1e3, **_INFERENCE_LINE)
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)


def _speedups(axes, rows, paper, orders, policies, top):
    """Bars of our speed-ups with their numbers above them, clear of the paper's diamonds."""
    bars = paper[(paper["provider"] == "pipeline") & paper["reorder"].isin(orders)]
    theirs = {(row.reorder, row.policy): row.speedup for row in bars.itertuples()}
    for row in _shown(rows).itertuples():
        if row.provider in DENSE or not row.speedup > 0:
            continue
        x = bar_at(orders, row.reorder, row.policy, policies)
        axes.bar(x, row.speedup, _WIDTH / len(policies), **_bar_style(row, orders))
        if row.policy == "ilp":
            diamond = theirs.get((row.reorder, row.policy), 0)
            near = -0.04 * top < diamond - row.speedup < 0.1 * top
            axes.text(
                x,
                0.012 * top + (max(row.speedup, diamond + 0.02 * top) if near else row.speedup),
                f"{row.speedup:.{1 if row.speedup < 10 else 0}f}",
                ha="center",
                va="bottom",
                fontsize=7.5,
                color=_style.INK,
                weight="bold",
            )
    axes.plot(
        [bar_at(orders, row.reorder, row.policy, policies) for row in bars.itertuples()],
        bars["speedup"],
        linestyle="none",
        **_PAPER_MARK,
    )
    axes.axhline(1, color=_style.DENSE, linewidth=1)
    axes.set_ylim(0, top)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)


_INFERENCE_LINE = {"color": _style.PAPER, "linewidth": 1, "linestyle": "--"}
_PAPER_MARK = {
    "marker": "D",
    "markersize": 4.5,
    "color": _style.PAPER,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}


def _shown(rows):
    """The dense row, and one row per plan: as a network runs it, with tokens in plan order."""
    mine = rows[(rows["provider"] == "tilewright") & (rows["ordered"] | (rows["status"] != "ok"))]
    mine = mine.sort_values("ordered", ascending=False, kind="stable").drop_duplicates(["reorder", "tiles", "solver"])
    return rows.loc[[*_read.dense(rows).index, *mine.index]]


def _bar_style(row, orders):
    if row.provider in DENSE:
        return {"color": _style.DENSE}
    colour = _style.order_colour(row.reorder, orders)
    if row.policy != "ilp":
        tint = _style.tint(colour, 0.4 if row.policy == "greedy" else 0.7)
        hatch = {} if row.policy == "greedy" else {"hatch": "////"}
        return {"color": tint, "edgecolor": colour, "linewidth": 0.7, **hatch}
    return {"color": colour, "edgecolor": colour, "linewidth": 0.7}


def _handles(rows, has_paper):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ilp = sorted(set(rows.loc[rows["policy"] == "ilp", "solver"]))
    names = ", ".join(_style.SOLVER_NAMES.get(name, name) for name in ilp)
    handles = [
        Patch(color=_style.DENSE, label="dense, fastest kernel"),
        Patch(facecolor=_style.tint(_style.INK), edgecolor=_style.INK, label="pale: greedy"),
        Patch(color=_style.INK, label=f"full: ILP ({names})"),
    ]
    if "published" in set(rows["policy"]):
        hatched = {"facecolor": _style.tint(_style.INK, 0.7), "edgecolor": _style.INK, "hatch": "////"}
        handles.insert(2, Patch(label="hatched: ILP, published objective", **hatched))
    if has_paper:
        handles.append(Line2D([], [], linestyle="none", label="paper, A100, whole networks", **_PAPER_MARK))
    if rows.loc[rows["provider"] == _select.INFERENCE, "p50_us"].notna().any():
        handles.append(Line2D([], [], label="inference: dense over the kept tokens", **_INFERENCE_LINE))
    return handles

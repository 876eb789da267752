"""One attention layer by resolution and order: how many times as fast as dense attention, by greedy and by the program.

One attention layer by resolution, as in the paper's figure: how many times as fast as dense attention by its fastest
kernel schedules are, for each order by greedy (pale), by integer programming with the published objective (hatched) and
by Tilewright's integer program (full). Diamonds are the paper's speed-ups over its FlashAttention bar (A100, whole
networks). The tokens stand in plan order, as inside a network, where the order is applied once per stage. DynamicViT's
mask, all queries by the kept keys, is what training computes; the dashed line is what inference does, dense attention
over the kept tokens alone.
"""

from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read, _select

# From the top, where they were run.
_POLICY = {"greedy": "greedy", "published": "ILP as published", "ilp": "ILP"}
_WIDTH = 0.8
# Resolutions that stand side by side.
_MOST = 3
_PAPER_MARK = {"marker": "D", "markersize": 5, "color": _style.PAPER, "markeredgecolor": "white", "linestyle": "none"}
_INFERENCE_LINE = {"color": _style.PAPER, "linewidth": 1.2, "linestyle": "--"}


def needs(config, family):
    """Bench files of the family's workloads under the tile set that policies are compared on, and the paper's bars."""
    files = _select.attention_of_method(config, _select.of_family(config.workloads, family))
    return [*files, _select.PAPER_LATENCY] if files else []


def draw(inputs, family):
    """A panel for each of `_MOST` resolutions, those with most schedules; a row of bars for each order."""
    rows, paper = _read.frames(inputs, "attention", "paper_latency")
    rows = _read.bench(rows)
    rows = _compared(rows[(rows["family"] == family) & (rows["policy"] != "descent")])
    plans = _read.plans(rows).dropna(subset="speedup")
    if plans.empty:
        return _style.nothing(f"{_style.layer_name(family)}: schedules over dense attention", rows["reason"])
    counts = plans.groupby("model", sort=False).size()
    columns = {model: label for model, label in _read.labels(rows).items() if counts.get(model) == counts.max()}
    columns = dict(list(columns.items())[:_MOST])
    rows, plans = (of[of["model"].isin(columns)] for of in (rows, plans))
    paper = _read.paper_speedups(paper)
    paper = paper[(paper["family"] == family) & paper["resolution"].isin(rows["resolution"])]
    orders = _palette.in_order(plans["reorder"], "orders")
    policies = [name for name in _POLICY if name in set(plans["policy"])]
    drawn = _style.figure(1.5 + len(orders) * (0.22 + 0.11 * len(policies)))
    panels = drawn.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, (model, label) in zip(panels, columns.items(), strict=True):
        here, own = rows[rows["model"] == model], plans[plans["model"] == model]
        theirs = paper[(paper["resolution"] == here["resolution"].iloc[0]) & (paper["provider"] == "pipeline")]
        theirs = theirs[theirs["reorder"].isin(orders) & theirs["policy"].isin(policies)]
        _bars(axes, own, theirs, orders, policies)
        inference = here.loc[here["provider"] == _select.INFERENCE, "p50_us"].min()
        if inference > 0:
            axes.axvline(own["dense_us"].iloc[0] / inference, **_INFERENCE_LINE)
        axes.axvline(1, color=_palette.DENSE, linewidth=1)
        # Inference's form is of a part of the pattern.
        tokens = here.loc[here["provider"] != _select.INFERENCE, "tokens"].max()
        label = f"{here['resolution'].iloc[0]:.0f} px" if here["resolution"].iloc[0] > 0 else label
        axes.set_title(f"{label}, {tokens:,.0f} tokens\ndense: {_style.duration(own['dense_us'].iloc[0])}", loc="left")
        axes.set_xlim(0, 1.35 * max(1, own["speedup"].max(), theirs["speedup"].max()))
        axes.set(xlabel="× dense, same device")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(orders)), map(_style.order_name, orders))
    panels[0].set_ylim(len(orders) - 0.5, -0.5)
    best = plans.groupby("model")["speedup"].max()
    finding = f"{_style.layer_name(family)}: {_style.times(best)} times as fast as dense attention"
    _style.head(drawn, finding, _handles(rows, policies, len(paper) > 0))
    _style.notes(drawn, f"One layer, {_read.devices(rows)}; dense by {_style.dense_names(rows)}.")
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
    """Where the bar of a plan stands: about its order's tick, greedy above, ILP below."""
    return orders.index(order) + ((policies.index(policy) + 0.5) / len(policies) - 0.5) * _WIDTH


def _bars(axes, rows, theirs, orders, policies):
    """Bars of speed-ups, with the number at each of the program's, and the paper's diamonds."""
    diamonds = {bar_at(orders, row.reorder, row.policy, policies): row.speedup for row in theirs.itertuples()}
    axes.plot([*diamonds.values()], [*diamonds], **_PAPER_MARK)
    wide = 0.25 * max(1, rows["speedup"].max(), theirs["speedup"].max())
    for row in rows.itertuples():
        colour = _palette.look(row.reorder, "orders").colour
        tint = {"greedy": 0.4, "published": 0.7, "ilp": 1.0}[row.policy]
        hatch = {"hatch": "////"} if row.policy == "published" else {}
        place = bar_at(orders, row.reorder, row.policy, policies)
        style = {"facecolor": _style.tint(colour, tint), "edgecolor": colour, "linewidth": 0.7, **hatch}
        axes.barh(place, row.speedup, _WIDTH / len(policies), **style)
        if row.policy == "ilp":
            at = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "weight": "bold"}
            # Clear of a diamond that would hide it.
            diamond = diamonds.get(place, 0)
            end = diamond if -0.05 * wide < diamond - row.speedup < wide else row.speedup
            axes.annotate(
                _style.ratio(row.speedup), (end, place), **at | {"xytext": (3 if end == row.speedup else 6, 0)}
            )


def _handles(rows, policies, has_paper):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    faces = {"greedy": {"alpha": 0.4}, "published": {"alpha": 0.6, "hatch": "////"}, "ilp": {}}
    handles = [
        Patch(facecolor=_style.SOFT, edgecolor=_style.INK, label=_POLICY[name], **faces[name]) for name in policies
    ]
    if has_paper:
        handles.append(Line2D([], [], label="the paper, A100", **_PAPER_MARK))
    if rows.loc[rows["provider"] == _select.INFERENCE, "p50_us"].notna().any():
        handles.append(Line2D([], [], label="dense over the kept tokens", **_INFERENCE_LINE))
    return handles

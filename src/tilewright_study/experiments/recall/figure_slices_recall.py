"""Share of attention that lists keep over the share of keys: slices and blocks, and who chooses them.

Share of attention kept over share of keys kept, each source of maps by itself: lists of single keys against lists of
blocks, chosen by the exact shares, and slices chosen by predictors (dashed). Recall is measured from log-sum-exps, the
mean over all queries of all heads. Planted maps say nothing about what trained networks attend to.
"""

from tilewright_study.experiments.recall import table_recall
from tilewright_study.experiments.slices import ORACLE, SLICE
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Sources of maps that stand side by side, those of trained networks first.
_MOST = 2


def needs(config):
    """What the table needs."""
    return table_recall.needs(config)


def draw(inputs):
    """A panel per source of maps."""
    frame = table_recall.table(inputs)
    lists = frame[(frame["chosen_by"] != "") & frame["provider"].isin(["", "tilewright"]) & (frame["status"] == "ok")]
    if lists.empty:
        return _style.nothing("Attention kept over keys kept", frame["reason"])
    lists = lists[lists["token_order"] == lists["token_order"].iloc[0]]
    cases = sorted(lists.groupby("case", sort=False), key=lambda case: case[1]["maps"].iloc[0] == "planted")[:_MOST]
    drawn = _style.figure(4.0)
    handles = {}
    for axes, (_, rows) in zip(drawn.subplots(1, len(cases), squeeze=False, sharey=True)[0], cases, strict=True):
        for label, own, style in _lines(rows):
            own = own.sort_values("density")
            (handles[label],) = axes.plot(100 * own["density"], 100 * own["recall"], label=label, **style)
        axes.set(xlabel="keys kept (%)")
        axes.set_title(_title(rows), loc="left")
    drawn.axes[0].set_ylabel("attention kept (%)")
    _style.head(drawn, _finding(cases[0][1]), handles.values())
    order = lists["token_order"].iloc[0].capitalize()
    _style.notes(drawn, f"{lists['dtype'].iloc[0]}, {_read.devices(lists)}; tokens in {order} order.")
    return drawn


def _title(rows):
    """Where maps are from."""
    first = rows.iloc[0]
    if first["maps"] == "planted":
        return f"planted maps, {first['tokens']:,.0f} tokens"
    noise = f", {first['clip_noise']:.0%} noise" if first["clip_noise"] > 0 else ""
    return f"{_style.network(first['network'])},\n{first['weights']}{noise}"


def _lines(rows):
    """``(label, rows, style)`` of each line: shapes of groups, then predictors."""
    exact = rows[rows["chosen_by"] == ORACLE]
    for group in _palette.in_order(exact["group"], "groups"):
        look = _palette.look(group, "groups")
        yield look.label, exact[exact["group"] == group], look.line
    chosen = rows[(rows["chosen_by"] != ORACLE) & (rows["group"] == SLICE)]
    for name in _palette.in_order(chosen["chosen_by"], "choosers"):
        look = _palette.look(name, "choosers")
        yield f"slices, by {look.label}", chosen[chosen["chosen_by"] == name], look.line | {"linestyle": "--"}


def _finding(rows):
    """Keys that slices and the largest blocks keep for the most attention that both were asked for."""
    exact = rows[rows["chosen_by"] == ORACLE]
    kept = exact.pivot_table(index="target", columns="group", values="density").dropna()
    others = [group for group in kept if group != SLICE]
    if SLICE not in kept or not others or kept.empty:
        return "Attention kept over keys kept"
    # Nine tenths, or what is nearest to it.
    target = min(kept.index, key=lambda share: abs(share - 0.9))
    least = kept.loc[target, others].min()
    return (
        f"For {target:.0%} of the attention slices keep {kept.loc[target, SLICE]:.0%} of the keys, blocks {least:.0%}"
    )

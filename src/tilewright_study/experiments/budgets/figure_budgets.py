"""Error at equal time, by who chooses how many keys each head lists: one share for all heads, or one for each.

Error of the result over that by dense attention, on a run that was not measured before, over the time that was allowed:
that of the share of the keys below, for all heads alike. A panel for each source of maps; shares of the keys are chosen
for all heads alike, by one mass of attention, or for each head. Planted maps say nothing about trained networks.
"""

from tilewright_study.experiments.budgets import DENSE, table_budgets
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Sources of maps that stand side by side.
_MOST = 2


def needs(config):
    """What the table needs."""
    return table_budgets.needs(config)


def draw(inputs):
    """A panel per case, a line per chooser."""
    frame = table_budgets.table(inputs)
    rows = frame[(frame["status"] == "ok") & (frame["chosen_by"] != DENSE)]
    if rows.empty:
        return _style.nothing("Error at equal time, by who chooses the keys of heads", frame["reason"])
    panels = sorted(
        rows.groupby("case", sort=False),
        key=lambda one: (one[1]["maps"].iloc[0] == "planted", -one[1]["tokens"].iloc[0]),
    )
    drawn, handles = _style.figure(3.6), {}
    shown = (
        panels[:1] + [one for one in panels[1:] if one[1]["maps"].iloc[0] != panels[0][1]["maps"].iloc[0]][: _MOST - 1]
    )
    for axes, (_, own) in zip(drawn.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name in _palette.in_order(own["chosen_by"], "budgets"):
            look, line = _palette.look(name, "budgets"), own[own["chosen_by"] == name].sort_values("keep")
            (handles[look.label],) = axes.plot(100 * line["keep"], 100 * line["error"], label=look.label, **look.line)
        axes.set(xlabel="time of this share for all heads (% of keys)", ylim=(0, None))
        axes.set_title(_title(own.iloc[0]), loc="left")
    drawn.axes[0].set_ylabel("error (%)")
    _style.head(drawn, _finding(shown[0][1]), handles.values())
    _style.notes(drawn, f"{rows['dtype'].iloc[0]}, {_read.devices(rows)}.")
    return drawn


def _title(first):
    """Where maps are from."""
    if first["maps"] == "planted":
        return f"planted maps, {first['tokens']:,.0f} tokens"
    return f"{_style.network(first['network'])}, {first['tokens']:,.0f} tokens,\n{first['weights']}"


def _finding(rows):
    """How much less the error of the program is, at the share where that is most."""
    made = table_budgets.program(rows)
    if made.empty or not made["less"].notna().any():
        return "Error at equal time, by who chooses the keys of heads"
    best = made.loc[made["less"].idxmax()]
    return f"In the time of {best['keep']:.0%} of the keys, shares for each head leave {best['less']:.0%} less error"

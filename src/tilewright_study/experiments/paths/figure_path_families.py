"""Paths of several networks against static ones: mean IoU over time of each table.

Mean IoU over time for the table of each network: at each time the path that scenes of choice prefer, as scenes of test
see it. Stars are static networks that were trained as long, without paths. Shown are the networks of the resolution at
which most were measured, one table of each size.
"""

from tilewright_study.experiments.paths import table_paths
from tilewright_study.figures import _style
from tilewright_study.tables import _read

# By the size of a network, the smallest first.
COLOURS = ("#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#882255")
# Recipes of tables, the first that a size has is shown.
_RECIPES = ("sampled", "plain", "continued")


def needs(config):
    """What the table `paths` needs."""
    return table_paths.needs(config)


def draw(inputs):
    """One panel of networks that have `paths.ALIKE` alike: fronts of median times, as claims have them."""
    rows = table_paths.table(inputs)
    rows = rows[(rows["rung"] == "trained") & rows["p50_us"].notna()]
    if rows.empty:
        return _style.nothing("Paths of trained networks", [])
    key, own = max(rows.groupby(table_paths.ALIKE, sort=False), key=lambda each: each[1]["network"].nunique())
    kept = own[own["kept"] == "yes"]
    cases = _cases(kept)
    # Of static networks those that were trained as long.
    static = table_paths.static(own, table_paths.equal(*cases))
    static = static[~static["case"].isin(cases)]
    drawn = _style.figure(4.3)
    axes = drawn.subplots()
    slowest_us = max(each["p50_us"].max() for each in (kept[kept["case"].isin(cases)], static) if len(each))
    ends = []
    for colour, case in zip(COLOURS, cases, strict=False):
        front = table_paths.front(kept[kept["case"] == case])
        times = [*front.index / 1e3, slowest_us / 1e3]
        seen = 100 * front.iloc[[*range(len(front)), -1]]
        axes.step(times, seen, where="post", color=colour, linewidth=2)
        ends.append((times[-1], seen.iloc[-1], _named(case), colour))
    _stars(axes, static)
    axes.set(xlabel="time (ms)", ylabel="mean IoU, scenes of test (%)", xlim=(0, None), ylim=(0, None))
    # Laid out before the ends of lines are named beside the panel.
    _style.head(drawn, _finding(kept, cases, static))
    stars = " Stars: networks without paths." if len(static) else ""
    _style.notes(
        drawn, f"{key[0]} px, {_read.devices(own)}, {own['dtype'].iloc[0]}. Lines: the table of one network.{stars}"
    )
    axes.set_xlim(0, 1.22 * slowest_us / 1e3)
    _style.end_labels(axes, ends)
    return drawn


def _cases(rows):
    """One case of each network, the smallest first."""
    found = {}
    for case in dict.fromkeys(rows["case"]):
        network, _, recipe = case.partition(".")
        rank = _RECIPES.index(recipe) if recipe in _RECIPES else len(_RECIPES)
        found[network] = min(found.get(network, (rank, case)), (rank, case))
    return [found[network][1] for network in sorted(found)][: len(COLOURS)]


def _stars(axes, static):
    """A star for each of `static` networks, with its name."""
    axes.scatter(static["p50_ms"], 100 * static["test"], s=80, zorder=4, marker="*", color=_style.PAPER)
    for row in static.itertuples():
        at = {"xytext": (-7, 4), "textcoords": "offset points", "ha": "right", "color": _style.PAPER}
        axes.annotate(f"static {_named(row.case).rpartition('-')[2]}", (row.p50_ms, 100 * row.test), **at)


def _named(case):
    """The network of a case in the field's words, without its resolution."""
    return _style.network(case.partition(".")[0]).partition(",")[0]


def _finding(kept, cases, static):
    """What the table of the largest network sees in the time of static ones; else its best, and half of that."""
    case = cases[-1]
    front = table_paths.front(kept[kept["case"] == case])
    smaller = static[static["network"] != case.partition(".")[0]].sort_values("p50_us")
    if len(smaller):
        points = 100 * (table_paths.at(front, smaller["p50_us"]) - smaller["test"].to_numpy())
        said = [
            f"{value:+.0f} against {_named(other).rpartition('-')[2]}".replace("-", "−")
            for value, other in zip(points, smaller["case"], strict=True)
        ]
        return f"One {_named(case)} with paths, points of mean IoU in the time of static networks: {', '.join(said)}"
    half = front[front >= front.iloc[-1] / 2]
    ends = [f"{100 * value:.0f} % in {_style.duration(us)}" for us, value in half.iloc[[-1, 0]].items()]
    return f"{_named(case)} with paths: mean IoU {', '.join(dict.fromkeys(ends))}"

"""What Tilewright does: a query's keys on a photograph, the mask before and after reordering, and what it gains.

Of a photograph, what the query in the framed token does not see is pale. The masks are those of one layer in the
model's order and in that of the headline plan, with its blocks. The bars are the headline plan's time over that of the
fastest other attention of the same run, dense or sparse, for the workload that gains least, the one that gains most and
some between them; pale where the other one is faster.
"""

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study.experiments.attention import figure_pattern, table_speedup
from tilewright_study.figures import _palette, _photograph, _style
from tilewright_study.tables import _read, _select

FAMILY = "regionvit"
PHOTOGRAPH = "astronaut"
# Workloads in the chart: the one that gains least over its fastest peer, the one that gains most, and between them.
BARS = 4


def needs(config):
    """Graphs of the first workload of `FAMILY` in the model's order and in the headline's, blocks of the latter, and
    what table ``speedup`` needs."""
    models = _select.of_family(_select.drawn(config, config.figures.pattern_workloads), FAMILY)[:1]
    orders = [order for order in ("none", _read.HEADLINE["reorder"]) if order in config.orders]
    blocks = _select.blocks(config, models, config.figures.pattern_tiles[:1])
    if len(orders) < 2 or not blocks:
        return []
    return [
        *(f"results/graphs/{model}/{order}.npz" for model in models for order in orders),
        *(path for path in blocks if f"/{_read.HEADLINE['reorder']}/" in path),
        *table_speedup.needs(config),
    ]


def draw(inputs):
    """Four panels side by side. Raises `ArtifactError` where a graph or the blocks are missing."""
    from tilewright import graph
    from tilewright.attention import blocks

    patterns = [path for path in inputs if path.suffix == ".npz"]
    by_kind = _read.by_kind(patterns, graph=graph.load, blocks=blocks.load)
    graphs = {path.stem: pattern for path, pattern in by_kind["graph"].items()}
    covers = list(by_kind["blocks"].values())
    headline = _read.HEADLINE["reorder"]
    if not {"none", headline} <= set(graphs) or len(covers) != 1:
        raise ArtifactError(f"overview: expected graphs none and {headline} and one file of blocks, found {[*graphs]}")
    frame = table_speedup.table([path for path in inputs if path not in patterns])
    drawn = _style.figure(4.5)
    above, below = drawn.subfigures(2, 1, height_ratios=(2.5, 1.5))
    photograph, before, after = above.subplots(1, 3)
    _seen(photograph, graphs["none"])
    _mask(before, graphs["none"], None, "the mask: queries × keys")
    _mask(after, graphs[headline], covers[0], "the mask reordered")
    found = _bars(below.subplots(), frame)
    _style.head(drawn, f"Run what the mask allows: {found}")
    _style.notes(drawn, f"RegionViT above. Below one layer of each, {_read.devices(frame)}.")
    return drawn


def _seen(axes, pattern):
    """The photograph, but for what the query in its middle does not see."""
    from matplotlib.patches import Rectangle

    from tilewright.core.images import load

    if pattern.meta.get("grid") is None:
        _bare(axes, "the tokens are of no grid")
        return
    height, width = pattern.meta["grid"]
    special = pattern.n_rows - height * width
    side = max(1, 448 // max(height, width))
    image = load(PHOTOGRAPH, (height * side, width * side))
    # The query in the middle of those that the one in the middle of the image sees.
    middle = pattern.row(special + height // 2 * width + width // 2) - special
    row, column = (round(float(np.median(places))) for places in divmod(middle[middle >= 0], width))
    query = row * width + column
    keys = pattern.row(special + query) - special
    seen = np.zeros(height * width, bool)
    seen[keys[keys >= 0]] = True
    seen = np.kron(seen.reshape(height, width), np.ones((side, side), bool))
    axes.imshow(_photograph.picture(image, seen))
    top, left = (side * place - 0.5 for place in divmod(query, width))
    axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=_style.PAPER, linewidth=1.8))
    _bare(axes, "what one query sees")


def _mask(axes, pattern, cover, title):
    extent = (0, pattern.n_cols, pattern.n_rows, 0)
    shown = figure_pattern.picture(pattern, cover)
    axes.imshow(shown, extent=extent, interpolation="antialiased", aspect="auto")
    axes.set_box_aspect(1)
    _bare(axes, title)
    for side in axes.spines.values():
        side.set(visible=True, color="#999999", linewidth=0.6)


def _bare(axes, title):
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(title)


def _bars(axes, frame):
    """How many times as fast as the fastest peer the headline plan of `BARS` workloads is; returns it in words."""
    rows = frame[frame["over_peer"] > 0].sort_values("over_peer")
    if not len(rows):
        _bare(axes, "no time was measured")
        return "what it does to a mask"
    places = sorted({round(place) for place in np.linspace(0, len(rows) - 1, BARS)})
    rows = rows.iloc[places[::-1]]
    colours = [_palette.BLUE if ratio >= 1 else _style.PAPER for ratio in rows["over_peer"]]
    axes.barh(range(len(rows)), rows["over_peer"], 0.62, color=colours)
    for y, row in enumerate(rows.itertuples()):
        peer = _palette.look(row.peer.partition(" ")[0], "sparse").label
        text = f"{_style.ratio(row.over_peer)}: {_style.duration(row.plan_us)}, {peer} {_style.duration(row.peer_us)}"
        axes.annotate(text, (max(1, row.over_peer), y), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=_palette.DENSE, linewidth=1)
    layers = [f"{_style.layer_name(row.family)}, {row.tokens:,.0f} tokens" for row in rows.itertuples()]
    # Layers of one name differ by their heads.
    names = [
        f"{name}, {row.heads:.0f} × {row.head_dim:.0f}" if layers.count(name) > 1 else name
        for name, row in zip(layers, rows.itertuples(), strict=True)
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    most = rows["over_peer"].max()
    axes.set_xlim(0, max(1, most) * 2.3)
    axes.set_xlabel("× the fastest other attention")
    axes.grid(axis="y", visible=False)
    return f"{_style.times(frame['over_peer'])} times as fast as the fastest other attention"

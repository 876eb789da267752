"""Is it worth it: speed-up of a window over dense attention by tokens and density, of one layer and of a whole block;
the line is where they are equally fast."""

import itertools
import string

import numpy as np

from tilewright_study.experiments.worth import table_worth
from tilewright_study.figures import _style
from tilewright_study.tables import _read

TITLES = {"layer": "attention alone", "block": "whole block of ViT-B"}
# Colours saturate here: a large ratio at many tokens would leave those near 1 pale.
REACH = 4.0
ALPHA = 0.85


def needs(config):
    """What the table of the same name needs."""
    return table_worth.needs(config)


def draw(inputs):
    """Two panels: numbers in cells, red where the plan is faster, hatched with a letter where nothing was measured."""
    from matplotlib.colors import LogNorm
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    found = table_worth.table(inputs)
    found = _of_one_device(found)
    tokens, densities = sorted(set(found["tokens"])), sorted(set(found["asked"]))
    drawn = _style.figure(2 * (0.82 * max(4, len(tokens)) + 0.6) + 1.6, 0.56 * len(densities) + 2.5)
    panels = drawn.subplots(1, len(table_worth.MEASURED), sharey=True)
    norm, reasons = LogNorm(1 / REACH, REACH), {}
    for axes, part in zip(panels, table_worth.MEASURED, strict=True):
        values, why = (
            found.pivot(index="asked", columns="tokens", values=f"{part}_{what}").reindex(densities)[tokens]
            for what in ("ratio", "reason")
        )
        values = values.to_numpy(float)
        colours = {"cmap": "RdBu_r", "norm": norm, "alpha": ALPHA}
        image = axes.imshow(np.clip(values, 1 / REACH, REACH), origin="lower", aspect="auto", **colours)
        _break_even(axes, values)
        for y, x in itertools.product(range(len(densities)), range(len(tokens))):
            if np.isnan(values[y, x]):
                reason = why.iat[y, x] if isinstance(why.iat[y, x], str) and why.iat[y, x] else "not asked for"
                _blank(axes, x, y, reasons.setdefault(reason, string.ascii_lowercase[len(reasons) % 26]))
                continue
            dark = abs(np.log(values[y, x])) > 0.65 * np.log(REACH)
            number = axes.text(x, y, _ratio(values[y, x]), ha="center", va="center", fontsize=9)
            number.set_color("white" if dark else _style.INK)
            # The line may pass behind it.
            cell = image.cmap(norm(np.clip(values[y, x], 1 / REACH, REACH)))[:3]
            number.set_path_effects([withStroke(linewidth=3, foreground=_style.tint(cell, ALPHA))])
        axes.set_title(f"{TITLES[part]}\n{_pays(found, part)}", loc="left", fontsize=9)
        axes.set_xticks(range(len(tokens)), [f"{n:,.0f}" for n in tokens])
        axes.set_xlabel("tokens")
        axes.grid(False)
        axes.tick_params(length=0)
        axes.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(-0.5, len(densities) - 0.5))
    panels[0].set_yticks(range(len(densities)), [f"{density:.0%}" for density in densities])
    panels[0].set_ylabel("pairs that the window keeps")
    bar = drawn.colorbar(image, ax=panels, label="× dense (log scale)", shrink=0.9, pad=0.015)
    _ticks(bar)
    line = Line2D([], [], color=_style.INK, linewidth=1.8, linestyle="--", label="as fast as dense")
    _style.head(drawn, "Is a window worth it? Plan over the fastest dense attention", [line])
    _style.notes(drawn, _notes(found, reasons))
    return drawn


def _of_one_device(found):
    """The rows of the device and type with the most tokens: several cannot share a picture."""
    key = ["device", "dtype", "batch", "compiled"]
    sets = [rows for _, rows in found.groupby(key, dropna=False, sort=False)]
    return max(sets, key=lambda rows: (rows["tokens"].max(), len(rows)))


def _ratio(value):
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _pays(found, part):
    """From how many tokens on a part pays, at the lowest density that does and at the highest, in words."""
    sizes = found.drop_duplicates("asked").set_index("asked")[f"{part}_from"].dropna().sort_index()
    if not len(sizes):
        return "faster than dense at none of these sizes"
    low, high = sizes.index[0], sizes.index[-1]
    if sizes[low] == sizes[high]:
        densities = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        return f"faster from {sizes[low]:,.0f} tokens at {densities}"
    return f"faster from {sizes[low]:,.0f} tokens at {low:.0%}, {sizes[high]:,.0f} at {high:.0%}"


def _break_even(axes, values):
    """The line of equal times, between the centres of cells, where there is one."""
    measured = values[~np.isnan(values)]
    if min(values.shape) < 2 or not len(measured) or measured.min() >= 1 or measured.max() <= 1:
        return
    logs = np.ma.masked_invalid(np.log(values))
    axes.contour(logs, levels=[0.0], colors=[_style.INK], linewidths=1.8, linestyles="--")


def _blank(axes, x, y, letter):
    from matplotlib.patches import Rectangle

    place = x - 0.5, y - 0.5
    axes.add_patch(Rectangle(place, 1, 1, facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0))
    box = {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 1}
    axes.text(x, y, f"({letter})", ha="center", va="center", fontsize=8, color="#555555", bbox=box)


def _ticks(bar):
    """Plain numbers at the colour bar; what is beyond has the colour of its end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    bar.ax.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.7, 1, 1.4, 2, 4]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _notes(found, reasons):
    first = found.iloc[0]
    how = "all but attention compiled" if str(first["compiled"]).lower() == "true" else "not compiled"
    shared = found[found["square"] > 1].drop_duplicates("tokens")
    squares = ", ".join(
        f"{row.square:.0f} × {row.square:.0f} at {row.tokens:,.0f} tokens" for row in shared.itertuples()
    )
    lines = [
        f"{first['heads']:.0f} heads × {first['head_dim']:.0f}, {first['dtype']}, batch {first['batch']:.0f}; "
        f"{_read.devices(found)}; dense by {_style.dense_names(found)}. Block: norms, projections, attention, MLP, "
        f"{how}. Tokens stand in plan order, which a network sets once.",
        "A window around each token and one global token"
        + (f"; queries share windows in squares: {squares}." * bool(squares) or "."),
    ]
    return [*lines, *(f"({letter}) {reason}" for reason, letter in reasons.items())]

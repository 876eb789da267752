"""The style of every figure: `tilewright.commands.style`, and colours and names of orders, peers and solvers."""

import textwrap

from tilewright.commands.style import check_suffix as check_suffix
from tilewright.commands.style import context as context
from tilewright.commands.style import figure as figure
from tilewright.commands.style import head as head
from tilewright.commands.style import save as save
from tilewright.commands.style import settle as settle
from tilewright.commands.style import tile_colour as tile_colour
from tilewright.commands.style import tint as tint
from tilewright_study.tables import _select

# Okabe and Ito's palette, distinct under every common colour blindness (jfly.uni-koeln.de/color).
ORDER_COLOURS = {"none": "#56B4E9", "rcm": "#E69F00", "hc": "#CC79A7", "ic": "#009E73", "window": "#0072B2"}
ORDER_NAMES = {"none": "none", "rcm": "RCM", "hc": "HC", "ic": "IC", "window": "window"}
_FURTHER = ("#D55E00", "#882255", "#44AA99", "#999933")
DENSE, PAPER, INK, PALE = "#5A5A5A", "#D55E00", "#222222", "#D9D9D9"
FAMILY_NAMES = {"vil": "Vision Longformer", "regionvit": "RegionViT", "dynamicvit": "DynamicViT"}
PROVIDER_NAMES = {
    **{"sdpa_dense": "torch's default", "sdpa_flash": "FlashAttention", "sdpa_cudnn": "cuDNN"},
    **{"sdpa_efficient": "memory-efficient", "sdpa_mask": "masked SDPA", "flex": "FlexAttention"},
    **{"fa4": "FlashAttention 4", "cudnn_flex": "cuDNN flex", "flashinfer": "FlashInfer"},
}
SOLVER_NAMES = {"greedy": "greedy", "descent": "descent", "highs": "HiGHS", "gurobi": "Gurobi"}
SOLVER_NAMES |= {f"{name}-paper": f"{SOLVER_NAMES[name]}, published objective" for name in ("highs", "gurobi")}


def order_colour(order, known=()):
    """Colour of an order; orders that users add take further ones, by their place in `known`."""
    further = sorted(set(known) - set(ORDER_COLOURS))
    return ORDER_COLOURS.get(order) or _FURTHER[further.index(order) % len(_FURTHER)]


def order_name(order):
    """Order as written in figures."""
    return ORDER_NAMES.get(order, order)


def sorted_orders(names):
    """`names` of orders, once each: the study's first, in its sequence, then others by name."""
    known = list(ORDER_COLOURS)
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))


def boxes(axes, frame=None, **setting):
    """Boxes of a distribution in `axes`, `setting` as in ``seaborn.boxplot``: quartiles, whiskers from 10 to 90 %."""
    import warnings

    import seaborn
    from matplotlib import MatplotlibDeprecationWarning

    with warnings.catch_warnings():
        # Seaborn 0.13 draws in a way that matplotlib 3.13 gives up.
        warnings.simplefilter("ignore", MatplotlibDeprecationWarning)
        seaborn.boxplot(frame, ax=axes, whis=(10, 90), fliersize=2.5, linewidth=0.9, **setting)


def plain_ticks(axis):
    """Label a logarithmic axis with plain numbers: at 1, 2 and 5 of each decade, or only at 1 where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1e5 else f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def outlined(text, width=2):
    """Give `text` a white rim, so that it reads on any colour."""
    from matplotlib.patheffects import withStroke

    text.set_path_effects([withStroke(linewidth=width, foreground="white")])


def layer_name(family):
    """Family as written above attention layers, which for DynamicViT are of its training mask."""
    name = FAMILY_NAMES.get(family, family)
    return ", ".join(filter(None, [name, _select.case(family)]))


def dense_names(rows):
    """Which kernels the dense attention is of that the bench rows are compared with, in words."""
    return listed([PROVIDER_NAMES.get(name, name) for name in sorted(set(rows["dense"]) - {""})]) or "not run"


def listed(names, most=4, what="workloads"):
    """`names` in words; their number where they are many."""
    names = list(dict.fromkeys(names))
    return ", ".join(names) if len(names) <= most else f"{len(names)} {what}"


def folded(name, width=14):
    """A hyphenated name in lines of at most `width` letters where its parts allow it."""
    lines = textwrap.wrap(name.replace("-", "- "), width, break_long_words=False)
    return "\n".join(line.replace("- ", "-") for line in lines)


def ratio(value):
    """A speed-up in words, two digits where it is below 1."""
    return f"{value:.1f}×" if value >= 1 else f"{value:.2f}×"


def notes(drawn, lines):
    """Put small notes under a figure: how to read it, and why something is blank."""
    letters = int(17 * drawn.get_figwidth())
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, letters))
    drawn.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#555555")


def nothing(axes, text):
    """Say inside empty axes why they are empty."""
    axes.set(xticks=[], yticks=[])
    place = axes.get_subplotspec()
    # Of a figure or of a part of one.
    inches = axes.figure.bbox.width / axes.figure.dpi * len(place.colspan) / place.get_gridspec().ncols
    text = textwrap.fill(text, max(12, int(11 * inches)))
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#555555")

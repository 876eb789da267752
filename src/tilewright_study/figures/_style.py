"""The style of every figure, and how it is written: one colour per order and per tile, the same bytes each time."""

import contextlib
import math
import textwrap
from pathlib import Path

from tilewright.blocks import tiles
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
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

# Inches that a title, a label of an axis and notes need.
NARROWEST = 5.0

# Dates and versions out of the files: equal inputs give equal bytes.
_METADATA = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.hashsalt": "tilewright",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.6,
}


@contextlib.contextmanager
def context():
    """Draw in the house style, whatever the user's own settings are; they are back afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def figure(width, height):
    """An empty figure of `width` x `height` inches, no narrower than `NARROWEST`, whose parts are laid out without
    overlap."""
    from matplotlib.figure import Figure

    return Figure(figsize=(max(width, NARROWEST), height), layout="constrained")


def check_suffix(path):
    """Raise `ArtifactError` unless `path` ends in a format that can be written."""
    if Path(path).suffix not in _METADATA:
        known = ", ".join(_METADATA)
        raise ArtifactError(f"{path}: expected a name ending in {known}, found {Path(path).suffix!r}")


def settle(drawn):
    """Lay the parts of a figure out, once for all formats that it is saved in."""
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")


def save(drawn, path):
    """Write a figure atomically, without dates or versions in it."""
    suffix = Path(path).suffix
    with artifacts.atomic(path) as temporary:
        drawn.savefig(temporary, format=suffix[1:], metadata=_METADATA[suffix])


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


def tile_colour(name):
    """Colour of a tile: gathered slices are orange to brown, tiles of contiguous keys purple; more rows are darker."""
    import matplotlib

    tile = tiles.parse(name)
    shades = matplotlib.colormaps["YlOrBr" if tile.gathered else "Purples"]
    return shades(max(0.2, 0.35 + 0.18 * (math.log2(tile.rows) - 4)))


def tint(colour, strength=0.4):
    """`colour` mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))


def head(drawn, title, handles=(), columns=None):
    """Put a title and below it a legend on top of a figure, outside its panels, in one line or in `columns`, or in as
    many as the figure is wide enough for."""
    handles = list(handles)
    for most in range(max(1, columns or len(handles)), 0, -1):
        legend = drawn.legend(handles=handles, loc="outside upper center", ncols=most, title=title, columnspacing=1.6)
        legend.get_title().set(fontsize=11.5, fontweight="bold")
        if most == 1 or legend.get_window_extent().width <= drawn.bbox.width:
            break
        legend.remove()


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

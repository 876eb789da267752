"""The style of every figure: as wide as a page, letters that are read there, a finding above and its origin below."""

import re
import textwrap

from tilewright.commands import style
from tilewright.commands.style import check_suffix as check_suffix
from tilewright.commands.style import context as context
from tilewright.commands.style import settle as settle
from tilewright.commands.style import tile_colour as tile_colour
from tilewright.commands.style import tint as tint
from tilewright_study.figures import _palette
from tilewright_study.tables import _select

# Inches of a page, 700 pixels of a screen, and points of the smallest letters on it.
WIDTH, LETTERS = 7.3, 9
PAPER, INK, PALE, SOFT = "#D55E00", "#222222", "#D9D9D9", "#555555"
SOLVER_NAMES = {"greedy": "greedy", "descent": "descent", "highs": "HiGHS", "gurobi": "Gurobi"}
_FINDING = {"fontsize": 12, "fontweight": "bold"}
# Families of networks, in names of their members.
_SHORT = {
    **{"vil": "ViL", "regionvit": "RegionViT", "dynamicvit": "DynamicViT", "deit": "DeiT", "segformer": "SegFormer"},
    **{"wan": "Wan", "file": "mask"},
}
# Colours of a PNG that are as they were drawn.
_EXACT = 160


def figure(height):
    """An empty figure as wide as a page, `height` inches high, whose parts are laid out without overlap."""
    return style.figure(WIDTH, height)


def save(drawn, path):
    """Write a figure, without dates or versions in it; a PNG has a palette, which makes it a third as large."""
    style.save(drawn, path)
    if str(path).endswith(".png"):
        from PIL import Image

        from tilewright.core import artifacts

        with Image.open(path) as opened:
            small = _with_palette(opened.convert("RGB"))
        with artifacts.atomic(path) as temporary:
            small.save(temporary, format="png", optimize=True)


def _with_palette(picture):
    """A picture of 256 colours: those of most pixels as they are, so that no surface or mark changes its own, and the
    rest by the nearest of all."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(picture)
    codes = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    found, at, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], 1).astype(np.float32)
    exact = colours[np.argsort(counts, kind="stable")[::-1][:_EXACT]]
    others = picture.quantize(256 - _EXACT, method=Image.Quantize.MEDIANCUT).getpalette()
    palette = np.concatenate([exact, np.array(others, np.float32).reshape(-1, 3)])
    # Nearest by |c|² - 2 c·p + |p|², the first of which is the same for all; some at a time, for a photograph has many.
    parts = np.array_split(colours, 1 + len(colours) // 4096)
    nearest = [np.argmin((palette**2).sum(1) - 2 * part @ palette.T, axis=1) for part in parts]
    small = Image.fromarray(np.concatenate(nearest).astype(np.uint8)[at.reshape(codes.shape)], "P")
    small.putpalette(palette.astype(np.uint8).tobytes())
    return small


def head(drawn, finding, handles=()):
    """Put what a figure shows above it, and below that a legend in as many columns as there is room for."""
    handles, title = list(handles), _wrapped(drawn, finding, **_FINDING)
    for columns in range(max(1, len(handles)), 0, -1):
        legend = drawn.legend(
            handles=handles, loc="outside upper left", ncols=columns, title=title,
            alignment="left", columnspacing=1.4, handletextpad=0.5, fontsize=LETTERS, borderaxespad=0.2,
        )  # fmt: skip
        legend.get_title().set(**_FINDING)
        if columns == 1 or legend.get_window_extent().width <= drawn.bbox.width:
            break
        legend.remove()


def _wrapped(drawn, words, **font):
    """Words in lines that a figure has room for."""
    for letters in range(120, 20, -4):
        text = drawn.text(0, 0, textwrap.fill(words, letters), **font)
        width = text.get_window_extent().width
        text.remove()
        if width <= 0.97 * drawn.bbox.width:
            break
    return textwrap.fill(words, letters)


def notes(drawn, text):
    """Say in small letters under a figure where its numbers are from and how to read it."""
    drawn.supxlabel(_wrapped(drawn, text, fontsize=LETTERS), x=0.01, ha="left", fontsize=LETTERS, color=SOFT)


def nothing(finding, reasons):
    """A figure of a run in which nothing was measured: what it would show, and why it does not."""
    drawn = figure(1.2)
    head(drawn, finding)
    why = "; ".join(dict.fromkeys(filter(None, reasons))) or "no reason is given"
    drawn.text(
        0.01, 0.3, _wrapped(drawn, f"Nothing was measured: {why}", fontsize=LETTERS), fontsize=LETTERS, va="center"
    )
    return drawn


def times(values):
    """How many times as fast, in words: ``2.1 to 4.0``, or one number."""
    values = [value for value in values if value > 0]
    ends = [_digits(min(values)), _digits(max(values))]
    return " to ".join(dict.fromkeys(ends))


def ratio(value):
    """A speed-up in words, two digits where it is below 1."""
    return f"{_digits(value)}×"


def _digits(value):
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def duration(us):
    """A time in a unit that leaves one to four digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("µs", 1)):
        if us >= size or unit == "µs":
            value = us / size
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.{1 if value >= 9.95 else 2}f} {unit}"


def end_labels(axes, lines, room=1.0):
    """Write names at the right ends of lines, moved apart where they would overlap.

    lines: ``(x, y, text, colour)`` of each end. room: points between lines of text over their height.
    """
    if not lines:
        return
    figure = axes.get_figure()
    figure.draw_without_rendering()
    pixels = [(axes.transData.transform((x, y)), text, colour) for x, y, text, colour in lines]
    gap = room * 1.25 * LETTERS * figure.dpi / 72
    pixels.sort(key=lambda each: each[0][1])
    heights = [place[1] for place, *_ in pixels]
    high = axes.bbox.y1
    for at in range(1, len(heights)):
        heights[at] = max(heights[at], heights[at - 1] + gap)
    over = heights[-1] - high
    if over > 0:
        heights[-1] -= over
        for at in range(len(heights) - 2, -1, -1):
            heights[at] = min(heights[at], heights[at + 1] - gap)
    right = max(place[0] for place, *_ in pixels)
    for (place, text, colour), height in zip(pixels, heights, strict=True):
        offset = (right - place[0]) * 72 / figure.dpi + 7, (height - place[1]) * 72 / figure.dpi
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text, axes.transData.inverted().transform(place), offset, textcoords="offset points", va="center",
            fontsize=LETTERS, color=colour, annotation_clip=False, arrowprops=arrow,
        )  # fmt: skip


def log_ticks(axis, values):
    """A logarithmic axis with a tick at each of `values`."""
    axes, name = axis.axes, axis.axis_name
    values = sorted(set(values))
    axes.set(**{f"{name}scale": "log"})
    axis.set_ticks(values, [f"{value:,g}" if value < 1e5 else f"{value:,.0f}" for value in values])
    axis.set_ticks([], minor=True)


def ratio_ticks(axis):
    """Label a logarithmic axis of ratios near 1."""
    low, high = axis.get_view_interval()
    log_ticks(axis, [tick for tick in (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4) if low <= tick <= high])


def plain_ticks(axis, most=6):
    """Label a logarithmic axis with plain numbers: at 1, 2 and 5 of each decade, or only at 1 where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 10 ** (most / 3) else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1e3 else f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def order_name(order):
    """Order as written in figures."""
    return _palette.look(order, "orders").label


def layer_name(family):
    """Family as written above attention layers, which for DynamicViT are of its training mask."""
    return ", ".join(filter(None, [_palette.look(family, "families").label, _select.case(family)]))


def network(name):
    """The network of a workload or a network's own name in the field's words: ``ViL-tiny, 224 px``."""
    family, *parts = name.split("-")
    at = next((place for place, part in enumerate(parts) if re.fullmatch(r"\d+p?", part)), len(parts))
    variant = [part.upper() if len(part) <= 2 or part[0].isdigit() else part for part in parts[:at]]
    sizes = [f"{part} px" if part.isdigit() else part for part in parts[at : at + 1]]
    frames = [f"{part[:-1]} frames" for part in parts[at:] if re.fullmatch(r"\d+f", part)]
    return ", ".join(["-".join([_SHORT.get(family, family), *variant]), *sizes, *frames])


def workload(model, tokens):
    """A workload in the field's words: its network, the size of the image, tokens."""
    return f"{network(model)}, {tokens:,.0f} tokens"


def dense_names(rows):
    """Which kernels the dense attention is of that the bench rows are compared with, in words."""
    names = [_palette.look(name, "sparse").label for name in sorted(set(rows["dense"]) - {""})]
    return " or ".join(names) or "not run"

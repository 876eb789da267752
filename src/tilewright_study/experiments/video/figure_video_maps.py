"""Attention maps of video networks by source, and the keys that were chosen for one group of queries.

One group of 128 queries in several heads: its share of attention for each key of three frames, dark where it is large,
and the keys that pooled queries chose for nine tenths of it. Each source stands by itself: planted maps are made by
rule, those of a network are captured from its layers.
"""

import numpy as np

from tilewright_study.figures import _contenders, _style
from tilewright_study.stages import video_pictures

# Frames of a map that are shown.
FRAMES = 3
SOURCES = {"planted": "planted", "trained": "trained here", "official": "official weights"}


def needs(config):
    """Pictures of each network with weights."""
    return video_pictures.needs(config)


def draw(inputs):
    """A block of panels for each source: a row for each head, frames side by side."""
    from matplotlib.patches import Patch

    blocks, reasons = [], []
    for path in inputs:
        arrays, header = video_pictures.read(path)
        blocks += [(source, heads, arrays, header) for source, heads in header["maps"].items()]
        reasons += [header["reason"]] if header["reason"] and len(header["maps"]) == 1 else []
    rows, columns = max(len(heads) for _, heads, _, _ in blocks), len(blocks)
    aspect = max(header["grid"][1] / header["grid"][2] for *_, header in blocks)
    width = 5.4 * columns
    drawn = _style.figure(width, 1.7 + rows * (0.3 + aspect * 4.8 / FRAMES))
    parts = drawn.subfigures(1, columns, squeeze=False, wspace=0.04)[0]
    for part, (source, heads, arrays, header) in zip(parts, blocks, strict=True):
        _block(part, rows, source, heads, arrays)
        weights = "" if source == "planted" else f", {header['network']}, {header['weights']}"
        part.suptitle(f"{SOURCES[source]}{weights}", fontsize=9.5)
    handles = [
        Patch(facecolor="#333333", label="share of attention, dark is much"),
        Patch(facecolor=_style.tint(_contenders.BLUE, 0.16), edgecolor=_contenders.BLUE, label="keys that were chosen"),
        Patch(facecolor="none", edgecolor=_style.PAPER, label="the group of queries"),
    ]
    _style.head(drawn, "Keys chosen for a group of 128 queries", handles)
    first = blocks[0][3]
    _style.notes(
        drawn,
        [
            f"{first['device']}. The group's mean share of attention for each key, on a logarithmic scale from the "
            f"even share to the largest; lists by pooled queries for {first['mass']:.0%} of the attention, tokens in "
            f"Hilbert order. A network's clip has {first['noise']:.0%} noise. Planted maps are made by rule and say "
            "nothing about what trained networks attend to.",
            *reasons,
        ],
    )
    return drawn


def _block(part, rows, source, heads, arrays):
    """The heads of a source; shades from the even share of attention to the largest of a head."""
    from matplotlib.colors import to_rgb

    shares, kept, group = (arrays[f"maps.{source}.{what}"] for what in ("shares", "kept", "group"))
    panels = part.subplots(rows, FRAMES, squeeze=False)
    for axes in panels.ravel():
        axes.set_axis_off()
    shown = _frames(group)
    for own, name, share, keep in zip(panels, heads, shares, kept, strict=False):
        even = np.log(np.maximum(share * share.size, 1)) / np.log(max(2.0, share.max() * share.size))
        for axes, frame in zip(own, shown, strict=False):
            axes.imshow(even[frame], cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            tint = np.zeros((*keep[frame].shape, 4))
            tint[keep[frame]] = (*to_rgb(_contenders.BLUE), 0.16)
            axes.imshow(tint, interpolation="nearest")
            _outline(axes, keep[frame], _contenders.BLUE, 0.7)
            _outline(axes, group[frame], _style.PAPER, 1.4)
            _outline(axes, np.ones_like(group[frame]), _style.INK, 0.6)
            axes.grid(False)
            axes.text(0.5, -0.03, f"frame {frame}", ha="center", va="top", fontsize=7, transform=axes.transAxes)
        kept_mass = share[keep].sum() / share.sum()
        own[0].set_title(f"{name}: {keep.mean():.0%} of keys, {kept_mass:.0%} of attention", fontsize=8.5, loc="left")


def _frames(group):
    """Up to `FRAMES` frames, that of most queries of the group among them."""
    most = int(group.sum((1, 2)).argmax())
    chosen = np.linspace(0, len(group) - 1, FRAMES).round().astype(int)
    chosen[np.abs(chosen - most).argmin()] = most
    return sorted({int(frame) for frame in chosen})


def _outline(axes, marks, colour, width):
    """Lines around the tokens that are marked, bool [rows, columns]."""
    from matplotlib.collections import LineCollection

    padded = np.pad(marks, 1)
    lines = []
    for y, x in zip(*np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1]), strict=True):
        lines.append([(x - 0.5, y - 0.5), (x + 0.5, y - 0.5)])
    for y, x in zip(*np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1]), strict=True):
        lines.append([(x - 0.5, y - 0.5), (x - 0.5, y + 0.5)])
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width))

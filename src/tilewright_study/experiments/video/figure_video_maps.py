"""Attention maps of video networks by source, and the keys that were chosen for one group of queries.

One group of 128 queries in several heads: its share of attention for each key of three frames, dark where it is large,
and the keys that pooled queries chose for nine tenths of it. Planted maps are made by rule and say nothing about what
trained networks attend to; those of a network are captured from its layers.
"""

import numpy as np

from tilewright_study.figures import _palette, _style
from tilewright_study.stages import video_pictures

# Frames of a map that are shown.
FRAMES = 3
SOURCES = {"planted": "planted", "trained": "trained here", "official": "official weights"}


def needs(config):
    """Pictures of each network with weights."""
    return video_pictures.needs(config)


def draw(inputs):
    """A row for each head of one network, frames side by side: of its own maps where it was trained, else planted."""
    from matplotlib.patches import Patch

    found = [video_pictures.read(path) for path in inputs]
    arrays, header = next(((own, said) for own, said in found if len(said["maps"]) > 1), found[0])
    source, heads = list(header["maps"].items())[-1]
    aspect = header["grid"][1] / header["grid"][2]
    drawn = _style.figure(1.5 + len(heads) * (0.45 + aspect * (_style.WIDTH - 0.4) / FRAMES))
    shares, kept = (arrays[f"maps.{source}.{what}"] for what in ("shares", "kept"))
    _block(drawn, source, heads, arrays)
    handles = [
        Patch(facecolor="#333333", label="share of attention, dark is much"),
        Patch(facecolor=_style.tint(_palette.BLUE, 0.16), edgecolor=_palette.BLUE, label="chosen keys"),
        Patch(facecolor="none", edgecolor=_style.PAPER, label="the group of queries"),
    ]
    least, most = min(keep.mean() for keep in kept), max(keep.mean() for keep in kept)
    held = [share[keep].sum() / share.sum() for share, keep in zip(shares, kept, strict=True)]
    keys, attention = (
        " to ".join(dict.fromkeys(f"{100 * end:.0f}" for end in ends))
        for ends in ((least, most), (min(held), max(held)))
    )
    finding = f"A group of 128 queries: {keys} % of the keys hold {attention} % of its attention"
    _style.head(drawn, finding, handles)
    weights = "" if source == "planted" else f": {_style.network(header['network'])}, {header['weights']}"
    _style.notes(
        drawn,
        f"{header['device']}; maps {SOURCES[source]}{weights}. Shades on a logarithmic scale, from the even share up; "
        f"keys by pooled queries for {header['mass']:.0%} of the attention.",
    )
    return drawn


def _block(drawn, source, heads, arrays):
    """The heads of a source; shades from the even share of attention to the largest of a head."""
    from matplotlib.colors import to_rgb

    shares, kept, group = (arrays[f"maps.{source}.{what}"] for what in ("shares", "kept", "group"))
    panels = drawn.subplots(len(heads), FRAMES, squeeze=False)
    for axes in panels.ravel():
        axes.set_axis_off()
    shown = _frames(group)
    for own, name, share, keep in zip(panels, heads, shares, kept, strict=False):
        even = np.log(np.maximum(share * share.size, 1)) / np.log(max(2.0, share.max() * share.size))
        for axes, frame in zip(own, shown, strict=False):
            axes.imshow(even[frame], cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            tint = np.zeros((*keep[frame].shape, 4))
            tint[keep[frame]] = (*to_rgb(_palette.BLUE), 0.16)
            axes.imshow(tint, interpolation="nearest")
            _outline(axes, keep[frame], _palette.BLUE, 0.7)
            _outline(axes, group[frame], _style.PAPER, 1.4)
            _outline(axes, np.ones_like(group[frame]), _style.INK, 0.6)
            axes.grid(False)
            axes.text(
                0.5, -0.03, f"frame {frame}", ha="center", va="top", fontsize=_style.LETTERS, transform=axes.transAxes
            )
        kept_mass = share[keep].sum() / share.sum()
        own[0].set_title(
            f"{name}: {keep.mean():.0%} of keys, {kept_mass:.0%} of attention", fontsize=_style.LETTERS, loc="left"
        )


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

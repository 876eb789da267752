"""Scenes that a trained network has not seen, their labels, and what some of its paths see of them.

Scenes that the network has not seen, their labels, and the labels that some of its paths give, from the best to the
fastest that sees at least half as much.
"""

import numpy as np

from tilewright_study.figures import _style
from tilewright_study.stages import path_pictures

# No label, and the background.
BLANK, BACKGROUND = (1.0, 1.0, 1.0), (0.93, 0.93, 0.93)


def needs(config):
    """Pictures of each network."""
    return path_pictures.needs(config)


def draw(inputs):
    """A block for each network, a row for each scene: the picture, its labels, and a panel for each path."""
    from matplotlib.patches import Patch

    found = [path_pictures.read(path) for path in inputs]
    heights = [len(arrays["pictures"]) for arrays, _ in found]
    drawn = _style.figure(1.6 + sum(1.2 * height + 0.5 for height in heights))
    parts = drawn.subfigures(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    classes, shown = found[0][1]["classes"], set()
    colors = _colors(len(classes))
    for part, (arrays, header) in zip(parts, found, strict=True):
        scenes, paths = arrays["seen"].shape[:2]
        panels = part.subplots(scenes, 2 + paths, squeeze=False)
        for row, picture, labels, seen in zip(
            panels, arrays["pictures"], arrays["labels"], arrays["seen"], strict=True
        ):
            for axes, image in zip(row, [picture, *(colors[x] for x in (labels, *seen))], strict=True):
                axes.imshow(image, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                axes.spines[:].set_visible(False)
            shown |= set(np.unique(labels).tolist()) | set(np.unique(seen).tolist())
        told = zip(header["paths"], header["p50_us"], header["miou"], strict=True)
        titles = ["scene", "its labels", *(_title(*each) for each in told)]
        for axes, title in zip(panels[0], titles, strict=True):
            axes.set_title(title, fontsize=_style.LETTERS)
    handles = [
        Patch(facecolor=colors[at], edgecolor="#BBBBBB", linewidth=0.5, label=classes[at])
        for at in sorted(shown & set(range(len(classes))))
    ]
    _style.head(drawn, _finding(found), handles)
    devices = ", ".join(dict.fromkeys(header["device"] for _, header in found))
    names = ", ".join(_style.network(header["network"].partition(".")[0]) for _, header in found)
    _style.notes(
        drawn,
        f"{names}, {devices}. New scenes of known objects. Above each path: median time, mean IoU on scenes of test.",
    )
    return drawn


def _finding(found):
    """What the first network's best and fastest paths take and see."""
    _, header = found[0]
    (slow, *_, fast), (best, *_, least) = ([*values, values[-1]] for values in (header["p50_us"], header["miou"]))
    times = " to ".join(dict.fromkeys(map(_style.duration, (slow, fast))))
    return f"Paths of one network: {times} a scene, mean IoU {best:.0%} to {least:.0%}"


def _title(path, p50_us, miou):
    """How many blocks a path keeps, or the size of its image, its time and mean IoU."""
    scales = [float(knob.removeprefix("scale=")) for knob in path.split() if knob.startswith("scale=")]
    count = path.split()[0].count("1")
    small = [f"{scale:.0%} size" for scale in scales if scale != 1]
    return f"{(small or [f'{count} blocks'])[0]}\n{_style.duration(p50_us)}, {miou:.0%}"


def _colors(classes):
    """float64 [256, 3]: a color for each label."""
    from matplotlib import colormaps

    table = np.tile(np.array(BLANK), (256, 1))
    table[0] = BACKGROUND
    listed = np.array(colormaps["tab20"].colors)
    table[1:classes] = listed[np.arange(classes - 1) % len(listed)]
    return table

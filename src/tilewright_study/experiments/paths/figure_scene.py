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
    drawn = _style.figure(11.0, 1.9 + sum(1.6 * height + 0.6 for height in heights))
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
        titles = ["scene", "labels", *(_title(*each) for each in told)]
        for axes, title in zip(panels[0], titles, strict=True):
            axes.set_title(title, fontsize=7.5, loc="center")
        part.suptitle(header["network"], fontsize=9.5)
    handles = [
        Patch(facecolor=colors[at], edgecolor="#BBBBBB", linewidth=0.5, label=classes[at])
        for at in sorted(shown & set(range(len(classes))))
    ]
    _style.head(drawn, "What paths of a trained network see", handles, columns=8)
    devices = ", ".join(dict.fromkeys(header["device"] for _, header in found))
    _style.notes(
        drawn,
        [
            f"{devices}. New scenes of known objects. Above each path: the blocks that it keeps and what else it "
            "leaves out, its median time, and its mean IoU on scenes of test. White: no label.",
        ],
    )
    return drawn


def _title(path, p50_us, miou):
    """A path, its time and mean IoU."""
    blocks, *knobs = path.split()
    usual = ("levels=1234", "scale=1", "decoder=folded")
    other = " ".join([blocks, *(knob for knob in knobs if knob not in usual)])
    return f"{other}\n{p50_us / 1e3:,.2f} ms, mIoU {miou:.1%}"


def _colors(classes):
    """float64 [256, 3]: a color for each label."""
    from matplotlib import colormaps

    table = np.tile(np.array(BLANK), (256, 1))
    table[0] = BACKGROUND
    listed = np.array(colormaps["tab20"].colors)
    table[1:classes] = listed[np.arange(classes - 1) % len(listed)]
    return table

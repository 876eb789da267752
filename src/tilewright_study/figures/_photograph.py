"""A photograph, and beside it what parts of a network take of it: the rest is dimmed, the query token outlined."""

import numpy as np

from tilewright_study.figures import _style

# How far what is not seen goes to white.
DIMMED = 0.75


def picture(image, seen):
    """float32 [height, width, 3]: the image [3, height, width] in 0..1, dimmed where bool [height, width] is False."""
    image = image.transpose(1, 2, 0)
    return np.where(seen[:, :, None], image, 1 - (1 - DIMMED) * (1 - image))


def draw(image, views, title):
    """A panel of the image, float32 [3, height, width] in 0..1, and one for each of `views`, see `inference.View`."""
    from matplotlib.patches import Rectangle

    _, height, width = image.shape
    drawn = _style.figure(0.9 + _style.WIDTH / (1 + len(views)) * height / width)
    whole, *panels = drawn.subplots(1, 1 + len(views), squeeze=False)[0]
    whole.imshow(image.transpose(1, 2, 0))
    whole.set_title("image")
    for axes, view in zip(panels, views, strict=True):
        axes.imshow(picture(image, view.seen))
        axes.set_title(view.title)
        if view.token is not None:
            top, left, side = view.token
            # White beneath, so that it is seen on any colour.
            for colour, width in (("white", 4), (_style.PAPER, 1.8)):
                outline = {"fill": False, "edgecolor": colour, "linewidth": width}
                axes.add_patch(Rectangle((left - 0.5, top - 0.5), side, side, **outline))
    for axes in (whole, *panels):
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
    drawn.suptitle(title, fontweight="bold")
    return drawn

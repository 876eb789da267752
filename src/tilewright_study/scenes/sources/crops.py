"""Crops of scenes with a main object in the middle, and its class: images for networks that name one thing."""

import numpy as np

from tilewright_study.scenes import drawing, sources
from tilewright_study.scenes.sources import scenes

# ASSUME: sides of the main object's cell, in sides of the crop, and how far its middle lies from that of the crop.
MAIN, ASIDE = (0.45, 0.95), 0.12
# Which numbers of a scene place the crop. The first one also says how much noise it has, which changes nothing.
_SIZE, _RIGHT, _DOWN = 13, 14, 15


class Crops(scenes.Scenes):
    """See `tilewright_study.scenes.sources`. A crop's scene is that of the same index; its last object, in front, is
    main."""

    task = "classes"

    def __init__(self, seed=0):
        super().__init__(seed)
        self.classes = self.classes[1:]

    def drawn(self, split, indices, size, device="cpu"):
        """Pictures uint8 [B, 3, H, W] and labels int64 [B]."""
        import torch

        indices, pixels = sources.checked(self, split, indices), sources.pixels(size)
        numbers = drawing.numbers(split, indices, seed=self.seed)
        things = drawing.things(split, numbers, pixels)
        main = things.shown.sum(1) - 1
        at = np.arange(len(main)), main
        share = MAIN[0] + (MAIN[1] - MAIN[0]) * numbers.scene[:, _SIZE]
        aside = ASIDE * (2 * numbers.scene[:, _RIGHT : _DOWN + 1] - 1)
        shown = things.sizes[at] / share
        view = np.stack([things.x[at] + aside[:, 0] * shown, things.y[at] + aside[:, 1] * shown, shown], 1)
        listed = drawing.listed(split, numbers, things, pixels, view=view)
        pictures, _ = drawing.drawn(listed, pixels, device)
        named = drawing.objects.table().labels[things.kinds[at]] - 1
        return pictures, torch.from_numpy(named).to(pictures.device)


def create(seed=0):
    """Crops of a seed. Raises `ConfigError`."""
    return Crops(seed)

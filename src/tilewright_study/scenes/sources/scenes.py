"""Scenes of objects over photographs (`tilewright_study.scenes.drawing`), a label for each pixel."""

from tilewright.core import registry
from tilewright.core.errors import ConfigError
from tilewright_study.scenes import drawing, objects, sources

# Scenes of a split. Those of training never repeat.
COUNTS = {"train": 1 << 31, "fit": 4096, "choice": 4096, "test": 4096, "novel": 4096}
# Most bytes of scenes that are kept, of those that a CPU drew last.
KEPT_BYTES = 256 << 20


class Scenes:
    """See `tilewright_study.scenes.sources`. seed: scenes of another have nothing in common with these."""

    task = "maps"
    splits = tuple(drawing.SPLITS)

    def __init__(self, seed=0):
        if seed < 0:
            raise ConfigError(f"seed: expected at least 0, found {seed}")
        self.seed = seed
        self.classes = objects.table().classes
        self._kept = {}

    def count(self, split):
        """How many scenes a split has."""
        registry.check("split", split, self.splits)
        return COUNTS[split]

    def read(self, split, indices, size, device="cpu"):
        """Images and labels, see the contract."""
        pictures, labels = self.drawn(split, indices, size, device)
        return sources.normalised(pictures), labels

    def drawn(self, split, indices, size, device="cpu"):
        """Pictures uint8 [B, 3, H, W] and labels, as `read` has them."""
        indices, pixels = sources.checked(self, split, indices), sources.pixels(size)
        asked = split, tuple(indices), pixels
        # A CPU draws some ten scenes a second, and paths are judged by the same ones.
        if (kept := self._kept.get(asked)) is not None:
            return tuple(x.to(device) for x in kept)
        found = drawing.drawn(self.listed(split, indices, pixels), pixels, device)
        if found[0].is_cpu:
            self._kept[asked] = found
            while sum(x.nbytes for each in self._kept.values() for x in each) > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return found

    def listed(self, split, indices, pixels):
        """The `drawing.Listed` of scenes."""
        numbers = drawing.numbers(split, indices, seed=self.seed)
        return drawing.listed(split, numbers, drawing.things(split, numbers, pixels), pixels)


def create(seed=0):
    """Scenes of a seed. Raises `ConfigError`."""
    return Scenes(seed)

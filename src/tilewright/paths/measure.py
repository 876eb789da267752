"""What paths of a network really take and see: times, and mean IoU on scenes."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from tilewright.core import timing
from tilewright.paths import Path, Stages, shared
from tilewright.paths.calls import Calls
from tilewright.training import evaluation, statistics

# How paths' statistics are: of the trained network, or of each path.
RUNGS = ("trained", "statistics")
# Images that are labelled at once on a GPU, and on a CPU, and the most pixels of theirs: torch interpolates fewer than
# 2^31 values, and the published decoder has 768 channels on a sixteenth of the pixels.
BATCH = {True: 64, False: 4}
MOST_PIXELS = 64 * 512 * 512


class Scenes:
    """Images and labels of a source, read once and kept on a device."""

    def __init__(self, source, counts: Mapping[str, int], size, device):
        """counts: ``{split: how many}``, from the first."""
        self.source = source
        self.kept = {split: source.read(split, range(count), size, device) for split, count in counts.items()}

    def mean_ious(self, network, split: str, wanted: Iterable[Path], own: Mapping | None = None) -> dict[Path, float]:
        """Mean IoU of paths on a split's scenes; see `confusions`."""
        found = self.confusions(network, split, wanted, own)
        return {path: evaluation.mean_iou(each.sum(0)) for path, each in found.items()}

    def image_ious(self, network, split: str, wanted: Iterable[Path], own: Mapping | None = None):
        """``{path: mean IoU}`` as a mean over a split's scenes, each over the classes that occur in it; see
        `confusions`."""
        found = self.confusions(network, split, wanted, own, apart=True)
        return {path: float(np.mean([evaluation.mean_iou(one) for one in each])) for path, each in found.items()}

    @torch.inference_mode()
    def confusions(
        self, network, split: str, wanted: Iterable[Path], own: Mapping | None = None, *, apart: bool = False
    ) -> dict[Path, np.ndarray]:
        """``{path: int64 [n, classes, classes]}`` of a split's scenes; see `evaluation.confusion`.

        Paths that begin with the same blocks run them once. own: ``{path: Folded}`` of those with statistics of their
        own. apart: of each scene by itself, else of as many as are labelled at once.
        """
        images, labels = self.kept[split]
        weight, classes = next(network.parameters()), len(self.source.classes)
        batch = at_once(images.shape[2:], weight.is_cuda)
        wanted = shared(dict.fromkeys(wanted))
        found = {path: [] for path in wanted}
        for lo in range(0, len(images), batch):
            part, stages = images[lo : lo + batch].to(weight.dtype), Stages()
            truth = labels[lo : lo + batch]
            for path in wanted:
                folded = {"folded": own[path]} if own and own.get(path) else {}
                maps = network(part, path, stages=stages, **folded).float()
                each = zip(maps.split(1), truth.split(1), strict=True) if apart else [(maps, truth)]
                found[path] += [evaluation.counted(*both, classes) for both in each]
        return {path: torch.stack(each).cpu().numpy() for path, each in found.items()}

    def own(self, network, split: str, path: Path):
        """The folded decoder of a path with the statistics of its own on a split's images, whose labels are not read.

        None for a path whose decoder is not folded.
        """
        if path.decoder != "folded":
            return None
        return statistics.folded(
            network, statistics.measured(network, self, split, self._indices(split), path=path), path
        )

    def _indices(self, split):
        return range(len(self.kept[split][0]))

    def read(self, split, indices, size, device):
        """As a source: what is kept."""
        images, labels = self.kept[split]
        return images[list(indices)], labels[list(indices)]


def at_once(pixels: Sequence[int], gpu: bool) -> int:
    """How many images of (height, width) `pixels` are labelled at once."""
    return max(1, min(BATCH[gpu], MOST_PIXELS // math.prod(pixels)))


def times(network, paths: Sequence[Path], *, batch: int = 1, compiled: bool = False, **effort) -> dict[Path, float]:
    """``{path: microseconds}``: medians of calls in turns, on a GPU replays of graphs.

    compiled: see `Calls`. effort: of `time_together`.
    """
    named = {str(path): path for path in paths}
    calls = Calls(network, named, batch=batch, compiled=compiled)
    for text in named:
        calls.run(text)
    gpu = calls.stream is not None
    found = timing.time_together([lambda text=text: calls.run(text) for text in named], gpu=gpu, **effort)
    return {path: each.p50_us for path, each in zip(named.values(), found, strict=True)}

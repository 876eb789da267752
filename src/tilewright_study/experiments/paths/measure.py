"""What paths of a network really take and see: times, and mean IoU on scenes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from tilewright.core import timing
from tilewright.core.errors import PatternError
from tilewright.networks.path import Path, Stages
from tilewright.paths.calls import Calls
from tilewright_study.training import evaluation, statistics

# How paths' statistics are: of the trained network, or of each path.
RUNGS = ("trained", "statistics")
# Images that are labelled at once on a GPU, and on a CPU, and the most pixels of theirs: torch interpolates fewer than
# 2^31 values, and the published decoder has 768 channels on a sixteenth of the pixels.
BATCH = {True: 64, False: 4}
MOST_PIXELS = 64 * 512 * 512


class Scenes:
    """Images and labels of a source, read once and kept on a device."""

    def __init__(self, source, counts: Mapping[str, int], size: int, device: torch.device | str):
        """counts: ``{split: how many}``, from the first."""
        self.source = source
        self.kept = {split: source.read(split, range(count), size, device) for split, count in counts.items()}

    def mean_ious(self, network, split: str, wanted: Iterable[Path], own: Mapping | None = None) -> dict[Path, float]:
        """Mean IoU of paths on a split's scenes; see `confusions`."""
        found = self.confusions(network, split, wanted, own)
        return {path: evaluation.mean_iou(each.sum(0)) for path, each in found.items()}

    def image_ious(self, network, split: str, wanted: Iterable[Path], own: Mapping | None = None) -> dict:
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
        wanted = sorted(dict.fromkeys(wanted), key=lambda path: (path.scale, path.blocks))
        found: dict[Path, list] = {path: [] for path in wanted}
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

    def read(self, split, indices: np.ndarray, size: int, device: torch.device | str):
        """As a source: what is kept."""
        images, labels = self.kept[split]
        return images[list(indices)], labels[list(indices)]


def at_once(pixels: Sequence[int], gpu: bool) -> int:
    """How many images of (height, width) `pixels` are labelled at once."""
    return max(1, min(BATCH[gpu], MOST_PIXELS // math.prod(pixels)))


# How far maps of a timed call may be from those of the network: the root of the mean square, by that of how the maps of
# a class spread. Without one block, a trained SegFormer-B0 is off by 0.3 or more, in bfloat16 a call of it by 0.002.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


class Maps:
    """What a network itself makes of some images, as it is called, path by path: what is timed has to be the same."""

    def __init__(self, network, images: torch.Tensor, own: Mapping | None = None):
        """own: ``{path: Folded}`` of those with statistics of their own."""
        self._known: dict = {}
        self.network, self.images, self.own = network, images, own or {}

    @torch.inference_mode()
    def wrong(self, path: Path, maps: Sequence) -> str:
        """Why `maps` are not those of a path; an empty text where they are."""
        if path not in self._known:
            folded = {"folded": self.own[path]} if self.own.get(path) else {}
            self._known[path] = self.network(self.images, path, **folded).clone()
        expected = self._known[path]
        if not isinstance(maps, torch.Tensor) or maps.shape != expected.shape:
            found = list(maps.shape) if isinstance(maps, torch.Tensor) else type(maps).__name__
            return f"expected maps of {list(expected.shape)} of path {path}, found {found}"
        tolerance, expected = TOLERANCE[expected.dtype], expected.double()
        spread = (expected - expected.mean((0, 2, 3), keepdim=True)).square().mean().sqrt()
        off = float((maps.double() - expected).square().mean().sqrt() / spread)
        # Not `>`: a NaN does not pass.
        return "" if off <= tolerance else f"maps of path {path} differ by {off:.2g}, tolerance {tolerance:.2g}"

    def refuted(self, call: Callable, paths: Mapping[str, Path]) -> dict[str, str]:
        """``{text: why}`` of those of `paths` whose ``call(text)`` does not give their maps of these images.

        What a call has left is overwritten before the next one, which may have one place with it.
        """
        found, maps = {}, call(next(iter(paths))) if paths else None
        for text, path in paths.items():
            timing.overwrite(maps)
            maps = call(text)
            if why := self.wrong(path, maps):
                found[text] = why
        return found


def times(
    network,
    paths: Sequence[Path],
    *,
    images: torch.Tensor | None = None,
    batch: int = 1,
    compiled: bool = False,
    wrong: dict[Path, str] | None = None,
    **effort,
) -> dict[Path, float]:
    """``{path: microseconds}``: medians of calls in turns, on a GPU replays of graphs.

    The maps of what is timed are compared with the network's own, before and after. images: [batch, 3, H, W] that are
    seen, by default nothing. compiled: see `Calls`. wrong: takes ``{path: why}`` of paths that have other maps, and no
    time. effort: of `time_together`. Raises `PatternError` for such a path where `wrong` is None.
    """
    named = {str(path): path for path in paths}
    calls = Calls(network, named, batch=batch, compiled=compiled)
    if images is not None:
        calls.show(images)
    expected = Maps(network, calls.images)
    refuted = expected.refuted(calls.run, named)
    kept = {
        text: timing.Checked(partial(calls.run, text), partial(expected.wrong, path))
        for text, path in named.items()
        if text not in refuted
    }
    found = timing.time_together(list(kept.values()), gpu=calls.stream is not None, **effort)
    refuted |= {text: call.wrong for text, call in kept.items() if call.wrong}
    if refuted and wrong is None:
        raise PatternError(next(iter(refuted.values())))
    if wrong is not None:
        wrong |= {named[text]: why for text, why in refuted.items()}
    taken = zip(kept, found, strict=True)
    return {named[text]: each.p50_us for text, each in taken if text not in refuted}

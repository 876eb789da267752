"""How well a network labels the images of a source: a confusion of labels, and what follows from it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright.paths import frames

# Images that are labelled at once.
BATCH = 16


class Source(Protocol):
    """Images and what they show. task: ``maps`` of labels, or ``classes``, whose names are `classes`."""

    task: str
    classes: Sequence[str]

    def read(
        self, split: str, indices: Sequence[int], size: int | tuple[int, int], device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [n, 3, H, W] of a split on `device`, and their labels."""


@torch.inference_mode()
def confusion(
    network: Any,
    source: Source,
    split: str,
    indices: Sequence[int],
    *,
    path: Path | str | None = None,
    folded: Any = None,
    batch: int = BATCH,
) -> np.ndarray:
    """int64 [classes, classes]: pixels of each label (rows) that a network gives each label (columns), as NumPy.

    Images have the network's size, on its device; its maps are resized to theirs, bilinear, before the largest logit is
    taken. Pixels without a label do not count. path, folded: as the network's call takes them. Parameters in 32 bits
    compute as they are, also on a GPU.

    Raises `ConfigError` for a network with other classes than the source's, and what both raise.
    """
    classes = _checked(network, source, "maps")
    weight = next(network.parameters())
    total = torch.zeros(classes, classes, dtype=torch.int64, device=weight.device)
    options = {} if path is None and folded is None else {"path": path, "folded": folded}
    for lo in range(0, len(indices), batch):
        images, labels = source.read(split, indices[lo : lo + batch], network.options.pixels, weight.device)
        maps = network(images.to(weight.dtype), **options).float()
        total += counted(maps, labels, classes)
    return total.cpu().numpy()


def counted(maps: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """int64 [classes, classes] of logits float32 [B, classes, h, w] and labels uint8 [B, H, W]: see `confusion`."""
    if maps.is_cpu and classes <= frames.MOST_CLASSES:
        # torch takes four times as long for the largest of logits at full size.
        found = frames.labels(maps, labels.shape[1:])
    else:
        found = F.interpolate(maps, size=labels.shape[1:], mode="bilinear", align_corners=False).argmax(1)
    truth = labels.long()
    pairs = torch.where(truth < classes, truth * classes + found, classes**2).flatten()
    return torch.bincount(pairs, minlength=classes**2 + 1)[:-1].view(classes, classes)


def ious(confusion: np.ndarray) -> np.ndarray:
    """float64 [classes]: of each class its pixels that were found, over those that have or were given its label.

    NaN for a class that has none.
    """
    found = np.diag(confusion).astype(np.float64)
    union = confusion.sum(0) + confusion.sum(1) - found
    return np.divide(found, union, out=np.full(len(found), np.nan), where=union > 0)


def mean_iou(confusion: np.ndarray) -> float:
    """The mean of `ious` over the classes that occur in the labels."""
    return float(np.mean(ious(confusion)[confusion.sum(1) > 0]))


@torch.inference_mode()
def accuracy(network: Any, source: Source, split: str, indices: Sequence[int], *, batch: int = BATCH) -> float:
    """Share of a source's images, of task ``classes``, that a network names right. Raises as `confusion` does."""
    _checked(network, source, "classes")
    weight, right = next(network.parameters()), 0
    for lo in range(0, len(indices), batch):
        images, labels = source.read(split, indices[lo : lo + batch], network.options.image_size, weight.device)
        right += int((network(images.to(weight.dtype)).argmax(-1) == labels).sum())
    return right / len(indices)


def _checked(network, source, task):
    """How many classes network and source have. Raises `ConfigError`."""
    classes = network.options.num_classes
    if source.task != task or len(source.classes) != classes:
        raise ConfigError(
            f"source: expected {task} of the network's {classes} classes, found {source.task} of {len(source.classes)}"
        )
    return classes

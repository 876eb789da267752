"""Statistics of the decoder's batch norm for one path: what it computes with in place of those of training.

A path that skips blocks gives the batch norm other inputs than the full one does. Their mean and variance are measured
on images without labels; weights stay as they are (Yu et al., "Slimmable Neural Networks", 2019, do the same).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright_study.training.evaluation import Source

BATCH = 16


class Statistics(NamedTuple):
    """float32 [C] each: mean and variance of the channels of the decoder's sum."""

    mean: Tensor
    variance: Tensor


@torch.no_grad()
def measured(
    network: Any,
    source: Source,
    split: str,
    indices: Sequence[int],
    *,
    path: Path | str | None = None,
    batch: int = BATCH,
) -> Statistics:
    """`Statistics` of a path over images of a source, pixel by pixel; labels are not looked at.

    Raises `ConfigError` for a path that keeps some of the decoder's channels, or a network without such a norm.
    """
    norm, wanted = _norm(network), network.path(path)
    if wanted.fuse is not None or wanted.width is not None:
        raise ConfigError(f"path: expected one with all channels of its decoder, found {wanted}")
    weight, head = next(network.parameters()), network.decode_head
    sums = torch.zeros(2, len(norm.running_mean), dtype=torch.float64, device=weight.device)
    count = 0

    def seen(_, inputs):
        nonlocal count
        x = inputs[0].double()
        sums[0] += x.sum((0, 2, 3))
        sums[1] += x.square().sum((0, 2, 3))
        count += x.numel() // x.shape[1]

    kept, trained = (
        (norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()),
        head.training,
    )
    hook = norm.register_forward_pre_hook(seen)
    # In training, the folded decoder leaves the norm apart, so that its inputs can be seen.
    head.train()
    try:
        for lo in range(0, len(indices), batch):
            images, _ = source.read(split, indices[lo : lo + batch], network.options.pixels, weight.device)
            network(images.to(weight.dtype), wanted)
    finally:
        hook.remove()
        head.train(trained)
        for buffer, value in zip(norm.buffers(), kept, strict=True):
            buffer.copy_(value)
    mean = sums[0] / count
    return Statistics(mean.float(), (sums[1] / count - mean.square()).clamp(min=0).float())


@torch.no_grad()
def use(network: torch.nn.Module, statistics: Statistics) -> None:
    """Have the decoder's batch norm compute with `statistics` from now on."""
    norm = _norm(network)
    norm.running_mean.copy_(statistics.mean)
    norm.running_var.copy_(statistics.variance)
    # They are no running averages.
    norm.num_batches_tracked.zero_()


@torch.no_grad()
def folded(network: Any, statistics: Statistics, path: Path | str | None = None) -> Any:
    """The folded decoder of a path with `statistics` of its own, as ``network(images, path, folded)`` takes it."""
    norm = _norm(network)
    kept = [x.clone() for x in norm.buffers()]
    try:
        use(network, statistics)
        return network.fold(path)
    finally:
        for buffer, value in zip(norm.buffers(), kept, strict=True):
            buffer.copy_(value)


def _norm(network):
    try:
        return network.decode_head.linear_fuse["bn"]
    except (AttributeError, KeyError):
        raise ConfigError("statistics: expected a SegFormer, whose decoder has one batch norm, found another") from None

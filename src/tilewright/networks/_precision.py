"""Networks in 16 bits: a GPU computes in them; on a CPU they are how weights and images are stored.

A CPU has no units for 16-bit attention and few for the rest. And where each layer rounds to 8 bits, two attentions that
differ in the last bit of float32 drift apart layer by layer, to some 2e-2 in a logit; computed in float32 they agree as
float32 networks do.
"""

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch.func import functional_call

from tilewright.core import precision
from tilewright.core.errors import PatternError
from tilewright.networks import check_images


def checked(forward: Callable) -> Callable:
    """Of a network's ``forward(self, images)``: images are checked; on a CPU it runs in float32, whatever they come in,
    and tensors among its other arguments come along.

    Networks of maps take images of any size that is not below their ``options.least``.

    Raises `PatternError` for images of another shape than the network's, and of another type than its weights where the
    network cannot run on them.
    """

    @wraps(forward)
    def run(network, images, *arguments, **named):
        least = getattr(network.options, "least", None)
        check_images(images, None if least else network.options.image_size)
        if least:
            check_least(images, least)
        if images.is_cpu and images.dtype in precision.SIXTEEN_BITS:
            given, named = precision.widened(((images, *arguments), named))
            return functional_call(network, precision.float32(network), given, named)
        if torch.compiler.is_compiling():
            return forward(network, images, *arguments, **named)
        try:
            return forward(network, images, *arguments, **named)
        except RuntimeError as error:
            _explain(network, images, error)
            raise

    return run


def check_least(images: torch.Tensor, least: int) -> None:
    """Raise `PatternError` for images [B, 3, H, W] with a side below `least` pixels."""
    height, width = images.shape[2:]
    if height < least or width < least:
        raise PatternError(f"images: expected at least {least} pixels a side, found {height}x{width}")


def _explain(network, images, error):
    """Raise `PatternError` where images have another type, form or device than weights: torch names no argument."""
    weight = next(network.parameters(), images)
    told = [(str(x.dtype), f"on {x.device}", str(x.layout)) for x in (weight, images)]
    if told[0] != told[1]:
        expected, found = (" ".join(each[:2] if told[0][2] == told[1][2] else each) for each in told)
        raise PatternError(f"images: expected {expected}, as the weights are, found {found}") from error


def logits(head: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Logits in float32 of a linear `head`, whatever the network's type: 16 bits round a logit of 1 by up to 4e-3."""
    return F.linear(x.float(), head.weight.float(), head.bias.float())

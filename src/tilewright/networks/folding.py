"""The decoder of transformers' SegFormer, folded: one product for each level in place of its linear layers, of the
convolution over all of them, and of the batch norm. Resizing and these are linear, so that only rounding differs.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from tilewright.core.errors import Unavailable
from tilewright.networks import heads, map_operators

# What a head is asked for: the linear layers by the names of transformers 5 and 4.
LAYERS = ("linear_projections", "linear_c")
USED = ("linear_fuse", "batch_norm", "activation", "classifier")


def fold(model: Any) -> Any:
    """Give a SegFormer of transformers the folded decoder, in place.

    Weights, their names and the saved file stay as they are. The folded products are made in float64 and remade
    when weights change. Training, and calls that record gradients, run the published decoder.

    Parameters
    ----------
    model : transformers.SegformerForSemanticSegmentation
        The model, or one like it, whose ``decode_head`` has the layers of `SegformerDecodeHead`.

    Returns
    -------
    transformers.SegformerForSemanticSegmentation
        The same model. Its logits [B, labels, H / 4, W / 4] are those of before but for rounding.

    Raises
    ------
    Unavailable
        For a model without such a head.

    Examples
    --------
    >>> import tilewright as tw
    >>> from transformers import SegformerForSemanticSegmentation  # doctest: +SKIP
    >>> model = tw.fold(SegformerForSemanticSegmentation.from_pretrained("segformer-b0").eval())  # doctest: +SKIP
    """
    head = getattr(model, "decode_head", None)
    names = [name for name in USED if not isinstance(getattr(head, name, None), nn.Module)]
    if head is None or names or _layers(head) is None or not isinstance(head.activation, nn.ReLU):
        raise Unavailable(
            f"fold: expected a decode_head like transformers' SegformerDecodeHead, found {type(model).__name__} with "
            f"{'none' if head is None else type(head).__name__}"
        )
    head.forward = partial(_forward, head, map_operators.Remembered())
    return model


def _layers(head):
    """The linear layers of the levels, or None."""
    found = next((getattr(head, name) for name in LAYERS if hasattr(head, name)), None)
    return None if found is None or not all(hasattr(layer, "proj") for layer in found) else [own.proj for own in found]


def _forward(head, remembered, encoder_hidden_states, **others):
    """What the head returns for maps [B, c, h, w] of the levels."""
    maps, held = [*encoder_hidden_states], [*head.parameters(), *head.buffers()]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*maps, *held))
    if head.training or recorded or any(x.ndim != 4 for x in maps):
        return type(head).forward(head, encoder_hidden_states, **others)
    weights, bias = remembered("decoder", partial(_folded, head), held)
    classes = head.classifier
    grid = tuple(maps[0].shape[2:])
    return map_operators.decode(maps, weights, bias, grid, classes.weight.flatten(1), classes.bias)


def _folded(head):
    """`heads.Folded` of the head."""
    layers = _layers(head)
    # The last level comes first in the convolution's input.
    parts = head.linear_fuse.weight.flatten(1).chunk(len(layers), 1)[::-1]
    return heads.fold(layers, parts, head.batch_norm)

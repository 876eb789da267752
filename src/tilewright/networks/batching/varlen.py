"""Kept tokens packed, and attended by torch's variable-length FlashAttention; what is not attention is ``ragged``'s."""

import torch

from tilewright.core.errors import Unavailable
from tilewright.networks.batching import ragged
from tilewright.networks.token_layouts import Packed, Rectangle
from tilewright.packed.pruners import Choice
from tilewright.torch_attention import kernels, need_gpu

ROOM = "shared"


class _Flash(Packed):
    def attend(self, q, k, v):
        """See `Packed`. The longest image is bounded, not asked for."""
        return kernels.varlen(q, k, v, self.packing.starts, self.length)


def narrow(
    x: torch.Tensor, layout: Rectangle | Packed, choice: Choice, capacity: int | None
) -> tuple[torch.Tensor, Packed]:
    """As `ragged.narrow`. Raises `Unavailable` without a GPU or in float32, which FlashAttention does not know."""
    need_gpu(x.device.type)
    if x.dtype == torch.float32:
        raise Unavailable(f"expected 16-bit tokens, found {x.dtype}")
    return ragged.narrow(x, layout, choice, capacity, _Flash)

"""SegFormer: a pyramid of four transformer stages and a decoder of linear layers (Xie et al., "SegFormer: Simple and
Efficient Design for Semantic Segmentation with Transformers", NeurIPS 2021, arXiv 2105.15203, and its public code).

Its attention is full, over keys that a convolution reduces. Here is what is known of the networks without torch: sizes
and names.
"""

from typing import Any, NamedTuple

from tilewright.core import sides

NETWORK_NAMING = (
    "segformer-<b0|b1|b2|b3|b4|b5>-<size or height x width>[-<mmseg|upernet|linear>], e.g. segformer-b0-512"
)
# Heads behind its four stages, its own first, and channels of the two that others have made.
DECODE_HEADS = ("segformer", "mmseg", "upernet", "linear")
MMSEG_CHANNELS, UPERNET_CHANNELS = 256, 512


class Size(NamedTuple):
    """Channels and blocks of the four stages, and channels of the decoder."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    channels: int


_WIDE = (64, 128, 320, 512)
VARIANTS = {
    "b0": Size((32, 64, 160, 256), (2, 2, 2, 2), 256),
    "b1": Size(_WIDE, (2, 2, 2, 2), 256),
    "b2": Size(_WIDE, (3, 4, 6, 3), 768),
    "b3": Size(_WIDE, (3, 4, 18, 3), 768),
    "b4": Size(_WIDE, (3, 8, 27, 3), 768),
    "b5": Size(_WIDE, (3, 6, 40, 3), 768),
}
# By stage: heads; how many times fewer keys than queries there are along a side; kernels and strides of the patches.
HEADS, REDUCTIONS = (1, 2, 5, 8), (8, 4, 2, 1)
PATCHES, STRIDES = (7, 3, 3, 3), (4, 2, 2, 2)
MLP_RATIO = 4
# The smallest side in pixels: of it the first stage has one key.
LEAST = 32


def network_fields(name: str) -> dict | None:
    """Options of the network that a name states, or None."""
    size, head = f"(?P<image_size>{sides.SIZE})", f"(?P<head>{'|'.join(DECODE_HEADS[1:])})"
    return sides.stated(f"segformer-(?P<variant>{'|'.join(VARIANTS)})-{size}(?:-{head})?", name)


def channels(variant: str, head: str) -> int:
    """Channels of a head as published; of a linear one, which has none, those of SegFormer's own."""
    return {"mmseg": MMSEG_CHANNELS, "upernet": UPERNET_CHANNELS}.get(head, VARIANTS[variant].channels)


def grids(pixels: Any) -> list[tuple[int, int]]:
    """Rows and columns of tokens of the four stages, for images of ``(height, width)`` pixels."""
    found = []
    for patch, stride in zip(PATCHES, STRIDES, strict=True):
        pixels = tuple((side + 2 * (patch // 2) - patch) // stride + 1 for side in pixels)
        found.append(pixels)
    return found

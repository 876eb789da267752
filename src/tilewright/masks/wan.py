"""Wan2.1-T2V: a transformer that removes the noise of videos (Wan team, "Wan: Open and Advanced Large-Scale Video
Generative Models", 2025, arXiv 2503.20314; its code is under Apache-2.0).

Its self-attention is dense; what makes it sparse is chosen on the device, see `tilewright.slices`. Here is what is
known of the networks without torch: sizes and names.
"""

import re
from typing import Any, NamedTuple

from tilewright.core import sides

NETWORK_NAMING = "wan-<1.3b|14b|tiny>-<480p|720p>-<frames>f, e.g. wan-1.3b-480p-81f"


class Size(NamedTuple):
    """Width of tokens, hidden channels of the feed-forward layers, heads, layers."""

    width: int
    hidden: int
    heads: int
    layers: int


# As published, but for ``tiny``, which is trained here.
VARIANTS = {
    "1.3b": Size(1536, 8960, 12, 30),
    "14b": Size(5120, 13824, 40, 40),
    "tiny": Size(384, 1536, 3, 12),
}
HEAD_DIM = 128
# Channels of a latent, before and after. Patches: frames, rows and columns of latents in a token.
CHANNELS, PATCH = 16, (1, 2, 2)
# Frames, rows and columns of pixels in a latent; the first frame is a latent frame by itself.
STRIDE = (4, 8, 8)
# The longest prompt and its width; cosines and sines of the time.
TEXT_TOKENS, TEXT_WIDTH, FREQUENCIES = 512, 4096, 256

# Height and width in pixels by the names of resolutions, and how far the sampler's times are shifted towards noise.
RESOLUTIONS = {"480p": (480, 832), "720p": (720, 1280)}
SHIFTS = {"480p": 3.0, "720p": 5.0}


def network_fields(name: str) -> Any:
    """Options of the network that a name states, or None."""
    known, sizes = "|".join(map(re.escape, VARIANTS)), "|".join(RESOLUTIONS)
    return sides.stated(rf"wan-(?P<variant>{known})-(?P<resolution>{sizes})-(?P<frames>[1-9]\d*)f", name)


def latent_shape(frames: int, height: int, width: int) -> tuple[int, ...]:
    """``(channels, frames, rows, columns)`` of the latents of a clip in frames and pixels."""
    return CHANNELS, (frames - 1) // STRIDE[0] + 1, height // STRIDE[1], width // STRIDE[2]


def grid(latents: tuple[int, ...]) -> Any:
    """Frames, rows and columns of tokens of latents of the shape ``(..., frames, rows, columns)``."""
    return tuple(size // patch for size, patch in zip(latents[-3:], PATCH, strict=True))

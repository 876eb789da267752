"""DeiT: plain vision transformers (Touvron et al., "Training data-efficient image transformers", ICML 2021).

They attend to everything; what makes them ragged are the pruners of `tilewright.packed.pruners`. Here is what is known
of the networks without torch: sizes and names.
"""

from typing import Any

from tilewright.core import sides

NETWORK_NAMING = "deit-<variant>-<size>[-<pruner>], e.g. deit-small-224-evit"

# Width and heads, by the names in timm's: ``deit_<variant>_patch16_<size>``.
VARIANTS = {
    "tiny": (192, 3),
    "small": (384, 6),
    "base": (768, 12),
    "tiny-distilled": (192, 3),
    "small-distilled": (384, 6),
    "base-distilled": (768, 12),
}
DEPTH, PATCH = 12, 16


def network_fields(name: str) -> Any:
    """Options of the network that a name states, or None."""
    size, pruner = r"(?P<image_size>[1-9]\d*)", r"(?P<pruner>[a-z]\w*)"
    return sides.stated(rf"deit-(?P<variant>{'|'.join(VARIANTS)})-{size}(?:-{pruner})?", name)

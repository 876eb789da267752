"""FlexAttention, compiled, in all forms that `tilewright.torch_attention.flex` has."""

from tilewright.torch_attention.flex import VARIANTS, prepare

__all__ = ("DENSE", "MASKED", "VARIANTS", "prepare")

MASKED = True
DENSE = False

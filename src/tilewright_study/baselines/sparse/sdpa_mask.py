"""The pattern as a dense additive mask, in the forms that `tilewright.torch_attention.masked` has."""

from tilewright.torch_attention.masked import VARIANTS, prepare

__all__ = ("DENSE", "MASKED", "VARIANTS", "prepare")

MASKED = True
DENSE = True

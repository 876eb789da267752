"""FlexAttention, compiled, in all forms that `tilewright.torch_attention.flex` has."""

from tilewright.torch_attention.flex import VARIANTS, prepare
from tilewright_study.baselines.flex_blocks import prepare as blocks

__all__ = ("DENSE", "MASKED", "VARIANTS", "blocks", "prepare")

MASKED = True
DENSE = False

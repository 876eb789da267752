"""FlexAttention with the block size that suits the pattern best."""

from tilewright.kernels.baselines import flex

MASKED = True
DENSE = False
VARIANTS = ("128", "64")

prepare = flex.prepare

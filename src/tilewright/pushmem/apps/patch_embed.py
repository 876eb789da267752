"""The patch embedding of a vision transformer: a 4 × 4 convolution of stride 4, three channels to eight."""

from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.errors import ProgramError

SIZE = 64
PATCH = 4
WIDTH = 8


def outputs(size: int):
    """tokens, 8 × (size // 4)²; 3 × 8 multiplications are done in space, 16 in time."""
    if size < PATCH:
        raise ProgramError(f"patch_embed: expected a side of at least {PATCH}, found {size}")
    image = Input("in", (3, size, size), unroll=(0,))
    weights = Input("weights", (WIDTH, 3, PATCH, PATCH), unroll=(0, 1))

    def token(c, y, x):
        return Reduce(
            (3, PATCH, PATCH),
            lambda k, ry, rx: image[k, PATCH * y + ry, PATCH * x + rx] * weights[c, k, ry, rx],
            unroll=(0,),
        )

    return (Stage("tokens", (WIDTH, size // PATCH, size // PATCH), token, unroll=(0,), order="auto"),)

"""Rows as columns: every distance is another one, and the whole image waits in memory."""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Stage

SIZE = 64


def outputs(size):
    """transpose, size x size."""
    at_least("transpose", size, 4)
    image = Input("in", (size, size))
    return (Stage("transpose", (size, size), lambda y, x: image[x, y]),)

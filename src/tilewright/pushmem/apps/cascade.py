"""Two 3 × 3 binomial filters, one after the other."""

from typing import TYPE_CHECKING

from tilewright.pushmem.apps._common import BINOMIAL, at_least, window
from tilewright.pushmem.dsl import Input

if TYPE_CHECKING:
    from tilewright.pushmem.dsl import Stage

SIZE = 64


def outputs(size: int) -> "tuple[Stage]":
    """second, (size - 4)²."""
    at_least("cascade", size, 5)
    first = window("first", Input("in", (size, size)), BINOMIAL, 4)
    return (window("second", first, BINOMIAL, 4),)

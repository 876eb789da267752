"""A 3 × 3 binomial filter."""

from typing import TYPE_CHECKING

from tilewright.pushmem.apps._common import BINOMIAL, at_least, window
from tilewright.pushmem.dsl import Input

if TYPE_CHECKING:
    from tilewright.pushmem.dsl import Stage

SIZE = 64


def outputs(size: int) -> "tuple[Stage]":
    """blur, (size - 2)²."""
    at_least("gaussian", size, 3)
    return (window("blur", Input("in", (size, size)), BINOMIAL, 4),)

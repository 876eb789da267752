"""Stages that several apps share."""

from tilewright.pushmem.dsl import Stage
from tilewright.pushmem.errors import ProgramError

BINOMIAL = ((1, 2, 1), (2, 4, 2), (1, 2, 1))


def window(name: str, source, weights, shift, **options):
    """The weighted sum of a window of `source`, shifted right by `shift` bits, at every place where it fits."""
    rows, columns = len(weights), len(weights[0])
    height, width = source.shape

    def word(y, x):
        total = 0
        for i in range(rows):
            for j in range(columns):
                if weights[i][j]:
                    total = source[y + i, x + j] * weights[i][j] + total
        return total >> shift if shift else total

    return Stage(name, (height - rows + 1, width - columns + 1), word, **options)


def at_least(app: str, size: int, least: int) -> None:
    """Raise `ProgramError` where `size` is below `least`."""
    if size < least:
        raise ProgramError(f"{app}: expected a side of at least {least}, found {size}")

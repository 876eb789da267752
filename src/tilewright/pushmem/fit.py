"""Loops of a controller from what it did: exact, in linear time, complete for what six loops can do.

Rows are what steps together: the cycle and the addresses of each firing, each modulo two to its width. The innermost
loop ends where the differences of rows change for the first time, or at a divisor of that, where an outer loop happens
to step alike. What is left are the first rows of its rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilewright.core.errors import TilewrightError
from tilewright.pushmem.settings import CYCLE_BITS, Affine, Controller

# Of a controller in a family's members.
LEVELS = 6


class NotAffineError(TilewrightError):
    """Firings that no loops give, and the first one that breaks the best ones."""


@dataclass(frozen=True)
class Deepest:
    """How far loops went. firing: the index of the first that no loop explains."""

    levels: int
    firing: int


def controller(
    times: np.ndarray,
    addresses: Mapping[str, np.ndarray],
    widths: Mapping[str, int],
    levels: int,
    until: int | None = None,
) -> Controller:
    """The `Controller` that fires at `times` with these addresses, int64 [n] each, with the fewest loops.

    times: of the cycles since reset, increasing; widths: bits of each address. until: the first cycle in which it may
    fire again, where its last round is cut off; None: no round is. Raises `NotAffineError`.
    """
    times = np.asarray(times, dtype=np.int64)
    names = list(addresses)
    if not len(times):
        raise NotAffineError("expected a controller that fires at least once, found no firing")
    gaps = np.diff(times)
    if times[0] >= 1 << CYCLE_BITS or (gaps > 1 << CYCLE_BITS).any():
        late = 0 if times[0] >= 1 << CYCLE_BITS else int(np.flatnonzero(gaps > 1 << CYCLE_BITS)[0]) + 1
        raise NotAffineError(
            f"cycle {times[late]}: expected a first firing before cycle {1 << CYCLE_BITS} and gaps of at most as many "
            f"cycles, since counters have {CYCLE_BITS} bits"
        )
    rows = np.column_stack([times, *(addresses[name] for name in names)])
    modulus = np.array([1 << CYCLE_BITS, *(1 << widths[name] for name in names)], dtype=np.int64)
    last = int(times[-1])

    def silent(following):
        """Whether the cycle of what would fire next, modulo the counter, is late enough."""
        return until is not None and last + (int(following) - last - 1) % (1 << CYCLE_BITS) + 1 >= until

    found, deepest = _loops(rows % modulus, modulus, levels, 1, silent)
    if found is None:
        at = deepest.firing
        raise NotAffineError(
            f"cycle {times[at]}: firing {at} of {len(times)} fits no {levels} loops, whose extents and steps are the "
            "same in all of their rounds"
        )
    extents, strides = found
    affines = [
        Affine(int(start % limit), tuple(int(step[column]) for step in strides))
        for column, (start, limit) in enumerate(zip(rows[0], modulus, strict=True))
    ]
    return Controller(tuple(extents), affines[0], dict(zip(names, affines[1:], strict=True)))


def integers(rows: np.ndarray, levels: int = LEVELS) -> tuple[list[int], list[list[int]]] | None:
    """``(extents, strides)``, innermost first, of the rows [events, columns] of a table, which never wrap; or None.

    Row k is ``rows[0] + sum(i_l * strides[l])``. Loops are as few as there can be.
    """
    modulus = np.full(rows.shape[1], 1 << 62)
    found, _ = _loops(np.asarray(rows, np.int64), modulus, levels, 1, lambda _: False)
    if found is None:
        return None
    return found[0], [np.where(step < 1 << 61, step, step - (1 << 62)).tolist() for step in found[1]]


def _loops(rows, modulus, levels, scale, silent):
    """``((extents, strides), None)`` of rows [n, values], or ``(None, Deepest)``. scale: firings of a row. silent:
    whether the last round may be cut off before a cycle."""
    count = len(rows)
    if count == 1:
        return ([], []), None
    if not levels:
        return None, Deepest(0, scale)
    steps = (rows[1:] - rows[:-1]) % modulus
    changes = np.flatnonzero((steps != steps[0]).any(1))
    longest = int(changes[0]) + 1 if len(changes) else count
    best = Deepest(0, scale * longest)
    # A loop's counter has as many bits as that of the cycles.
    for extent in _divisors(longest, 1 << CYCLE_BITS):
        cut = bool(count % extent)
        if cut and not silent((rows[-1, 0] + steps[0, 0]) % modulus[0]):
            continue
        inner = steps[: count - 1].copy()
        places = np.arange(count - 1) % extent != extent - 1
        wrong = np.flatnonzero(places & (inner != steps[0]).any(1))
        if len(wrong):
            best = max(best, Deepest(1, scale * (int(wrong[0]) + 1)), key=lambda each: each.firing)
            continue
        # Behind a round that is cut off nothing is seen of the others.
        outer = (lambda _: True) if cut else silent
        found, deepest = _loops(rows[::extent], modulus, levels - 1, scale * extent, outer)
        if found is not None:
            return ([extent, *found[0]], [steps[0], *found[1]]), None
        best = max(best, deepest, key=lambda each: each.firing)
    return None, best


def _divisors(number, limit):
    """Divisors from 2 to `limit`, the largest first."""
    return [each for each in range(min(number, limit), 1, -1) if number % each == 0]

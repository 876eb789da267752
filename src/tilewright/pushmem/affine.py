"""Event lists as loops: the fewest levels whose affine sums give the rows of a table, and back."""

import numpy as np

LEVELS = 6
# Iterations that a loop's 16-bit counter holds.
EXTENT = 1 << 16


def fit(rows: np.ndarray, levels: int = LEVELS) -> tuple[list[int], list[list[int]]] | None:
    """``(extents, strides)``, innermost first, of the integer table `rows` [events, columns], or None.

    Row k is ``rows[0] + Σ i_l · strides[l]``. A level has an extent of 2 to `EXTENT`.
    """
    rows = np.asarray(rows, np.int64)
    n = len(rows)
    if n == 1:
        return [], []
    if not levels:
        return None
    steps = np.diff(rows, axis=0)
    changed = np.flatnonzero((steps != steps[0]).any(axis=1))
    first = int(changed[0]) + 1 if len(changed) else n
    for extent in (e for e in range(min(first, EXTENT), 1, -1) if first % e == 0 and n % e == 0):
        grouped = rows.reshape(n // extent, extent, -1)
        if not (np.diff(grouped, axis=1) == steps[0]).all():
            continue
        outer = fit(grouped[:, 0], levels - 1)
        if outer is not None:
            return [extent, *outer[0]], [steps[0].tolist(), *outer[1]]
    return None


def generate(extents, strides, start: int = 0) -> np.ndarray:
    """All values ``start + Σ i_l · strides[l]`` in the order of the loops, innermost first."""
    values = np.zeros(1, np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        values = (np.arange(extent)[:, None] * stride + values[None, :]).ravel()
    return values + start

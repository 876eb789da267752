"""What a port reads, by events in place of cycles: the latest write to its address before it."""

import numpy as np


def latest(written_at: np.ndarray, addresses: np.ndarray, read_at: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64, of the shape of `read_at`: the index of the last write to each wanted address before the read; -1 for
    none.

    written_at, addresses: int64 [W], in any order, no two writes of one address at once. A write at the end of cycle t
    is before reads from t + 1 on.
    """
    if not len(written_at):
        return np.full(np.shape(read_at), -1, dtype=np.int64)
    span = int(max(written_at.max(), np.max(read_at, initial=0))) + 1
    keys = addresses * span + written_at
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], wanted * span + read_at) - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (addresses[found] == wanted), found, -1)


def taken(values: np.ndarray, found: np.ndarray) -> np.ndarray:
    """`values` at the indices `found`, 0 where there is none (-1); `values` may have no row at all."""
    if not len(values):
        return np.zeros((*found.shape, *values.shape[1:]), dtype=values.dtype)
    rest = (...,) + (None,) * (values.ndim - 1)
    return np.where((found >= 0)[rest], values[np.maximum(found, 0)], np.zeros((), values.dtype))

"""Masks as intervals: in each step, every row of a tile sees keys side by side (the GPU's executor, stages T3 to T5).

The rows of a band, or below a diagonal, each forbid other keys: `mask_factors` needs a rectangle for every row. But a
row sees one interval of the keys, and two bounds tell it, whatever its length. The keys of an item may come in any
order, and a new step may begin anywhere, so that every mask has this form: in how many steps is the question.
"""

import numpy as np


def intervals(allowed: np.ndarray, step_keys: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """``(place int [steps, step_keys], begin int [steps, M], length int [steps, M])``; None if that takes over `most`
    steps.

    allowed: bool [M, K]. place: which of the K keys stands where, each key that some row sees once; the rest of a step
    repeats its first key, in no row's interval. Of step s, row m sees the keys begin[s, m] to begin + length - 1.
    The keys stand as they come, or, where that saves steps, by the mean of the rows that see them.
    """
    seen = np.flatnonzero(allowed.any(0))
    sets = [int.from_bytes(key.tobytes(), "little") for key in np.packbits(allowed, axis=0).T]
    mean = np.arange(len(allowed)) @ allowed[:, seen] / allowed[:, seen].sum(0)
    best = None
    for keys in (np.arange(seen.max(initial=-1) + 1), seen[np.argsort(mean, kind="stable")]):
        step = _steps([sets[key] for key in keys.tolist()], step_keys, most)
        # No other order is taken if it saves nothing.
        if len(step) == len(keys) and (best is None or step.max(initial=0) < best[1].max(initial=0)):
            best = keys, step
    return None if best is None else _bounds(allowed, *best, step_keys)


def _bounds(allowed, keys, step, step_keys):
    """What `intervals` returns, of `keys` in the order in which they fill each `step` (int, ascending)."""
    begin = np.searchsorted(step, np.arange(step[-1] + 1 if len(step) else 0))
    at = np.arange(len(keys)) - begin[step]
    place = np.repeat(keys[begin, None], step_keys, axis=1)
    place[step, at] = keys
    there = np.zeros((len(begin), step_keys), bool)
    there[step, at] = True
    seen = allowed[:, place].transpose(1, 0, 2) & there[:, None]
    return place, seen.argmax(2), seen.sum(2)


def _steps(sets, step_keys, most):
    """int64 [K]: the step of each key, the keys filling steps as they come; empty if that takes over `most` steps.

    sets: the rows that see each key, as bits of an int. A new step begins where a row would see keys again that it has
    not seen since others in this step.
    """
    found, begun, last, step, filled = [], 0, 0, 0, 0
    for rows in sets:
        if filled == step_keys or rows & begun & ~last:
            step, filled, begun = step + 1, 0, 0
        if step >= most:
            return np.zeros(0, np.int64)
        begun |= rows
        last = rows
        filled += 1
        found.append(step)
    return np.array(found, np.int64)

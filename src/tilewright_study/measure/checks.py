"""Checks before and after calls are timed: how far a result is from what was expected, and why a row has no time.

A call that is timed is a `timing.Checked`: what is timed is what was checked, see `checked` and `settled`.
"""

import torch

from tilewright import reference
from tilewright.core.timing import Checked


def refusal(error):
    """The first line of a `RuntimeError`: what torch, its compiler and its kernels raise for what they cannot do, or
    have no memory for."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def errors(found, expected):
    """Columns for the error of the rows [..., D] of a result; expected: float64. Raises `ValueError` for another
    shape."""
    if found.shape != expected.shape:
        raise ValueError(f"expected the shape {list(expected.shape)}, found {list(found.shape)}")
    return {
        "max_abs_error": float((found.double() - expected).abs().max()),
        "relative_error": reference.relative_error(found, expected),
    }


# What is compared: the column of an error, that of its tolerance, and how a row says that it was missed.
RESULT = ("relative_error", "tolerance", "relative error {:.2g} against the reference")


def refuted(row, checks=(RESULT,)):
    """Why a row does not pass its `checks`, else an empty text; a row without an error is not judged by it."""
    for error, tolerance, what in checks:
        # Not `>`: a NaN does not pass.
        if error in row and row[error] != "" and not row[error] <= row[tolerance]:
            return f"{what.format(row[error])}, tolerance {row[tolerance]:.2g}"
    return ""


def poison(like):
    """Leave NaN in the memory that a result of the size of `like` is likely to get, so that a row of it that is not
    written does not show what an earlier call wrote."""
    torch.full_like(like, torch.nan)


# What a result raises that is looked at as something else than it is.
_OTHERS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)


def judging(judge):
    """``judge(result)`` as a `Checked` asks for it: what it cannot look at is another result than was expected."""

    def judged(result):
        try:
            return judge(result)
        except _OTHERS as error:
            return f"another result than expected: {refusal(error)}"

    return judged


def checked(call, columns, row, checks=(RESULT,), like=None):
    """``(row, call)``: the `row` with what ``columns(result)`` says of the result of a call, and the call to be timed,
    a `Checked`, whose results are judged alike; None where this one does not pass `checks`, and the row says why.

    like: a tensor as large as the result, see `poison`.
    """
    found = {}

    def judge(result):
        found.clear()
        found.update(columns(result))
        return refuted(row | found, checks)

    timed = Checked(call, judging(judge))
    if like is not None:
        poison(like)
    reason, timed.result = timed.judge(timed()), None
    if reason:
        return row | found | {"status": "failed", "reason": reason}, None
    return row | found, timed


def settled(row, call, times):
    """A `row` with the columns `times` of a `Checked` call; without, and failed, where a result of those that were
    timed was wrong."""
    if not call.wrong:
        return row | times
    untimed = {name: value for name, value in row.items() if name not in times}
    return untimed | {"status": "failed", "reason": f"when it was timed: {call.wrong}"}


# Lists that are made in a call may hold so many other keys than those that were judged, where sums round otherwise.
OTHERS = 0.01


def same_lists(tensors, lists):
    """No columns. Raises `ValueError` where the tensors of lists are not those of `lists`."""
    keys, counts, *_ = tensors
    if counts.shape != lists.counts.shape or keys.shape != lists.keys.shape:
        raise ValueError(f"expected lists of {list(lists.keys.shape)}, found {list(keys.shape)}")
    listed = torch.arange(keys.shape[-1], device=keys.device) < lists.counts[..., None]
    other = ((keys != lists.keys) | (counts != lists.counts)[..., None]) & listed
    if (share := float(other.sum() / listed.sum())) > OTHERS:
        raise ValueError(f"{share:.1%} of the keys in the lists are others")
    return {}

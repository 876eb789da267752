"""Checks before times: how far a result is from what was expected, and why a row has no time."""

import torch

from tilewright import reference


def refusal(error):
    """The first line of a `RuntimeError`: what torch, its compiler and its kernels raise for what they cannot do, or
    have no memory for."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def errors(found, expected):
    """Columns for the error of the rows [..., D] of a result; expected: float64."""
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

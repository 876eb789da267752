"""Which cases of a test run by default."""

import pytest


def rest_slow(cases, *first):
    """`cases`: those at the places `first` run by default, and others, which repeat them in other ways, are slow."""
    found = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if place in first else pytest.param(*values, marks=pytest.mark.slow))
    return found

"""Solvers that tests need: Gurobi's licence may be missing, or end."""

from functools import cache
from importlib import import_module

import numpy as np
import pytest

from tilewright.core.errors import SolverUnavailableError
from tilewright.milp import NAMES, Model


def need(name):
    """Skip the test, with the reason, where `name` is a solver that cannot run."""
    if name in NAMES and (reason := _missing(name)):
        pytest.skip(reason)


@cache
def _missing(name):
    """Why a solver cannot run here, or an empty text."""
    zero, one = np.zeros(1), np.ones(1)
    row = np.array([0, 1], np.int32), np.zeros(1, np.int32), one
    smallest = Model(one, *row, one, one, zero, one, np.ones(1, bool))
    try:
        member = import_module(f"tilewright.milp.{name}")
        member.solve(smallest, time_limit_s=1.0, gap=0.0, seed=0, threads=1)
    except SolverUnavailableError as reason:
        return str(reason)
    return ""

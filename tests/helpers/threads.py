"""Tests that compute on another number of cores, and threads that lose their turn."""

import itertools
import sys
from contextlib import contextmanager

import torch

from tilewright import devices


@contextmanager
def threads(n):
    """Operators of torch use `n` threads until the end of the block.

    The device is described before: a process keeps the first description, and what a later test measures has to be of
    the machine as other processes describe it.
    """
    devices.describe("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interrupted(call, function, meanwhile):
    """Yield ``call()``, once for each place in `function` where its thread may lose its turn: `meanwhile` runs there.

    A switch of threads may come before any instruction.
    """
    for place in itertools.count():
        passed = itertools.count()

        def step(frame, event, _, place=place, passed=passed):
            if event == "opcode" and next(passed) == place:
                sys.settrace(None)
                meanwhile()
                sys.settrace(trace)
            return step

        def trace(frame, event, _, step=step):
            if frame.f_code is not function.__code__:
                return None
            frame.f_trace_opcodes = True
            return step

        sys.settrace(trace)
        try:
            found = call()
        finally:
            sys.settrace(None)
        if next(passed) <= place:
            return
        yield found

"""Tests that compute on another number of cores."""

from contextlib import contextmanager

import torch

from tilewright import targets


@contextmanager
def threads(n):
    """Operators of torch use `n` threads until the end of the block.

    The device is described before: a process keeps the first description, and what a later test measures has to be of
    the machine as other processes describe it.
    """
    targets.describe("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)

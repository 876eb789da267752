"""Launches that overlap (stage T5): a kernel comes onto the GPU, and loads its weights, while the one ahead still runs.

CUDA calls it programmatic dependent launch. A kernel that is launched so has the argument ``OVERLAP``, and each of its
programs calls `wait` once, outside of loops and conditions on values: Triton loads ahead of a wait in a loop. Before it
a program reads nothing but weights, and stores nothing: the kernel ahead may still read what memory held before.

As programs wait first and then let the next kernel come, that kernel meets none but the one right ahead of it: what was
launched before has ended, and its results are there. So weights that are read early may be written by any kernel but
that one. `maps.patches`, which a network begins with, and `maps.decode`, whose weights may just have been folded, read
none.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Hopper, the first with such launches.
LEAST = 9, 0


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until the kernel ahead has ended and its results are there; then let the next one come."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def options(x: torch.Tensor, *early: Any) -> dict:
    """How a kernel on the device of x is launched: ``OVERLAP``, and Triton's option where that is True.

    early: weights, or None, that it reads before it waits. Where one is not contiguous the launch is as usual: the
    kernel ahead is what copies it.
    """
    if x.is_cuda and _able(x.device) and all(w is None or w.is_contiguous() for w in early):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _able(device):
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= LEAST

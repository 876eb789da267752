"""Direct launches where there is no GPU: Triton's interpreter runs them on the addresses that they are given."""

import ctypes
from threading import Lock
from types import SimpleNamespace

import torch

# The interpreter runs one kernel at a time.
ALONE = Lock()


class Kernel:
    """A kernel of the interpreter that says how it is launched on addresses.

    launched: list that each direct launch is added to; usual: likewise, of those through Triton, if given.
    """

    def __init__(self, kernel, launched, usual=None):
        self.kernel, self.launched, self.usual = kernel, launched, [] if usual is None else usual

    def __getitem__(self, grid):
        def run(*given, **options):
            self.usual.append(self.kernel)
            with ALONE:
                self.kernel[grid](*given, **options)
            pointers = [x for x in given if isinstance(x, torch.Tensor)]
            # Constants come by their places, in a direct launch.
            left = {name: value for name, value in options.items() if name not in self.kernel.arg_names}

            def launch(*direct):
                self.launched.append(self.kernel)
                at = [at_address(a, x) for a, x in zip(direct, pointers, strict=False)]
                with ALONE:
                    self.kernel[grid](*at, *direct[len(at) :], **left)

            return SimpleNamespace(launch=launch)

        return run


def at_address(address, like):
    """What lies at an address, as many values as `like` has behind its first one."""
    n = like.untyped_storage().nbytes() - (like.data_ptr() - like.untyped_storage().data_ptr())
    if not n:
        return torch.empty(0, dtype=like.dtype)
    return torch.frombuffer((ctypes.c_char * n).from_address(address), dtype=like.dtype)

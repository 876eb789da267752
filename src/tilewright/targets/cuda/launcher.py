"""Direct launches of a compiled Triton kernel, at the least cost for the host (stage T5).

``kernel[grid](...)`` examines every argument in each call, about 14 µs for a kernel of twenty; most of them are the
same in every call of a plan. Triton's own C launcher, given the address of each tensor, takes 4 µs.
"""

from functools import partial, reduce
from operator import or_
from threading import Lock

import torch

from tilewright.core import _internals
from tilewright.targets import qkv

# Keys that calls are stored under, and calls of a key. The oldest are dropped: they go through Triton once more.
KEYS, CALLS = 256, 8
# Pointers aligned to so many bytes, a power of two, are compiled for as such.
ALIGNED = 16


def direct(compiled, grid, stream, arguments):
    """``callable(*addresses)`` that launches `compiled` on `grid` and `stream`; None where the launcher is not known.

    grid: programs in each of three dimensions. compiled: what ``kernel[grid](...)`` returned, None under the
    interpreter. addresses: of the leading tensors; their alignment to 16 bytes must be as it was in that call.
    arguments: all that follow, tensors by their addresses, constants included. Launch hooks are not called.
    """
    known = _internals.triton_launcher(compiled, grid, stream)
    if known is None:
        return None
    launch, head, in_tuple = known
    if in_tuple:
        return lambda *addresses: launch(*head, (*addresses, *arguments))
    return lambda *addresses: launch(*head, *addresses, *arguments)


def current_stream(device):
    """``callable() -> int``: the stream that is current on `device` when called; 0 where there are no streams."""
    return (lambda: 0) if device.type != "cuda" else partial(_internals.raw_stream, device.index)


def wide(n, stride):
    """Whether `n` rows so far apart, of up to 256 values each, span more than a 32-bit offset reaches."""
    return (n - 1) * stride + 256 >= 2**31


def store(known, key, call):
    """Add `call` to ``known[key]``, a tuple, and drop the oldest beyond `CALLS` there and `KEYS` keys."""
    known[key] = (*known.get(key, ()), call)[-CALLS:]
    while len(known) > KEYS:
        del known[next(iter(known))]


def capturing():
    """True while the current stream is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class CachedLaunch:
    """A kernel whose first call with tensors of a layout goes through Triton, and later ones to its C launcher.

    start: ``callable(*tensors) -> (out, compiled, grid, arguments)``, which checks the tensors and launches on them;
    the kernel takes `out`, the tensors and the arguments, see `direct`, in this order. `out` may be the first of the
    tensors, and is not passed twice then. No tensor is kept between calls: they may overlap, and be captured. Tensors
    off multiples of 16 bytes always go through Triton.
    """

    def __init__(self, start, device):
        """Launch on `device`, a ``torch.device`` with its index, on the stream that is current in each call."""
        self._start, self._device = start, device
        self._stream = current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and number of tensors: direct launches for tensors of one layout, see `_direct_call`.
        self._known, self._lock = {}, Lock()

    def __call__(self, *tensors):
        """The result of the kernel. Raises what `start` raises."""
        if self._several and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(*tensors)
        key = self._stream(), len(tensors)
        for direct_call in self._known.get(key, ()):
            if (out := direct_call(*tensors)) is not None:
                return out
        # Threads compile and store their calls one after the other.
        with self._lock:
            out, compiled, grid, arguments = self._start(*tensors)
            known, same = _internals.triton_launcher(compiled, (grid, 1, 1), key[0]), qkv.same_layout(*tensors)
            aligned = not reduce(or_, map(torch.Tensor.data_ptr, tensors)) & (ALIGNED - 1)
            # One tensor given twice is never recognised.
            if known is not None and aligned and same(*tensors):
                store(self._known, key, _direct_call(known, same, out, tensors, arguments))
            return out


def _direct_call(launcher, same, out, tensors, arguments):
    """``callable(*tensors)``: the result for tensors of this layout, aligned, wherever they lie; None for others."""
    launch, head, in_tuple = launcher
    address, given = torch.Tensor.data_ptr, out is tensors[0]
    empty = None if given else qkv.empty_like_result(out)

    def call(*tensors):
        if not same(*tensors):
            return None
        addresses = tuple(map(address, tensors))
        if reduce(or_, addresses) & (ALIGNED - 1):
            return None
        if given:
            out = tensors[0]
        else:
            out = empty()
            addresses = address(out), *addresses
        if in_tuple:
            launch(*head, (*addresses, *arguments))
        else:
            launch(*head, *addresses, *arguments)
        return out

    return call

"""Launching a compiled Triton kernel again, at the least cost for the host (stage T5).

``kernel[grid](...)`` looks at every argument anew, about 14 µs for a kernel of twenty; most of them are the same in
every call of a plan. Triton's own C launcher, given the address of each tensor, takes 4 µs.
"""

import logging
from functools import reduce
from operator import or_

import torch
import triton

from tilewright.kernels import tokens

_LOG = logging.getLogger(__name__)
# Triton's releases whose C launcher is called here; others launch their kernels the usual way.
KNOWN = ("3.6", "3.7")


def direct(compiled, grid, stream, arguments):
    """``callable(*addresses)`` that launches `compiled` on `grid` and `stream`; None where the launcher is not known.

    compiled: what ``kernel[grid](...)`` returned, None under the interpreter. addresses: of the leading tensors; their
    alignment to 16 bytes must be as it was in that call. arguments: all that follow, tensors by their addresses,
    constants included. Launch hooks are not called.
    """
    if compiled is None:
        return None
    release = ".".join(triton.__version__.split(".")[:2])
    if release not in KNOWN:
        _LOG.warning("triton %s: direct launches are known for %s; calls take longer", release, ", ".join(KNOWN))
        return None
    run, metadata = compiled.run, compiled.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch = run.launch
    place = (grid, 1, 1, stream, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    # What is None: scratch memories, the metadata for the hooks, and the hooks.
    if release == "3.6":
        head = (*place, None, None, metadata, None, None, None)
        return lambda *addresses: launch(*head, *addresses, *arguments)
    head = (*place, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
    return lambda *addresses: launch(*head, (*addresses, *arguments))


def current_stream(device):
    """``callable() -> int``: the stream that is current on `device` when called; 0 where there are no streams."""
    if device.type != "cuda":
        return lambda: 0
    return lambda index=device.index: torch._C._cuda_getCurrentRawStream(index)


def capturing():
    """True while the current stream is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Repeated:
    """One kernel that is called again and again: first through Triton, with tensors alike directly from then on.

    start: ``callable(*tensors) -> (out, compiled, grid, arguments)``, which checks the tensors and launches on them;
    the kernel takes `out`, the tensors and the arguments, see `direct`, in this order. It keeps nothing between calls:
    they may overlap, and be captured. Tensors off multiples of 16 bytes always go through Triton.
    """

    def __init__(self, start, device):
        """Launch on `device`, a ``torch.device`` with its index, on the stream that is current in each call."""
        self._start, self._device = start, device
        self._stream = current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and number of tensors: (whether tensors are alike, memory for a result, the launch).
        self._known = {}

    def __call__(self, *tensors):
        """The result of the kernel. Raises what `start` raises."""
        if self._several and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(*tensors)
        addresses = [x.data_ptr() for x in tensors]
        aligned, stream = not reduce(or_, addresses) & 15, self._stream()
        key = stream, len(addresses)
        if aligned:
            for alike, empty, again in self._known.get(key, ()):
                if alike(*tensors):
                    out = empty()
                    again(out.data_ptr(), *addresses)
                    return out
        out, compiled, grid, arguments = self._start(*tensors)
        again = direct(compiled, grid, stream, arguments)
        alike = tokens.alike(*tensors)
        # One tensor given twice is never recognised again.
        if aligned and again is not None and alike(*tensors):
            self._known.setdefault(key, []).append((alike, tokens.another(out), again))
        return out

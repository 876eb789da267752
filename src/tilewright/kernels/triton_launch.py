"""Launching a compiled Triton kernel again, at the least cost for the host (stage T5).

``kernel[grid](...)`` looks at every argument anew, about 14 µs for a kernel of twenty; most of them are the same in
every call of a plan. Triton's own C launcher, given the address of each tensor, takes 4 µs.
"""

import logging

import torch
import triton

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

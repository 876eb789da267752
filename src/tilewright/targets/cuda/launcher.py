"""Launching a compiled Triton kernel again, at the least cost for the host (stage T5).

``kernel[grid](...)`` looks at every argument anew, about 14 µs for a kernel of twenty; most of them are the same in
every call of a plan. Triton's own C launcher, given the address of each tensor, takes 4 µs.
"""

from functools import partial, reduce
from operator import or_
from threading import Lock

import torch

from tilewright.core import _internals
from tilewright.targets import qkv

# Kinds of calls that are remembered, and calls of a kind. The oldest are forgotten: they go through Triton again.
KINDS, CALLS = 256, 8


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


def remember(known, key, call):
    """Add `call` to ``known[key]``, a tuple, and forget the oldest beyond `CALLS` there and `KINDS` keys."""
    known[key] = (*known.get(key, ()), call)[-CALLS:]
    while len(known) > KINDS:
        del known[next(iter(known))]


def capturing():
    """True while the current stream is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Repeated:
    """One kernel that is called again and again: first through Triton, with tensors alike directly from then on.

    start: ``callable(*tensors) -> (out, compiled, grid, arguments)``, which checks the tensors and launches on them;
    the kernel takes `out`, the tensors and the arguments, see `direct`, in this order. `out` may be the first of the
    tensors, and is not taken twice then. Nothing is kept between calls: they may overlap, and be captured. Tensors off
    multiples of 16 bytes always go through Triton.
    """

    def __init__(self, start, device):
        """Launch on `device`, a ``torch.device`` with its index, on the stream that is current in each call."""
        self._start, self._device = start, device
        self._stream = current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and number of tensors: launches for tensors alike, see `_again`.
        self._known, self._lock = {}, Lock()

    def __call__(self, *tensors):
        """The result of the kernel. Raises what `start` raises."""
        if self._several and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(*tensors)
        key = self._stream(), len(tensors)
        for again in self._known.get(key, ()):
            if (out := again(*tensors)) is not None:
                return out
        # Calls of several threads compile and remember one after another.
        with self._lock:
            out, compiled, grid, arguments = self._start(*tensors)
            known, alike = _internals.triton_launcher(compiled, (grid, 1, 1), key[0]), qkv.alike(*tensors)
            aligned = not reduce(or_, (x.data_ptr() for x in tensors)) & 15
            # One tensor given twice is never recognised again.
            if known is not None and aligned and alike(*tensors):
                remember(self._known, key, _again(known, alike, out, tensors, arguments))
            return out


# What a call of `Repeated` does, written out for its numbers of tensors and arguments: looping over them takes the host
# 0.6 µs more (docs/decisions/0009).
_AGAIN = """
def again({tensors}):
    if not alike({tensors}):
        return None
    {addresses} = {asked}
    if ({bits}) & 15:
        return None
    {make_out}
    launch({given})
    return out
"""


def _again(launcher, alike, out, tensors, arguments):
    """``callable(*tensors)``: the result for tensors that lie elsewhere, else like `tensors`; None for others."""
    launch, head, in_tuple = launcher
    space = {"alike": alike, "launch": launch, "address": torch.Tensor.data_ptr}

    def named(word, values):
        names = [f"{word}{i}" for i in range(len(values))]
        space.update(zip(names, values, strict=True))
        return names

    parameters, addresses = ([f"{word}{i}" for i in range(len(tensors))] for word in ("tensor", "at"))
    if out is tensors[0]:
        make_out, given = "out = tensor0", addresses
    else:
        space["empty"] = qkv.another(out)
        make_out, given = "out = empty()", ["address(out)", *addresses]
    given = [*given, *named("argument", arguments)]
    source = _AGAIN.format(
        tensors=", ".join(parameters),
        addresses=", ".join(addresses),
        asked=", ".join(f"address({x})" for x in parameters),
        bits=" | ".join(addresses),
        make_out=make_out,
        given=", ".join([*named("head", head), f"({', '.join(given)},)" if in_tuple else ", ".join(given)]),
    )
    exec(source, space)
    return space["again"]

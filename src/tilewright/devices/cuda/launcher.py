"""Direct launches of a compiled Triton kernel, at the least cost for the host (stage T5).

``kernel[grid](...)`` examines every argument in each call, about 14 µs for a kernel of twenty; most of them are the
same in every call of a plan. Triton's own C launcher, given the address of each tensor, takes 4 µs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial, reduce
from operator import or_
from threading import Lock
from typing import Any

import torch
from triton import OutOfResources

from tilewright.core import _internals, apart
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError
from tilewright.devices import qkv

# Keys that calls are stored under, and calls of a key. The oldest are dropped: they go through Triton once more.
KEYS, CALLS = 256, 8
# Pointers aligned to so many bytes, a power of two, are compiled for as such.
ALIGNED = 16

# What takes down the launches of this thread, see `tape`, or None.
RECORDER: ContextVar = ContextVar("recorder", default=None)


def lasting(x: torch.Tensor) -> Any:
    """`x`, a tensor that its owner keeps, and whose values do not change: what is recorded need not make it again."""
    if (recorder := RECORDER.get()) is not None:
        recorder.keep(x)
    return x


def taken_down(compiled: bool, grid: tuple[int, ...], tensors: Sequence, arguments: Sequence) -> None:
    """Tell who takes down the launches of this thread of one through Triton, see `direct`."""
    if (recorder := RECORDER.get()) is not None:
        recorder.add(compiled, grid, tensors, arguments)


def direct(compiled: bool, grid: tuple[int, ...], stream: int, arguments: Sequence) -> Any:
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


def current_stream(device: Any) -> Callable:
    """``callable() -> int``: the stream that is current on `device` when called; 0 where there are no streams."""
    if device.type != "cuda":
        return lambda: 0
    return partial(_internals.raw_stream, torch.cuda.current_device() if device.index is None else device.index)


def wide(n: int, stride: int) -> bool:
    """Whether `n` rows so far apart, of up to 256 values each, span more than a 32-bit offset reaches."""
    return (n - 1) * stride + 256 >= 2**31


def recent() -> Recent:
    """Where calls are kept by key."""
    return Recent(KEYS, CALLS)


def beside(device: Any, n: int) -> Any:
    """The `Beside` of the stream that is current on `device`, with `n` more streams; None where there are none."""
    if n == 0 or device.type != "cuda":
        return None
    return _beside(device.index, _internals.raw_stream(device.index), n)


@lru_cache(KEYS)
def _beside(index, stream, n):
    # By the current stream: one for all plans that are called on it, since torch has few streams to give.
    return Beside(torch.cuda.current_stream(index), [torch.cuda.Stream(index) for _ in range(n)])


class Beside:
    """Streams beside the one that calls come on, for launches of one call side by side.

    Between `fork` and `join` each works beside that stream: after all that it was given before, and before all that it
    is given later. So whoever frees or reads a call's tensors on that stream needs to know nothing of the others, and a
    capture of that stream captures them. Events are recorded anew by each call. Threads may do so on one stream in any
    order: an event that is recorded later waits for more.
    """

    def __init__(self, own: Any, streams: Sequence):
        """own, streams: of torch."""
        self._own, self._streams = own, streams
        self._begin, *self._ends = (torch.cuda.Event() for _ in range(1 + len(streams)))

    @property
    def places(self) -> list:
        """Contexts in which launches go to the streams: the first to that of the calls."""
        return [nullcontext, *(partial(torch.cuda.stream, stream) for stream in self._streams)]

    def fork(self, *_: Any) -> None:
        """Have the other streams begin after what their own was given before."""
        if (recorder := RECORDER.get()) is not None:
            recorder.add_call(self.fork)
        self._begin.record(self._own)
        for stream in self._streams:
            self._begin.wait(stream)

    def join(self, *_: Any) -> None:
        """Have their own stream go on after what the others were given."""
        if (recorder := RECORDER.get()) is not None:
            recorder.add_call(self.join)
        for stream, end in zip(self._streams, self._ends, strict=True):
            end.record(stream)
            end.wait(self._own)

    def around(self, calls: Sequence) -> Any:
        """`calls` between fork and join, a list."""
        return [self.fork, *calls, self.join]


def side_by_side(device: torch.device, launches: Sequence, tensors: Sequence[torch.Tensor]) -> list:
    """Run launches through Triton, each on a stream of its own; returns calls that do so directly, by the addresses of
    the tensors, None among them where one cannot.

    launches: each ``callable(*tensors) -> compiled kernel``, with ``direct(compiled, *tensors)``, see `direct`.
    """
    streams, calls = beside(device, len(launches) - 1), []
    if streams is None:
        return [launch.direct(launch(*tensors), *tensors) for launch in launches]
    streams.fork()
    try:
        for launch, place in zip(launches, streams.places, strict=True):
            with place():
                calls.append(launch.direct(launch(*tensors), *tensors))
    finally:
        # Tensors may be freed once this returns, also where a launch was refused.
        streams.join()
    return streams.around(calls)


def capturing() -> bool:
    """True while the current stream is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def lasting_memory(device: torch.device, make: Callable, *given: Any) -> Any:
    """``make(*given)``, whose tensors outlive the call that they are made in, once they are there.

    A thread of its own makes them: torch's CUDA graphs, as of ``torch.compile(mode="reduce-overhead")``, hand out
    memory of their own to the thread that records them, and take it back. In a capture, which another thread would
    break, this thread does.
    """
    if device.type != "cuda" or capturing():
        return make(*given)
    return apart.made(_made_on, device, make, given)


def _made_on(device, make, given):
    with torch.cuda.device(device):
        made = make(*given)
        settle(device)
        return made


def expect_no_capture(before: str) -> None:
    """Raise `DeviceError` in a capture, saying what is to be done `before` it."""
    if capturing():
        raise DeviceError(f"a CUDA graph is being captured: {before}")


def settle(device: torch.device) -> None:
    """Wait for what the current stream was given: what is held for calls may be used on any stream from now on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def fitting(what: str, remedy: str = "") -> Iterator[None]:
    """Raise `DeviceError` for `what` where a program does not fit the device. remedy: what the message ends with."""
    try:
        yield
    except OutOfResources as error:
        raise DeviceError(
            f"{what}: expected to need at most {error.limit} of this device's {error.name}, found "
            f"{error.required}{remedy}"
        ) from error


class CachedLaunch:
    """A kernel whose first call with tensors of a layout goes through Triton, and later ones to its C launcher.

    start: ``callable(*tensors) -> (out, compiled, grid, arguments)``, which checks the tensors and launches on them, on
    a grid of one or three dimensions;
    the kernel takes `out`, the tensors and the arguments, see `direct`, in this order. `out` may be the first of the
    tensors, and is not passed twice then. No tensor is kept between calls: they may overlap, and be captured. Tensors
    off multiples of 16 bytes always go through Triton.
    """

    def __init__(self, start: Callable, device: torch.device):
        """Launch on `device`, a ``torch.device`` with its index, on the stream that is current in each call."""
        self._start, self._device = start, device
        self._stream = current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and number of tensors: what compares layouts, and direct launches, see `_direct_call`.
        self._known, self._lock = recent(), Lock()

    def __call__(self, *tensors: Any) -> torch.Tensor:
        """The result of the kernel. Raises what `start` raises."""
        if self._several and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(*tensors)
        if (recorder := RECORDER.get()) is not None:
            with self._lock:
                out, compiled, grid, arguments = self._start(*tensors)
            given = tensors if out is tensors[0] else (out, *tensors)
            recorder.add(compiled, _three(grid), given, arguments)
            return out
        key = self._stream(), len(tensors)
        for same, direct_call in self._known.get(key):
            if same(*tensors) and (out := direct_call(*tensors)) is not None:
                return out
        # Threads compile and store their calls one after the other.
        with self._lock:
            out, compiled, grid, arguments = self._start(*tensors)
            known, same = _internals.triton_launcher(compiled, _three(grid), key[0]), qkv.same_layout(*tensors)
            aligned = not reduce(or_, map(torch.Tensor.data_ptr, tensors)) & (ALIGNED - 1)
            if known is not None and aligned and same(*tensors):
                self._known.add(key, (same, _direct_call(known, out, tensors, arguments)))
            return out

    def for_one_layout(self) -> Callable:
        """``callable(*tensors)``, as this is, for tensors that who calls has compared with those of its first call."""
        found: dict = {}

        def call(*tensors):
            if not self._several and RECORDER.get() is None:
                direct_call = found.get(self._stream())
                if direct_call is not None and (out := direct_call(*tensors)) is not None:
                    return out
            out, stream = self(*tensors), self._stream()
            for same, direct_call in self._known.get((stream, len(tensors))):
                if len(found) < KEYS and same(*tensors):
                    found[stream] = direct_call
            return out

        return call


def _three(grid):
    return grid if isinstance(grid, tuple) else (grid, 1, 1)


def _direct_call(launcher, out, tensors, arguments):
    """``callable(*tensors)``: the result for tensors of this layout, wherever they lie; None for those not aligned."""
    launch, head, in_tuple = launcher
    address, given = torch.Tensor.data_ptr, out is tensors[0]
    empty: Any = None if given else qkv.empty_like_result(out)

    def call(*tensors):
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

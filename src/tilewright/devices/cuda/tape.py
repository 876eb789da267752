"""The launches of one call, taken down once and made again at the least cost for the host (stage T5).

A call that is many launches spends most of the host's time between them: views, tables, memory for what one launch
leaves to the next, and a comparison of tensors for each launch. For tensors of the same shapes and strides all of this
is the same again, and so is the distance of each address from where an input, a result or the call's memory begins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import itemgetter, or_
from threading import Lock
from typing import Any

import torch

from tilewright.core import _internals
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher
from tilewright.devices.cuda.launcher import ALIGNED, RECORDER, current_stream

# What lies in the memory of a call begins at multiples of so many bytes, as torch's own memory does.
SPACED = 512


class Tape:
    """What takes down the launches of a call: those who launch know it while `running`, by `launcher.RECORDER`.

    inputs: tensors that the call is given, which differ from call to call. All that launches read beside these must be
    written by launches before them, be given by `keep`, or be a result: torch's operators are not seen.
    """

    def __init__(self, device: torch.device, *inputs: Any):
        """Take down a call on `device`, a ``torch.device`` with its index."""
        self._device = device
        self._results: Sequence[torch.Tensor] = ()
        self._kept: dict = {}
        self._pending: list = []
        self._steps: list = []
        self._bytes = 0
        self._stream = current_stream(device)
        self._on = self._stream()
        # Tensors whose elements overlap have no copies that are strided likewise.
        self._usable = not any(n > 1 and not step for x in inputs for n, step in zip(x.shape, x.stride(), strict=True))
        # What the call is to be made with: each input has memory of its own, so that addresses tell them apart.
        self.inputs = apart(inputs) if self._usable else inputs

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Launches of this thread are taken down."""
        token = RECORDER.set(self)
        try:
            yield self
        finally:
            RECORDER.reset(token)

    def keep(self, x: torch.Tensor) -> None:
        """A tensor that lasts, with values that do not change."""
        self._kept[x.untyped_storage().data_ptr()] = x

    def add(self, compiled: bool, grid: tuple[int, ...], tensors: Sequence, arguments: Sequence) -> None:
        """A launch on the current stream: see `launcher.direct`. Tensors are held until `settle`."""
        known = _internals.triton_launcher(compiled, grid, self._stream())
        if known is None:
            self._usable = False
        elif self._usable:
            self._pending.append((known, tensors, arguments))

    def add_call(self, call: Callable) -> None:
        """What is called between two launches, without arguments."""
        self._pending.append(((call, (), False), (), ()))

    def settle(self, *results: Any) -> None:
        """Of what was launched since the last call, say where all tensors lie; what is neither an input, nor a result,
        nor kept is memory of the call, which later launches may use anew. results: those that are known."""
        self._results = results
        bases = {x.untyped_storage().data_ptr(): (i, x) for i, x in enumerate((*self.inputs, *results))}
        places, used = {}, 0
        for (launch, head, in_tuple), tensors, arguments in self._pending:
            step = []
            for x in tensors:
                storage = x.untyped_storage()
                at, address = storage.data_ptr(), x.data_ptr()
                if at in bases:
                    i, base = bases[at]
                    step.append((i, address - base.data_ptr()))
                elif at in self._kept:
                    step.append((-1, address))
                else:
                    if at not in places:
                        places[at], used = used, used + -(-storage.nbytes() // SPACED) * SPACED
                    step.append((-2, places[at] + address - at))
            self._steps.append((launch, head, in_tuple, tuple(step), arguments))
        self._pending, self._bytes = [], max(self._bytes, used)

    def replay(self, *inputs: Any) -> "Replay | None":
        """The `Replay` for tensors such as `inputs`, the call's own; None where launches cannot be made directly.

        Results are those of the last `settle`."""
        # Kernels are compiled for how addresses are aligned: all are as far from aligned ones in every call.
        aligned = not reduce(or_, map(torch.Tensor.data_ptr, inputs)) & (ALIGNED - 1)
        same = qkv.same_layout(*inputs)
        if not self._usable or self._pending or not self._steps or not aligned or not same(*inputs):
            return None
        empties = [qkv.empty_like_result(x) for x in self._results]
        memory = qkv.empty_like_result(torch.empty(max(1, self._bytes), dtype=torch.uint8, device=self._device))
        return Replay(self._device, self._on, same, self._steps, [*empties, memory], tuple(self._kept.values()))


class Replay:
    """A call that was taken down: ``callable(*inputs) -> results``, or None for tensors of another layout or stream."""

    def __init__(self, device: torch.device, on: Any, same: Callable, steps: Sequence, empties: Sequence, kept: Any):
        """See `Tape`. empties: of the results, and of the call's memory. kept: tensors that must last as long."""
        self._stream, self._on, self._same = current_stream(device), on, same
        self._empties, self._kept = empties, kept
        # Each address once: most are taken by several launches.
        self._places = list(dict.fromkeys(place for *_, step, _ in steps for place in step))
        number = {place: i for i, place in enumerate(self._places)}
        self._steps = [(*called, _taking([number[x] for x in step]), given) for *called, step, given in steps]
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        self._index = device.index if several else None

    def __call__(self, *inputs: Any) -> Any:
        """The results, in new memory. Raises ``torch.OutOfMemoryError`` where there is none."""
        if self._index is not None and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(*inputs)
        if self._stream() != self._on or not self._same(*inputs):
            return None
        address = torch.Tensor.data_ptr
        addresses = list(map(address, inputs))
        if reduce(or_, addresses) & (ALIGNED - 1):
            return None
        made = [empty() for empty in self._empties]
        # Behind those of inputs and results: the call's memory, and what addresses are counted from that do not move.
        addresses += map(address, made)
        addresses.append(0)
        pointers = [addresses[i] + offset for i, offset in self._places]
        for launch, head, in_tuple, taken, arguments in self._steps:
            if in_tuple:
                launch(*head, (*taken(pointers), *arguments))
            else:
                launch(*head, *taken(pointers), *arguments)
        # Freed here, the call's memory is used by what comes later on this stream.
        return made[:-1]


def _taking(numbers):
    """``callable(list) -> tuple`` of its elements at these numbers."""
    return itemgetter(*numbers) if len(numbers) > 1 else lambda x: tuple(x[i] for i in numbers)


def _nothing(*_: Any) -> None:
    return None


class Calls:
    """Calls that are many launches: the first with tensors of a layout is taken down, later ones are made again.

    What does not fit goes the usual way: calls off multiples of 16 bytes, the first ones of a stream in a capture, and
    those whose launches cannot be made directly. Several threads may call.

    last: what made the last call that was made again; for others than such it returns None.
    """

    last: Callable = staticmethod(_nothing)

    def __init__(self, device: torch.device, usual: Callable):
        """usual: ``callable(*inputs) -> results``, the usual way, on `device`. Its results are tensors in new memory.
        Between its launches, torch only makes memory and views of it, see `Tape`."""
        self._device, self._usual, self._stream = device, usual, current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and size of the first tensor: what makes calls of one layout, or returns None.
        self._known, self._lock = launcher.recent(), Lock()

    def __call__(self, *inputs: Any) -> Any:
        """The results of a call, a sequence. Raises what the usual way raises."""
        if self._several and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(*inputs)
        key = self._stream(), inputs[0].numel()
        for again in self._known.get(key):
            if (results := again(*inputs)) is not None:
                if isinstance(again, Replay):
                    self.last = again
                return results
        if launcher.capturing() or reduce(or_, map(torch.Tensor.data_ptr, inputs)) & (ALIGNED - 1):
            return self._usual(*inputs)
        # Threads take down their calls one after the other.
        with self._lock:
            results, replay = recorded(self._device, self._taken_down, *inputs)
            self._known.add(key, replay or self._as_usual(qkv.same_layout(*inputs)))
        return results

    def _taken_down(self, tape, *inputs):
        results = self._usual(*inputs)
        tape.settle(*results)
        return results

    def _as_usual(self, same):
        return lambda *inputs: self._usual(*inputs) if same(*inputs) else None


def apart(tensors: Sequence) -> tuple:
    """`tensors`, those that share memory with one before them copied to memory of their own, strided likewise."""
    seen, found = set(), []
    for x in tensors:
        at = x.untyped_storage().data_ptr()
        found.append(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) if at in seen else x
        )
        seen.add(at)
    return tuple(found)


def recorded(device: torch.device, call: Callable, *inputs: Any) -> Any:
    """``(result, replay)`` of ``call(tape, *inputs)``, which is to `settle` the tape; replay is a `Replay` or None."""
    tape = Tape(device, *inputs)
    with tape.running():
        result = call(tape, *tape.inputs)
    return result, tape.replay(*inputs)

"""The call of a model that a thread is in: what its layers have to know that their tokens do not tell.

Layers that checkpointing computes again, in a backward, find the call of their own forward with their tokens: it is
noted with the memory of these, which the backward keeps.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewright.core import _internals
from tilewright.core.errors import PatternError


class _Here(threading.local):
    """Of a thread: its call, whether a compiler saw that begin, and the backward that it is in.

    What is missing would be looked for by each call of compiled code, in microseconds.
    """

    def __init__(self):
        self.held, self.traced, self.backward = None, True, None


class Calls:
    """Calls of one model, or of models that are called one after the other in a thread. A call is any value."""

    # As few guards of compiled code as can be.
    __slots__ = "_here", "_known"

    def __init__(self):
        """No thread is in a call."""
        # Plain: a compiler follows what is written to it and read.
        self._here = _Here()
        # By numbers of tokens. It only grows.
        self._known = {}

    def __reduce__(self) -> tuple:
        # A copy of a model is in no call.
        return type(self), ()

    def enter(self, call: Any, n: int) -> None:
        """This thread is in `call`, of `n` tokens, from now on."""
        self._here.held, self._here.traced = call, torch.compiler.is_compiling()
        if not torch.compiler.is_compiling():
            self._here.backward = _internals.backward_number()
            self._known.setdefault(n, set()).add(call)

    def now(self) -> Any:
        """The call that this thread is in, or None."""
        return self._here.held

    @contextlib.contextmanager
    def inside(self, call: Callable) -> Iterator[None]:
        """Context in which this thread is in `call`."""
        before = self.now()
        self._here.held = call
        try:
            yield
        finally:
            self._here.held = before

    def begin(self, x: torch.Tensor) -> None:
        """Before a block of layers: note the call with its tokens x [B, N, C], or in a backward find it there.

        Raises `PatternError` where it is neither there nor the only one of so many tokens.
        """
        if not torch.compiler.is_compiling():
            # What is called to infer is never computed again.
            if torch.is_grad_enabled() or x.requires_grad or _internals.backward_number() is not None:
                self._begin(x)
        elif torch.is_grad_enabled() and not self._here.traced:
            # A block that is compiled by itself. What a compiler traces as a whole it computes again itself.
            known = self._known.get(x.shape[1], ())
            if len(known) == 1:
                self._here.held = next(iter(known))
            else:
                # Cuts the block in two.
                self._apart(x)

    @_internals.uncompiled
    def _apart(self, x):
        self._begin(x)

    def _begin(self, x):
        backward, n = _internals.backward_number(), x.shape[1]
        if backward is not None:
            noted = _notes(x).get(self)
            if noted is not None:
                self.enter(noted, n)
            elif self._here.backward != backward:
                self.enter(self._only(n), n)
        call = self.now()
        if call is not None and (torch.is_grad_enabled() or x.requires_grad):
            _notes(x)[self] = call

    def _only(self, n):
        known = self._known.get(n, ())
        if len(known) != 1:
            raise PatternError(
                f"a backward pass that recomputes layers found {n} tokens without their forward call and {len(known)} "
                "kinds of calls of this size; expected images of one shape"
            )
        return next(iter(known))


def _notes(x):
    """What is noted with the memory of a tensor, a dict that lives as long, by `Calls`; empty where it has none."""
    try:
        memory = x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # Of a transformation of torch.func.
        return {}
    if not hasattr(memory, "tilewright_calls"):
        memory.tilewright_calls = {}
    return memory.tilewright_calls

"""Time that networks spend in attention, without its projections."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tilewright.networks.attention_sites import WATCH


@dataclass
class Clock:
    """Time that was spent in attention.

    elapsed: seconds of the host's clock. spans: pairs of CUDA events, on a GPU, where a call returns before it is done.
    """

    elapsed: float = 0.0
    spans: list = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All of it; what runs on a GPU must have been waited for."""
        return self.elapsed + sum(begin.elapsed_time(end) for begin, end in self.spans) / 1e3

    def watch(self, run, arguments):
        """``run(*arguments)``, timed; tensors tell whose time it is."""
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = run(*arguments)
            end.record()
            self.spans.append((begin, end))
            return out
        start = time.perf_counter()
        out = run(*arguments)
        self.elapsed += time.perf_counter() - start
        return out


@contextmanager
def clocked() -> Iterator[Clock]:
    """Time all attention of the networks that run inside: ``with clocked() as clock: …; clock.seconds``."""
    clock = Clock()
    token = WATCH.set(clock.watch)
    try:
        yield clock
    finally:
        WATCH.reset(token)

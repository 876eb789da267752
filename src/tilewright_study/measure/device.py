"""What is measured of a GPU beside its calls as they are: cold caches, and the bandwidth of its memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tilewright.core.timing import Checked, time_gpu

# Size of the buffer that is overwritten to empty the second-level cache, in sizes of that cache.
OVERWRITTEN = 2.5
# Bytes that the copy which measures the memory's bandwidth reads, and writes.
COPIED_BYTES = 1 << 30


def time_cold(call: Callable, l2_bytes: int, **effort: Any) -> float:
    """GPU time of `call`, microseconds, with none of its data in the second-level cache, which has `l2_bytes`.

    The median of [overwrite a larger buffer, call] less that of overwriting alone. effort: arguments of `time_gpu`.
    """
    buffer = torch.empty(int(OVERWRITTEN * l2_bytes), dtype=torch.uint8, device="cuda")

    def cold():
        buffer.zero_()
        return call()

    timed = Checked(cold, call.judge) if isinstance(call, Checked) else None
    found = time_gpu(timed or cold, **effort).p50_us - time_gpu(buffer.zero_, **effort).p50_us
    if timed is not None:
        call.wrong = call.wrong or timed.wrong
    return found


@cache
def copy_bandwidth() -> float:
    """Bytes a second that the GPU's memory moves in a copy, reads and writes both counted. Measured once a process."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = time_gpu(lambda: target.copy_(source), min_reps=10, max_seconds=1.0, rse_target=0.005)
    return 2 * COPIED_BYTES / (timing.p50_us / 1e6)

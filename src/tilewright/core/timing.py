"""Timing of calls on the device that runs them (stages T3 and T5)."""

import math
import time
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

# Fewest repetitions of any timing: with fewer, there is no spread to speak of.
FEWEST = 3
# A batch of calls between two events lasts at least so long, events telling half a microsecond apart, and has at most
# so many calls.
BATCH_US = 300.0
MOST_CALLS = 256
# Overwritten between calls that are to find the second-level cache cold, in sizes of that cache.
OVERWRITTEN = 2.5
# Calls that are queued at once to see what the host takes for one: fewer than a stream holds.
QUEUED = 16
# What the copy that tells the memory's bandwidth moves, each way.
COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """What repeated calls took. p20_us, p50_us, p80_us: microseconds; rse: standard error over the mean.

    method: ``wall``, the host's clock; ``graph``, replays of a CUDA graph; ``events``, calls between CUDA events.
    """

    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    rse: float
    method: str = "wall"

    @property
    def columns(self):
        """All but the method, by name, as rows of stage T5 hold it."""
        return {name: value for name, value in vars(self).items() if name != "method"}


def time_call(call, *, min_reps, max_seconds, rse_target, warmups=2):
    """Call `call` until the mean is known to `rse_target` (and `min_reps` calls were timed) or `max_seconds` are over.

    Up to `warmups` calls before that are not timed, as many as fit into `max_seconds`, at least one. `FEWEST`
    repetitions are made however long they take. ASSUME: caches stay as the call before left them, as they do between
    the layers of a network.
    """
    begin = time.perf_counter_ns()
    for _ in range(warmups):
        call()
        if time.perf_counter_ns() - begin >= max_seconds * 1e9:
            break
    return _repeated(lambda: _wall_us(call), min_reps, max_seconds, rse_target)


def time_together(calls, *, min_reps, max_seconds, rse_target):
    """As `time_call`, a `Timing` of each of `calls`, which take turns: a clock that changes does so for all of them.

    None is warmed up. They go on until all are known well enough, or for `max_seconds` each.
    """
    return _in_turns([partial(_wall_us, call) for call in calls], min_reps, max_seconds, rse_target)


def wait(x):
    """Until the GPU of tensor x, where it is on one, has done what it was given."""
    import torch

    if x.is_cuda:
        torch.cuda.synchronize()


def time_gpu(call, *, min_reps, max_seconds, rse_target):
    """GPU time of `call`, which leaves work on torch's current stream: as `time_call`, but the host does not count.

    Calls follow one another in a CUDA graph that is replayed (`Timing.method` is ``graph``); what cannot be captured
    runs between two events (``events``), and there the host does count where it is slower than the GPU. A repetition is
    a batch of calls, so long that the events tell its time. The second-level cache is warm, see `time_call`.
    """
    run, calls, method = _batch(call)
    return _repeated(lambda: _gpu_us(run) / calls, min_reps, max_seconds, rse_target, method)


def time_cold(call, l2_bytes, **effort):
    """GPU time of `call`, microseconds, that finds nothing of its own in a second-level cache of `l2_bytes`.

    The median of [overwrite a larger buffer, call] less that of overwriting it. effort: as of `time_gpu`.
    """
    import torch

    buffer = torch.empty(int(OVERWRITTEN * l2_bytes), dtype=torch.uint8, device="cuda")

    def cold():
        buffer.zero_()
        call()

    return time_gpu(cold, **effort).p50_us - time_gpu(buffer.zero_, **effort).p50_us


def time_host(call, *, min_reps, max_seconds, rse_target):
    """``(latency_us, host_us)`` of `call` on a GPU, medians of the host's clock: with the wait for its result, and
    until it returns, not waited for. Arguments as of `time_call`.
    """
    import torch

    def waited():
        call()
        torch.cuda.synchronize()

    def queued():
        # Results are let go at once, as a network lets them go.
        for _ in range(QUEUED):
            call()

    def returned_us():
        torch.cuda.synchronize()
        return _wall_us(queued) / QUEUED

    effort = {"min_reps": min_reps, "max_seconds": max_seconds, "rse_target": rse_target}
    return time_call(waited, **effort).p50_us, _repeated(returned_us, **effort).p50_us


@cache
def copy_bandwidth():
    """Bytes a second that the GPU's memory moves in a copy, read and written bytes both counted; once a process."""
    import torch

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = time_gpu(lambda: target.copy_(source), min_reps=10, max_seconds=1.0, rse_target=0.005)
    return 2 * COPIED_BYTES / (timing.p50_us / 1e6)


def _repeated(sample, min_reps, max_seconds, rse_target, method="wall"):
    """The `Timing` of `sample`, which runs something and returns its microseconds."""
    return _in_turns([sample], min_reps, max_seconds, rse_target, method)[0]


def _in_turns(samples, min_reps, max_seconds, rse_target, method="wall"):
    """`_repeated` of each of `samples`."""
    if not samples:
        return []
    rounds, begin, look = [], time.perf_counter_ns(), FEWEST
    while True:
        rounds.append([sample() for sample in samples])
        over = time.perf_counter_ns() - begin >= len(samples) * max_seconds * 1e9
        if len(rounds) < (FEWEST if over else look):
            continue
        rse = np.std(rounds, axis=0, ddof=1) / np.mean(rounds, axis=0) / len(rounds) ** 0.5
        if over or (len(rounds) >= min_reps and rse.max() <= rse_target):
            break
        # Looking at all of them takes longer than a short call.
        look = 1 + int(1.1 * len(rounds))
    each = zip(*np.percentile(rounds, (20, 50, 80), axis=0), rse, strict=True)
    return [Timing(float(p20), float(p50), float(p80), len(rounds), float(r), method) for p20, p50, p80, r in each]


def _wall_us(call):
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _gpu_us(run):
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _batch(call):
    """``(run, calls, method)``: how so many calls are started at once."""
    import torch

    call()
    torch.cuda.synchronize()
    try:
        one = _captured(call, 1)
        one.replay()
        calls = _calls(_gpu_us(one.replay))
        run, method = (one if calls == 1 else _captured(call, calls)).replay, "graph"
    except RuntimeError:
        # CUDA forbids some calls in a capture, such as waiting; the capture is over then, and so is its error.
        torch.cuda.synchronize()
        calls, method = _calls(_gpu_us(call)), "events"

        def run():
            for _ in range(calls):
                call()

    run()
    return run, calls, method


def _calls(us):
    """Calls of `us` microseconds in a batch."""
    return min(MOST_CALLS, max(1, math.ceil(BATCH_US / max(us, 1.0))))


def _captured(call, calls):
    """CUDA graph of so many calls. What they allocate stays with the graph."""
    import torch

    graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            # Libraries set themselves up for a stream in the first call on it, which is not to be captured.
            call()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    finally:
        # A capture that fails leaves its own stream as the current one.
        torch.cuda.set_stream(current)
    current.wait_stream(stream)
    return graph

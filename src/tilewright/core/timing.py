"""Timing of calls on the device that runs them (stages T3 and T5).

A `Checked` call is judged where it is timed: by what its last repetition, or the replay of its CUDA graph, has written.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# Fewest repetitions of any timing. Fewer have no spread worth stating.
FEWEST = 3
# A batch of calls between two events lasts at least this long, since events resolve half a microsecond, and has at most
# this many calls.
BATCH_US = 300.0
MOST_CALLS = 256
# Calls that are queued at once to measure the host's time for one. A stream holds more.
QUEUED = 16
# How often each call is measured in turns.
TURNS = 5


@dataclass(frozen=True)
class Timing:
    """Times of repeated calls. p20_us, p50_us, p80_us: percentiles, microseconds. rse: standard error over the mean.

    method: ``wall``, the host's clock; ``graph``, replays of a CUDA graph; ``events``, calls between CUDA events.
    """

    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    rse: float
    method: str = "wall"

    @property
    def columns(self) -> dict:
        """All fields but the method, by name, as rows of stage T5 hold them."""
        return {name: value for name, value in vars(self).items() if name != "method"}


class Checked:
    """A call without arguments, and ``judge(result)``: what is wrong with a result, an empty text for nothing.

    The functions of this module judge the last result of what they time. Then its memory is overwritten and the call,
    or the graph that was timed, runs once more: a graph that writes elsewhere, or nothing, leaves what is not a number.
    ``wrong``: what was said first. A time of a call with such a text is of another call than was meant.
    """

    def __init__(self, call: Callable, judge: Callable):
        """Nothing is called yet."""
        self.call, self.judge, self.result, self.wrong = call, judge, None, ""

    def __call__(self) -> Any:
        """The result, which is kept until the next call: freed before that, as between the layers of a network."""
        self.result = None
        self.result = self.call()
        return self.result

    def look(self, run: Callable | None = None, again: bool = True) -> None:
        """Judge the latest result and, where it is to run `again`, what a further run leaves in its place.

        run: the call itself, or a replay.
        """
        self.wrong = self.wrong or self.judge(self.result)
        if again and not self.wrong:
            overwrite(self.result)
            (run or self)()
            self.wrong = self.judge(self.result)


def time_call(
    call: Any,
    *,
    min_reps: Any,
    max_seconds: Any,
    rse_target: Any,
    warmups: Any = 2,
    fewest: int = FEWEST,
    again: bool = True,
) -> Timing:
    """Time `call` until its mean is known to `rse_target`, after at least `min_reps` calls, or `max_seconds` are over.

    Up to `warmups` calls come first and are not timed: at least one, and as many as fit into `max_seconds`. `fewest`
    repetitions are made however long they take; of one alone the error is NaN. ASSUME: a call finds the caches as the
    previous call left them, as in the layers of a network. again: see `Checked.look`.
    """
    begin = time.perf_counter_ns()
    for _ in range(warmups):
        call()
        if time.perf_counter_ns() - begin >= max_seconds * 1e9:
            break
    found = _repeated(lambda: _wall_us(call), min_reps, max_seconds, rse_target, fewest=fewest)
    _end(call, again=again)
    return found


def time_together(calls: Any, *, min_reps: Any, max_seconds: Any, rse_target: Any, gpu: Any = False) -> list[Timing]:
    """A list with the `Timing` of each of `calls`, as `time_call`. Rounds of one call each share changes of the clock.

    No call is warmed up. Rounds end when all means are known to `rse_target`, or after `max_seconds` a call. gpu: calls
    queue work on the current stream, replays of graphs for instance, and the GPU's time between two events is taken.
    """
    measure, method = (_gpu_us, "events") if gpu else (_wall_us, "wall")
    found = _interleaved([partial(measure, call) for call in calls], min_reps, max_seconds, rse_target, method)
    for call in calls:
        _end(call)
    return found


def wait(x: "torch.Tensor") -> None:
    """Wait until the GPU of tensor x has finished its work. Returns at once for a tensor on the CPU."""
    import torch

    if x.is_cuda:
        torch.cuda.synchronize()


def time_gpu(call: Any, *, min_reps: Any, max_seconds: Any, rse_target: Any) -> Timing:
    """GPU time of `call`, which queues work on torch's current stream: as `time_call`, without the host's time.

    Calls follow each other in a CUDA graph that is replayed (`Timing.method` is ``graph``). A call that cannot be
    captured runs between two events (``events``): its time includes the host's where the host is slower than the GPU. A
    repetition is a batch of calls that is long enough for the events. The second-level cache is warm, see `time_call`.
    """
    run, calls, method = _batch(call)
    _look(call, run)
    found = _repeated(lambda: _gpu_us(run) / calls, min_reps, max_seconds, rse_target, method)
    _end(call, run)
    return found


def time_host(call: Callable, *, min_reps: int, max_seconds: float, rse_target: float) -> tuple[float, float]:
    """``(latency_us, host_us)`` of `call` on a GPU: medians of the host's clock until the result is there, and until
    the call returns. Arguments as in `time_call`.
    """
    import torch

    def waited():
        call()
        torch.cuda.synchronize()

    def queued():
        # Results are freed at once, as in a network.
        for _ in range(QUEUED):
            call()

    def returned_us():
        torch.cuda.synchronize()
        return _wall_us(queued) / QUEUED

    effort: dict[str, Any] = {"min_reps": min_reps, "max_seconds": max_seconds, "rse_target": rse_target}
    found = time_call(waited, **effort).p50_us, _repeated(returned_us, **effort).p50_us
    _end(call)
    return found


def time_in_turns(
    calls: Sequence[Callable], *, gpu: bool, min_reps: int, max_seconds: float, rse_target: float, turns: int = TURNS
) -> list[Timing]:
    """A list with the `Timing` of each of `calls`: medians over `turns`, each of which measures all calls one by one.

    A call that is timed once is known to far less than its standard error says: timed again in a new CUDA graph, a call
    of 3 microseconds took 7 % more or less, one of 10 microseconds 1 %, where the repetitions of each had a standard
    error of 0.4 %. So the error is that between turns (docs/decisions/timing.md).

    gpu: with `time_gpu`, each time anew, else with `time_call`, once a turn where a call takes longer than its share of
    `max_seconds`. min_reps, max_seconds: of a call in all turns together; rse_target: within a turn. The `Timing.rse`
    is the standard error of the mean of the turns' medians, over that mean.
    """
    effort = {"min_reps": max(FEWEST, math.ceil(min_reps / turns)), "rse_target": rse_target}
    effort["max_seconds"] = max_seconds / turns

    def measure(call, turn):
        if gpu:
            return time_gpu(call, **effort)
        # What does not write its result is seen in the last turn: it is the same call in all of them.
        return time_call(call, **effort, fewest=1, again=turn == turns - 1)

    found = [[measure(call, turn) for call in calls] for turn in range(turns)]
    return [_joined(each) for each in zip(*found, strict=True)]


def _joined(found):
    """One `Timing` of several of the same call."""
    medians = np.array([timing.p50_us for timing in found])
    error = np.std(medians, ddof=1) / np.mean(medians) / len(medians) ** 0.5
    p20, p50, p80 = (float(np.median([getattr(t, name) for t in found])) for name in ("p20_us", "p50_us", "p80_us"))
    if max(timing.repetitions for timing in found) < FEWEST:
        # The spread is that between turns.
        p20, p50, p80 = map(float, np.percentile(medians, (20, 50, 80)))
    return Timing(p20, p50, p80, sum(timing.repetitions for timing in found), float(error), found[0].method)


def _look(call, run=None, again=True):
    """Judge a `Checked` call by what `run` leaves; of others nothing is known."""
    if isinstance(call, Checked):
        call.look(run, again)


def _end(call, run=None, again=True):
    """`_look` for the last time: the result is freed."""
    _look(call, run, again)
    if isinstance(call, Checked):
        call.result = None


def overwrite(result: Any) -> None:
    """Fill the memory of a result, a tensor or some of them, with what no right result holds."""
    import torch

    # Also tensors of inference, and such as autograd watches.
    with torch.inference_mode():
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_nested:
                x.fill_(torch.nan)


def _repeated(sample, min_reps, max_seconds, rse_target, method="wall", fewest=FEWEST):
    """The `Timing` of `sample`, which runs a call and returns its microseconds."""
    return _interleaved([sample], min_reps, max_seconds, rse_target, method, fewest)[0]


def _interleaved(samples, min_reps, max_seconds, rse_target, method="wall", fewest=FEWEST):
    """`_repeated` of each of `samples`, a list: each round runs all of them once."""
    if not samples:
        return []
    rounds, begin, next_check = [], time.perf_counter_ns(), FEWEST
    while True:
        rounds.append([sample() for sample in samples])
        over = time.perf_counter_ns() - begin >= len(samples) * max_seconds * 1e9
        if len(rounds) < (fewest if over else next_check):
            continue
        rse = np.full(len(samples), np.nan)
        if len(rounds) > 1:
            rse = np.std(rounds, axis=0, ddof=1) / np.mean(rounds, axis=0) / len(rounds) ** 0.5
        if over or (len(rounds) >= min_reps and rse.max() <= rse_target):
            break
        # The check reads all rounds, which takes longer than a short call.
        next_check = 1 + int(1.1 * len(rounds))
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
    """``(run, calls, method)``: a function that starts a batch, the calls in it, and how they are started."""
    import torch

    call()
    torch.cuda.synchronize()
    try:
        one = _captured(call, 1)
        one.replay()
        calls = _calls(_gpu_us(one.replay))
        run, method = (one if calls == 1 else _captured(call, calls)).replay, "graph"
    except RuntimeError:
        # CUDA forbids some operations in a capture, such as waiting. The failed capture has ended here.
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
    """CUDA graph of `calls` calls. It keeps the memory that they allocate."""
    import torch

    graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            # Libraries initialise a stream in the first call on it, which must not be captured.
            call()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    finally:
        # A capture that fails leaves its stream as the current one.
        torch.cuda.set_stream(current)
    current.wait_stream(stream)
    return graph

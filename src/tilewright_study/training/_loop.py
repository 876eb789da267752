"""The steps of a training, one after the other: how far it is, when it ends, and what is written and told meanwhile.

By steps a training is repeatable. By the clock it ends in time whatever the device; how far it came is then told by the
images that it saw.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from time import perf_counter

import torch

from tilewright import devices
from tilewright.core.errors import ConfigError

# Seconds between two lines about the progress, and steps that the host may be ahead of a GPU: what has elapsed would
# not be known otherwise.
SHOWN_S, AHEAD = 10.0, 2


def until(state, steps=None, seconds=None) -> Callable[[], float]:
    """``share()`` of a training that is over, from 0 to 1. steps, seconds: of the whole of it; the earlier end counts.

    Raises `ConfigError` where neither is stated.
    """
    if steps is None and seconds is None:
        raise ConfigError("training: expected a number of steps or of seconds, found neither")

    def share():
        by_steps = 0.0 if steps is None else state.step / steps
        return min(1.0, max(by_steps, 0.0 if seconds is None else state.seconds / seconds))

    return share


def rate(share, warm_up):
    """The rate of learning, of the highest: linear from 0 during the share `warm_up`, then along a cosine to 0."""
    if share < warm_up:
        return share / warm_up
    return 0.5 * (1 + math.cos(math.pi * (share - warm_up) / max(1e-9, 1 - warm_up)))


def run(state, share, step, line, *, limit_s=None, every_s=math.inf, show=None) -> bool:
    """Take steps until ``share()`` is 1 or `limit_s` is over; returns whether it was the end.

    step: ``step(share) -> (rate, number, …)``, which leaves gradients in the weights. line: ``line(means, seconds)``,
    what a line says of steps, by the means of their numbers and the seconds that each took. every_s: how often the
    state is written, as it is at the limit.
    """
    begin = saved = perf_counter()
    before, shown, events = state.seconds, (begin, state.step), []
    while True:
        now = perf_counter()
        state.seconds = before + now - begin
        if (done := share()) >= 1:
            return True
        if limit_s is not None and now - begin > limit_s:
            state.write_or_warn()
            return False
        if now - saved > every_s:
            state.write_or_warn()
            saved = now
        state.take(*step(done))
        if devices.facts(state.device.type).GPU_TIMER:
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > AHEAD:
                events.pop(0).synchronize()
        if show is not None and now - shown[0] > SHOWN_S:
            # Waits for these steps.
            means = torch.stack(state.told[shown[1] - state.step :]).mean(0).tolist()
            seconds = (perf_counter() - shown[0]) / (state.step - shown[1])
            show(f"step {state.step}, {100 * done:.0f} %, {line(means, seconds)}, {state.seconds:.0f} s")
            shown = perf_counter(), state.step


@contextmanager
def finite():
    """Leave out cuDNN's attention, which torch 2.11 and later prefer on Hopper.

    Its backward makes NaN of gradients where the keys are 64 more than a multiple of 128 and all scores of a query lie
    far below zero (https://github.com/pytorch/pytorch/issues/196678): the loss is finite, and no step is of use. All
    stages of a SegFormer have 64 keys where images have 256 pixels.

    On an H100 half of the steps of SegFormer-B1 and -B2 were lost to it, those of images of 256 pixels: all of these
    before, none since (docs/dynamic.md). The report is of calls with a mask, ours have none.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

"""How far a training is, by its steps or by the clock: rates of learning follow from it, and so does its end.

By steps a training is repeatable. By the clock it ends in time whatever the device; how far it came is then told by the
images that it saw.
"""

import math
from time import perf_counter

from tilewright.core.errors import ConfigError


class Pace:
    """The share of a training that is done. steps, seconds: of the whole of it; the earlier end counts.

    Raises `ConfigError` where neither is stated.
    """

    def __init__(self, steps=None, seconds=None):
        if steps is None and seconds is None:
            raise ConfigError("training: expected a number of steps or of seconds, found neither")
        self.steps, self.seconds = steps, seconds
        self.step, self._begin = 0, None

    @property
    def elapsed(self):
        """Seconds since the first call of `share`: what comes before it takes no time."""
        return 0.0 if self._begin is None else perf_counter() - self._begin

    def share(self):
        """From 0 at the first step to 1 at the end."""
        if self._begin is None:
            self._begin = perf_counter()
        ends = [] if self.steps is None else [self.step / self.steps]
        ends += [] if self.seconds is None else [self.elapsed / self.seconds]
        return min(1.0, max(ends))


def rate(share, warm_up):
    """The rate of learning, of the highest: linear from 0 during the share `warm_up`, then along a cosine to 0."""
    if share < warm_up:
        return share / warm_up
    return 0.5 * (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up)))

"""How likely the paths of a table are late, which one pays with that, and what a stream of frames learns of it.

Numbers are microseconds.
"""

import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.paths.table import Entry, scales

# Calls that say how much longer than foreseen a call may take: the latest ones.
KEPT = 1000
# What a frame takes beyond what was foreseen moves the level by this share of it, and the gain by that; at most twice
# the usual deviation counts, which itself moves by the third. `MID` is that of the mean of medians.
LEVEL, GAIN, DEVIATION, MID = 0.2, 0.06, 0.02, 0.01
# A frame that takes this many usual deviations longer is delayed by other work. The next ones are expected to be, too,
# until so many in a row are not. The level then moves by this share of its pace: not all delays end.
JUMP, CALM, SLOWLY = 8.0, 2, 0.25
# Of runs of delayed frames, and of those between, the latest ones that count, the fewest that are alike, and the share
# of their length by which alike ones may differ; and by which factor their delays may.
RUNS, ALIKE, APART, ALIKE_US = 16, 3, 1 / 8, 2
# A usual deviation in those by which a promise exceeds a median, until frames tell, and in medians, at least.
PROMISED, STEADY = 6, 0.002
# Promises grow by so many usual deviations with each broken one.
STEP = 2.0
# The price of a late frame at first, in mean IoU, the share by which a late frame raises it, and its bounds.
PRICE, DEARER, PRICES = 4.0, 0.2, (1 / 64, 64.0)
# How much slower than in the rehearsal paths may seem.
GAINS = (0.5, 2.0)
# Microseconds that are left where a delay takes all of a budget: no path is that fast.
LEAST_US = 1e-3


class Odds:
    """The path that a budget pays best: the highest mean IoU less the price of a late call times how likely it is late.

    That is a Lagrangian of the most accuracy at a share of late calls: one price for all budgets takes the risk of a
    late call where it gives the most. A promise, which each call keeps as likely, takes it wherever it is met.

    What calls take beyond the medians of their paths is counted of all paths together, see `table.scales`.
    """

    def __init__(
        self, entries: Sequence[Entry], samples_us: Mapping[str, Any], key: Callable = operator.attrgetter("path")
    ):
        """entries: with their mean IoU on scenes of ``choice``. samples_us: of calls of each, by its `key`."""
        samples = {key(entry): np.asarray(samples_us[key(entry)], dtype=np.float64) for entry in entries}
        unit = scales(samples)
        self.entries = sorted(entries, key=lambda entry: np.median(samples[key(entry)]))
        keys = [key(entry) for entry in self.entries]
        self._medians = [float(np.median(samples[each])) for each in keys]
        self._scores: list[Any] = [entry.choice for entry in self.entries]
        self._scales = [unit[each] for each in keys]
        # Of paths by which longer times scale, the mean median.
        self._mean = float(np.mean(self._medians)) if set(self._scales) != {1.0} else 0.0
        over = np.sort(np.concatenate([(samples[each] - np.median(samples[each])) / unit[each] for each in keys]))
        kept = over[((np.arange(KEPT) + 0.5) / KEPT * len(over)).astype(int)]
        self._over = kept.tolist()
        # In an order of chance: which of these are forgotten first says nothing.
        self._latest = deque(np.random.default_rng(0).permutation(kept).tolist())
        # Calls that took longer than this beyond their median do not count: in a delay, that is foreseen.
        self.most_us = math.inf

    def learn(self, over_us: float, entry: Entry) -> None:
        """Count by how much a call took longer than was foreseen, instead of the oldest that counts."""
        over = over_us * self._mean / entry.p50_us if self._mean else over_us
        del self._over[bisect_left(self._over, self._latest.popleft())]
        self._latest.append(over)
        insort(self._over, over)

    def pick(self, room_us: float, price: float) -> Entry | None:
        """The entry for a budget at a price above 0, of those whose median it holds; None where it holds none."""
        over, end = self._over, KEPT
        if self.most_us < math.inf:
            end = max(1, bisect_right(over, self.most_us))
        best, most = None, -math.inf
        for at in range(bisect_right(self._medians, room_us) - 1, -1, -1):
            score = self._scores[at]
            if score > most:
                in_time = bisect_right(over, (room_us - self._medians[at]) / self._scales[at], 0, end) / end
                worth = score - price * (1 - in_time)
                if worth > most:
                    best, most = self.entries[at], worth
        return best


class Controller:
    """What budgets leave for a frame. This one is open: it learns nothing, and takes them as they are.

    price: what a late frame costs, see `runner.Picker.pick`; None where promises are kept instead.
    """

    price: float | None = None

    def room(self, budget_us: float) -> float:
        """Microseconds of a budget that the times of a table may take."""
        return budget_us

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """Take in a frame's time, what ran, and whether it was later than its budget."""


class Runs:
    """How many frames in a row are delayed, and how many are not: other work may come at a rhythm.

    delayed: whether the latest run is of delayed frames. jump_us: the median delay. Of another size, or alone, a delay
    is none of a rhythm's: what it stands in goes on.
    """

    def __init__(self):
        """No frame was seen yet."""
        self.delayed, self.jump_us = False, 0.0
        self._lengths: dict[bool, deque[int]] = {False: deque(maxlen=RUNS), True: deque(maxlen=RUNS)}
        self._jumps: deque[float] = deque(maxlen=RUNS)
        self._length, self._due = 0, (0, 0)

    def end(self, delay_us: float) -> bool:
        """Count a frame, by its delay or 0. Whether the run that it is of is likely to end with it: of undelayed ones
        also with one of the next few, since a frame that is late costs more than one that ran a faster path than it had
        to.
        """
        delayed = delay_us > 0
        if delayed:
            self._jumps.append(delay_us)
            self.jump_us = sorted(self._jumps)[len(self._jumps) // 2]
            delayed = self.jump_us / ALIKE_US <= delay_us <= self.jump_us * ALIKE_US
        if delayed == self.delayed:
            self._length += 1
        else:
            self._lengths[self.delayed].append(self._length)
            alone = not delayed and self._length == 1 and self._lengths[False]
            self.delayed, self._length = delayed, self._lengths[False].pop() + 2 if alone else 1
            self._due = self._foreseen(sorted(self._lengths[delayed]), 0.0 if delayed else APART)
        return self._due[0] <= self._length <= self._due[1]

    def _foreseen(self, known, apart):
        """From when to when a run may end: the first span of lengths at which most of those that were as long ended."""
        for at, length in enumerate(known):
            alike = [other for other in known[at:] if other <= length * (1 + apart)]
            if len(alike) >= ALIKE and 2 * len(alike) > len(known) - at:
                return length, alike[-1]
        return 0, 0


@dataclass
class Closed(Controller):
    """One that sees how long frames take.

    A frame is foreseen to take `gain` times the median of its path, and `level_us` more: clocks and hosts change. Both
    follow the frames, by normalised least mean squares. A frame that takes by far longer is delayed, see `JUMP`, and
    the next one is expected to be as late, as is one at which a delay is due, see `Runs`. Besides, each broken promise
    raises all of them, each other one lowers them again, such that a share `target` is broken in the long run whatever
    the times are (Gibbs and Candes, "Adaptive Conformal Inference", 2021). They are never below those of the table for
    the times of now.
    """

    target: float
    gain: float = 1.0
    level_us: float = 0.0
    tail_us: float = 0.0
    delay_us: float = 0.0
    _usual_us: float = field(default=0.0, repr=False)
    _mid_us: float = field(default=0.0, repr=False)
    _calm: int = field(default=0, repr=False)
    _runs: Runs = field(default_factory=Runs, repr=False)

    @property
    def later_us(self) -> float:
        """By how much all paths take longer now, beyond their gain."""
        return self.level_us + self.delay_us

    def promised(self, entry: Entry) -> float:
        """What a path of the table promises now. A delay that is foreseen leaves what else promises lack out."""
        return self.gain * entry.promise_us + self.later_us + (0.0 if self.delay_us else self.tail_us)  # type: ignore[operator]  # rows of a table have promises

    def room(self, budget_us: float) -> float:
        """As `Controller.room`, for promises."""
        return self._left(budget_us - self.later_us - (0.0 if self.delay_us else self.tail_us))

    def _left(self, left_us):
        return max(left_us / self.gain, LEAST_US)

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """As `Controller.saw`."""
        median = entry.p50_us
        if not self._usual_us:
            self._usual_us = max((entry.promise_us - median) / PROMISED, STEADY * median)  # type: ignore[operator]  # rows of a table have promises
            self._mid_us = median
        usual = self._usual_us
        self.tail_us = max(0.0, self.tail_us + STEP * usual * ((measured_us > self.promised(entry)) - self.target))
        over = measured_us - self.gain * median - self.level_us
        self._learn(over, entry, late)
        counted = max(-2 * usual, min(2 * usual, over))
        if delayed := over > JUMP * usual:
            self.delay_us, self._calm = over, 0
            self.level_us += SLOWLY * LEVEL * counted
        else:
            self._calm += 1
            if self._calm >= CALM:
                self.delay_us = 0.0
            self.level_us += LEVEL * counted
            self._mid_us += MID * (median - self._mid_us)
            apart = median - self._mid_us
            moved = self.gain + GAIN * counted * apart / (median**2 + self._mid_us**2)
            self.gain = min(GAINS[1], max(GAINS[0], moved))
            self._usual_us = max(usual + DEVIATION * (min(abs(over), 4 * usual) - usual), STEADY * median)
        if self._runs.end(over if delayed else 0.0):
            self.delay_us = 0.0 if self._runs.delayed else self._runs.jump_us

    def _learn(self, over_us, entry, late):
        """What else a frame teaches."""

    def restart(self) -> None:
        """Forget what was learnt of times, since those of the table are of now."""
        self.gain, self.level_us, self.tail_us, self.delay_us, self._usual_us = 1.0, 0.0, 0.0, 0.0, 0.0
        self._runs = Runs()


@dataclass
class Priced(Closed):
    """One that lets a share `target` of the frames be late, where these give the most: see `Odds`.

    The price of a late frame rises with each one and falls with each other. What frames take beyond what was foreseen
    counts in `odds`, where there are some: these know what was measured lately.
    """

    price: float = PRICE
    odds: Odds | None = field(default=None, repr=False)

    def room(self, budget_us: float) -> float:
        """As `Controller.room`, for `Odds`."""
        return self._left(budget_us - self.later_us)

    def _learn(self, over_us, entry, late):
        moved = self.price * math.exp(DEARER * (late - self.target))
        self.price = min(PRICES[1], max(PRICES[0], moved))
        if self.odds is not None and not self.delay_us:
            self.odds.learn(over_us, entry)

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """As `Controller.saw`."""
        super().saw(measured_us, entry, late=late)
        if self.odds is not None:
            self.odds.most_us = self._runs.jump_us / ALIKE_US if self.delay_us else math.inf

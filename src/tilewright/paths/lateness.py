"""How likely the paths of a table are late, which one pays with that, and what a stream of frames learns of it.

Numbers are microseconds.
"""

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.paths.table import Entry, pooled

# Budgets that a choice is made for ahead, from the fastest call of all to the slowest.
BUDGETS = 2048
# Prices of a late call, in mean IoU: from 2 to the minus so much to 2 to so much, and how many between two powers.
POWER, BETWEEN = 6, 8
# Foreign work on the device delays a frame by as much, whatever its path. The longest delay of so many frames counts,
# until so many in a row kept their promises.
WINDOW, CALM = 12, 4
# A controller multiplies promises by this share more after a late frame, and by this much at most: beyond, it leaves
# that to delays.
STEP, CEILING = 0.02, 1.15
# The price of a late frame at first, in mean IoU, and the share by which a late frame raises it.
PRICE, DEARER = 1.0, 0.2
# How much slower the device is than in the rehearsal moves by this share towards each frame, and is believed between
# these shares, while frames are delayed by less than this share of their promise.
FOLLOW, PACES, ALARM = 0.002, (0.7, 1.5), 0.05
# Microseconds that are left where a delay takes all of a budget: no path is that fast.
LEAST_US = 1e-3


class Odds:
    """The path that a budget pays best: the highest mean IoU less the price of a late call times how likely it is late.

    That is a Lagrangian of the most accuracy at a share of late calls: one price for all budgets takes the risk of a
    late call where it gives the most. A promise, which each call keeps as likely, takes it wherever it is met.
    """

    def __init__(
        self, entries: Sequence[Entry], samples_us: Mapping[str, Any], key: Callable = operator.attrgetter("path")
    ):
        """entries: with their mean IoU on scenes of ``choice``. samples_us: of calls of each, by its `key`, in random
        order."""
        self.entries = list(entries)
        samples = pooled({key(entry): samples_us[key(entry)] for entry in self.entries})
        times = np.array([np.sort(samples[key(entry)]) for entry in self.entries])
        self.budgets_us = np.linspace(times.min(), times.max(), BUDGETS)
        # float64 [entries, budgets]
        self.late = np.array([1 - np.searchsorted(each, self.budgets_us, side="right") / len(each) for each in times])
        scores = np.array([entry.choice for entry in self.entries])[:, None]
        prices = 2.0 ** (np.arange(-POWER * BETWEEN, POWER * BETWEEN + 1) / BETWEEN)
        # As bytes, which are read in less than an array: a choice is on the way of each call.
        self._chosen = [(scores - price * self.late).argmax(0).astype(np.uint8).tobytes() for price in prices]
        self._least, self._most = float(self.budgets_us[0]), float(self.budgets_us[-1])
        self._per_us = (BUDGETS - 1) / max(self._most - self._least, 1e-9)

    def pick(self, budget_us: float, price: float) -> Entry | None:
        """The entry for a budget in microseconds at a price above 0; None where each path is late for certain."""
        if not budget_us >= self._least:
            return None
        level = round(math.log2(price) * BETWEEN) + POWER * BETWEEN
        chosen = self._chosen[min(max(level, 0), 2 * POWER * BETWEEN)]
        # The last budget holds the slowest call of all, which rounding must not take from it.
        at = BUDGETS - 1 if budget_us >= self._most else int((budget_us - self._least) * self._per_us)
        return self.entries[chosen[at]]


class Controller:
    """What budgets leave for a frame. This one is open: it learns nothing, and takes them as they are.

    price: what a late frame costs, see `runner.Picker.pick`; None where promises are kept instead.
    """

    price: float | None = None

    def room(self, budget_us: float) -> float:
        """Microseconds of a budget that promises may take."""
        return budget_us

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """Take in a frame's time, what ran, and whether it was late."""


@dataclass
class Closed(Controller):
    """One that sees how late frames are.

    A frame that takes longer than its path promises is delayed; what comes next is expected to be delayed by as much,
    see `WINDOW`. Besides, each late frame raises what promises are multiplied with, `pace`, each other one lowers it,
    such that a share `target` is late in the long run whatever the times are (Gibbs and Candes, "Adaptive Conformal
    Inference", 2021), if `CEILING` is enough. It is never below 1: promises are kept.
    """

    target: float
    pace: float = 1.0
    _over: deque = field(default_factory=lambda: deque([0.0], WINDOW), repr=False)
    _kept: int = field(default=0, repr=False)

    @property
    def delay_us(self) -> float:
        """By how much frames are delayed now, in microseconds."""
        return max(self._over)

    def room(self, budget_us: float) -> float:
        """As `Controller.room`: what a delay leaves, by the pace."""
        return max((budget_us - self.delay_us) / self.pace, LEAST_US)

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """As `Controller.saw`."""
        self._move(measured_us, entry, late)
        over = measured_us - self.pace * entry.promise_us  # type: ignore[operator]  # rows of a table have promises
        self._kept = self._kept + 1 if over <= 0 else 0
        if self._kept >= CALM:
            self._over.clear()
        self._over.append(max(over, 0.0))

    def _move(self, measured_us, entry, late):
        self.pace = min(CEILING, max(1.0, self.pace + STEP * (late - self.target)))


@dataclass
class Priced(Closed):
    """One that lets a share `target` of the frames be late, where these give the most: see `Odds`.

    The price of a late frame rises with each one and falls with each other, as the pace of `Closed` does. The pace is
    how much slower the device is than in the rehearsal: it follows the medians.
    """

    price: float = PRICE

    def _move(self, measured_us, entry, late):
        moved = self.price * math.exp(DEARER * (late - self.target))
        self.price = min(2.0**POWER, max(2.0**-POWER, moved))
        if self.delay_us <= ALARM * entry.promise_us:
            moved = self.pace * (1 + FOLLOW if measured_us > self.pace * entry.p50_us else 1 - FOLLOW)
            self.pace = min(PACES[1], max(PACES[0], moved))

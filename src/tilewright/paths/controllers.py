"""Controllers of a stream of frames, each with a budget: what a budget leaves where frames are delayed or slow.

Numbers are microseconds.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from tilewright.paths.odds import POWER
from tilewright.paths.table import Entry

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
    """One that lets a share `target` of the frames be late, where these give the most: see `odds.Odds`.

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

"""How likely the paths of a table are late, and which one pays with that."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.paths.table import Entry, pooled

# Budgets that a choice is made for ahead, from the fastest call of all to the slowest.
BUDGETS = 2048
# Prices of a late call, in mean IoU: from 2 to the minus so much to 2 to so much, and how many between two powers.
POWER, BETWEEN = 6, 8


class Odds:
    """The path that a budget pays best: the highest mean IoU less the price of a late call times how likely it is late.

    That is a Lagrangian of the most accuracy at a share of late calls: one price for all budgets takes the risk of a
    late call where it gives the most. A promise, which each call keeps as likely, takes it wherever it is met.
    """

    def __init__(self, entries: Sequence[Entry], samples_us: Mapping[str, Any]):
        """entries: with their mean IoU on scenes of ``choice``. samples_us: of calls of each, by its text, in random
        order."""
        self.entries = list(entries)
        samples = pooled({entry.path: samples_us[entry.path] for entry in self.entries})
        times = np.array([np.sort(samples[entry.path]) for entry in self.entries])
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

"""All sets of blocks of a base, listed: which of them loses least where a budget of time is met.

What `program` asks of a solver is asked here of 65,536 sets at once where a base has 16 blocks, in a millisecond.
"""

from functools import lru_cache

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright_study.planning import block_sets
from tilewright_study.planning.accuracy import Losses
from tilewright_study.planning.latency import Latency

# Sets whose losses are summed at once.
AT_ONCE = 1 << 16


class Sets:
    """The sets of blocks of a base, those of few skips first, then the earliest text.

    skips: bool [sets, blocks]. saved_us, loss: float64 [sets], as `latency` and `losses` predict them. Raises
    `ConfigError` beyond `block_sets.MOST_BLOCKS` blocks.
    """

    def __init__(self, latency: Latency, losses: Losses):
        count = len(latency.saved_us)
        if count > block_sets.MOST_BLOCKS:
            most = block_sets.MOST_BLOCKS
            raise ConfigError(f"exhaustive: expected at most {most} blocks, found {count}; highs takes more")
        self.skips = _every(count)
        self.saved_us, self.loss = np.empty(len(self.skips)), np.empty(len(self.skips))
        # Some sets after the other: all of 20 blocks at once would take gigabytes.
        for lo in range(0, len(self.skips), AT_ONCE):
            part = slice(lo, lo + AT_ONCE)
            self.saved_us[part] = self.skips[part] @ latency.saved_us
            self.loss[part] = losses.loss(self.skips[part])

    def least(self, need_us: float, *, same: float = 0.0) -> np.ndarray | None:
        """The skips, bool [blocks], that lose least of the sets that save `need_us`, or None where none does.

        same: a set that loses as little more is taken where it comes first.
        """
        places = np.flatnonzero(self.saved_us >= need_us)
        if not len(places):
            return None
        loss = self.loss[places]
        return self.skips[places[np.argmax(loss <= loss.min() + same)]]


@lru_cache(maxsize=1)
def _every(count):
    """The skips of all sets of so many blocks, in order, bool [sets, blocks]. Not to be written to: the next base has
    them."""
    # A 0 comes before a 1 in a path's text, where the first block stands first.
    skips = (np.arange(1 << count)[:, None] >> np.arange(count)[::-1] & 1) == 0
    found = skips[np.argsort(skips.sum(1), kind="stable")]
    found.flags.writeable = False
    return found

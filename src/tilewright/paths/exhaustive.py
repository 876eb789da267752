"""All sets of blocks of a base, listed: which of them loses least where a budget of time is met.

What `program` asks of a solver is asked here of 65,536 sets at once where a base has 16 blocks, in a millisecond.
"""

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.paths import space
from tilewright.paths.accuracy import Losses
from tilewright.paths.latency import Latency


class Sets:
    """The sets of blocks of a base, those of few skips first, then the earliest text.

    skips: bool [sets, blocks]. saved_us, loss: float64 [sets], as `latency` and `losses` predict them. Raises
    `ConfigError` beyond `space.MOST_BLOCKS` blocks.
    """

    def __init__(self, latency: Latency, losses: Losses):
        self.latency, self.losses = latency, losses
        count = len(latency.saved_us)
        if count > space.MOST_BLOCKS:
            most = space.MOST_BLOCKS
            raise ConfigError(f"exhaustive: expected at most {most} blocks, found {count}; highs takes more")
        # A 0 comes before a 1 in a path's text, where the first block stands first.
        places = np.arange(count)[::-1]
        skips = (np.arange(1 << count)[:, None] >> places & 1) == 0
        order = np.argsort(skips.sum(1), kind="stable")
        self.skips = skips[order]
        # A number for each set, of its 0s and 1s, and where it stands.
        self._bits, self._at = 1 << places, np.argsort(order)
        self.saved_us = self.skips @ latency.saved_us
        self.loss = self.skips @ losses.single
        # One pair after the other: all of 20 blocks at once would take gigabytes.
        for (i, j), loss in zip(losses.pairs, losses.pair, strict=True):
            self.loss += loss * (self.skips[:, i] & self.skips[:, j])

    def least(self, need_us: float, without=(), *, same: float = 0.0):
        """The skips, bool [blocks], that lose least of the sets that save `need_us`, or None where none does.

        without: skips that do not count. same: a set that loses as little more is taken where it comes first.
        """
        meets = self.saved_us >= need_us
        for cut in without:
            meets[self._at[self._bits @ ~np.asarray(cut, dtype=bool)]] = False
        places = np.flatnonzero(meets)
        if not len(places):
            return None
        loss = self.loss[places]
        return self.skips[places[np.argmax(loss <= loss.min() + same)]]

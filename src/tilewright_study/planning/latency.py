"""How long a path of a base takes, from what each block saves where it is left out: a linear model.

``T(p) = T_base - sum delta_i d_i``, with d the skips. The deltas are fitted to measured paths, all timed in turns:
blocks that are left out together save less than each of them alone, since what comes behind waits less for them.
No set of skips saves all of a base's time, however noisy few short calls are.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright_study.planning import block_sets

# Of the row that bounds what all blocks save together, beside rows of relative errors.
WEIGHT = 1e4


@dataclass(frozen=True)
class Latency:
    """Microseconds of a base, and what skipping each of its blocks saves, float64 [blocks of `block_sets.free`]."""

    base: Path
    base_us: float
    saved_us: np.ndarray

    def predict(self, path: Path) -> float:
        """Predicted microseconds of a path of the base."""
        return self.base_us - float(self.saved_us @ block_sets.skips(path))


def model(base: Path, times_us: dict[Path, float]) -> Latency:
    """The `Latency` of a base from the times of itself, of its single skips and of any other paths of it.

    Least squares of relative errors, through the base's own time. With single skips alone each saves what it was
    measured to save, unless they save nearly all of it together: then least squares among savings that do not. Raises
    `ConfigError` where one of these is missing.
    """
    missing = [str(path) for path in (base, *block_sets.singles(base)) if path not in times_us]
    if missing:
        raise ConfigError(f"latency: expected times of the base and each single skip, found none of {missing[0]}")
    base_us = times_us[base]
    others = [path for path in times_us if path != base]
    us = np.array([times_us[path] for path in others])
    skips = np.array([block_sets.skips(path) for path in others], dtype=np.float64)
    rows, errors = skips / us[:, None], (base_us - us) / us
    saved_us, *_ = np.linalg.lstsq(rows, errors, rcond=None)
    # ASSUME: what every path runs takes no less than the mean of the blocks that a path runs.
    most_us = base_us - min(base_us / (1 + skips.shape[1]), *(us / (1 + (skips == 0).sum(1))))
    if saved_us.clip(min=0).sum() > most_us:
        # A column more takes what is left of the bound.
        bounded = np.vstack((np.pad(rows, ((0, 0), (0, 1))), np.full(skips.shape[1] + 1, WEIGHT / most_us)))
        saved_us = nnls(bounded, np.append(errors, WEIGHT))[0][:-1]
        saved_us *= most_us / max(most_us, saved_us.sum())
    return Latency(base, base_us, saved_us)

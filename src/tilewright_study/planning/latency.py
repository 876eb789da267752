"""How long a path of a base takes, from what each block saves where it is left out: a linear model.

``T(p) = T_base - sum delta_i d_i``, with d the skips. The deltas are fitted to measured paths, all timed in turns:
blocks that are left out together save less than each of them alone, since what comes behind waits less for them.
"""

from dataclasses import dataclass

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright_study.planning import block_sets


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
    measured to save. Raises `ConfigError` where one of these is missing.
    """
    missing = [str(path) for path in (base, *block_sets.singles(base)) if path not in times_us]
    if missing:
        raise ConfigError(f"latency: expected times of the base and each single skip, found none of {missing[0]}")
    base_us = times_us[base]
    others = [path for path in times_us if path != base]
    us = np.array([times_us[path] for path in others])
    skips = np.array([block_sets.skips(path) for path in others], dtype=np.float64)
    saved_us, *_ = np.linalg.lstsq(skips / us[:, None], (base_us - us) / us, rcond=None)
    return Latency(base, base_us, saved_us)

"""How long a path of a base takes, from what leaving out each block saves: an additive model.

``T(p) = T_base - sum delta_i d_i``, with delta_i the time of the base less that of the base without block i, measured
in turns.
"""

from dataclasses import dataclass

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.paths import Path, space


@dataclass(frozen=True)
class Latency:
    """Microseconds of a base, and what skipping each of its blocks saves, float64 [blocks of `space.free`]."""

    base: Path
    base_us: float
    saved_us: np.ndarray

    def predict(self, path: Path) -> float:
        """Predicted microseconds of a path of the base."""
        return self.base_us - float(self.saved_us @ space.skips(path))


def model(base: Path, times_us: dict[Path, float]) -> Latency:
    """The `Latency` of a base from the times of itself and of its single skips. Raises `ConfigError` without them."""
    singles = space.singles(base)
    missing = [str(path) for path in (base, *singles) if path not in times_us]
    if missing:
        raise ConfigError(f"latency: expected times of the base and each single skip, found none of {missing[0]}")
    base_us = times_us[base]
    return Latency(base, base_us, np.array([base_us - times_us[path] for path in singles]))

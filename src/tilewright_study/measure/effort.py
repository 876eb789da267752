"""How long to measure: what all timed experiments share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """A timing stops at the relative standard error `rse`, after `min_repetitions`, or after `max_seconds`."""

    rse: float = 0.02
    min_repetitions: int = 10
    max_seconds: float = 1.0

    @property
    def limits(self):
        """The same by the names that the functions of `tilewright.core.timing` know."""
        return {"min_reps": self.min_repetitions, "max_seconds": self.max_seconds, "rse_target": self.rse}


@dataclass(frozen=True)
class Run:
    """What every case of a study is run with: the kind of device, the type of the tokens, the seed, and when a timing
    is good enough."""

    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    rse: float = 0.02
    min_repetitions: int = 10

    def effort(self, max_seconds):
        """The `Effort` of timings that end after `max_seconds`."""
        return Effort(self.rse, self.min_repetitions, max_seconds)

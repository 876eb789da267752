"""How many promises a runner made and kept, by path and hour: a count in each call, and a small file for services."""

import json
import logging
import math
from datetime import UTC, datetime
from pathlib import Path
from time import time

from tilewright.core import arguments, artifacts
from tilewright.paths.table import BROKEN as SHARE

_LOG = logging.getLogger(__name__)
KIND, VERSION = "promises", 1
# A path that breaks more than its share by chance alone gives a warning in fewer hours than one of so many.
CHANCE = 10_000
# Hours that are kept.
HOURS = 48
HOUR = 3600


class Record:
    """Promises by path and hour.

    Parameters
    ----------
    warns : bool
        Whether broken promises give warnings.

    Attributes
    ----------
    frames, short, unseen : int
        Frames in all, those whose budget was below every promise, and those whose class maps stayed on a GPU: when
        these were there is not known.
    hours : dict
        ``{hour: {path: [made, kept]}}``, hours since 1970.
    warnings : list of str
        What was warned of, the latest last.
    """

    def __init__(self, *, warns: bool = True):
        """Nothing was promised yet."""
        self._warns = warns
        self.frames = self.short = self.unseen = 0
        self.hours: dict[int, dict[str, list[int]]] = {}
        self.warnings: list[str] = []
        self._warned: set = set()
        self._hour = -1
        self._now: dict[str, list[int]] = {}

    def saw(self, key: str, promised_us: float, took_us: float | None, *, short: bool = False) -> None:
        """Count a frame: by what `key` ran, and how long it took, None where that is not known."""
        self.frames += 1
        if short:
            self.short += 1
        if took_us is None:
            self.unseen += 1
            return
        if (hour := int(time()) // HOUR) != self._hour:
            self._begin(hour)
        counts = self._now.get(key) or self._now.setdefault(key, [0, 0])
        counts[0] += 1
        if took_us <= promised_us:
            counts[1] += 1
        elif self._warns and (hour, key) not in self._warned:
            self._look(key, *counts)

    def _begin(self, hour):
        self._hour, self._now = hour, self.hours.setdefault(hour, {})
        for old in [one for one in self.hours if one <= hour - HOURS]:
            del self.hours[old]
        self._warned = {one for one in self._warned if one[0] in self.hours}

    def _look(self, key, made, kept):
        """Warn where a path broke so many promises that its share and chance do not explain it (Chernoff's bound)."""
        broken = (made - kept) / made
        if broken <= SHARE:
            return
        kept_part = (1 - broken) * math.log((1 - broken) / (1 - SHARE)) if broken < 1 else 0.0
        if made * (broken * math.log(broken / SHARE) + kept_part) > math.log(CHANCE):
            self._warned.add((self._hour, key))
            text = f"{key}: {made - kept} of {made} calls broke their promise this hour; expected at most {SHARE:.0%}, "
            text += f"found {broken:.1%}; remeasure in idle time, or a margin, makes promises that hold"
            self.warnings = [*self.warnings[1 - HOURS :], text]
            _LOG.warning("%s", text)

    @property
    def promised(self) -> int:
        """Promises that were made, in the hours that are kept."""
        return sum(made for paths in self.hours.values() for made, _ in paths.values())

    @property
    def kept(self) -> int:
        """Promises that were kept."""
        return sum(kept for paths in self.hours.values() for _, kept in paths.values())

    def write(self, path: str | Path) -> None:
        """Write the counts as JSON, whole or not at all, for a service that reads the file now and then.

        Parameters
        ----------
        path : str or Path
            The file.

        Raises
        ------
        ConfigError, ArtifactError
            For what is no path, and for one that cannot be written.
        """
        rows = [
            {"hour": datetime.fromtimestamp(hour * HOUR, UTC).isoformat(), "path": key, "made": made, "kept": kept}
            for hour, paths in self.hours.items()
            for key, (made, kept) in list(paths.items())
        ]
        told = {"kind": KIND, "version": VERSION, "frames": self.frames, "short": self.short, "unseen": self.unseen}
        told |= {"promised": self.promised, "kept": self.kept, "warnings": self.warnings, "hours": rows}
        artifacts.write_text(arguments.path("path", path), json.dumps(told, indent=1) + "\n")

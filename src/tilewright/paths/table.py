"""The look-up table of a network: paths that were measured, the best by time and accuracy, and a choice by budget.

A table is a CSV of `Entry` rows. It holds all that was measured; those that a `Runner` picks from are the ones that no
other one dominates, at most `MOST` of a network.
"""

import bisect
import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tilewright.core import arguments, artifacts
from tilewright.core.errors import ArtifactError, BudgetError, ConfigError
from tilewright.paths import PARTS

KIND, VERSION, WHAT = "paths", 1, "path table"
# Rows that a runner picks from, at most, of each network.
MOST = 16
# What a budget below every promise may ask for: an error, or the fastest path.
LATE = ("error", "fastest")
# Calls of a path that its promise needs; which share of calls may break it; how likely chance makes it too short.
SAMPLES, BROKEN, UNSURE = 1000, 0.01, 0.05
# ASSUME: two paths with the same maps but for rounding, such as those with the published and the folded decoder, differ
# in mean IoU by less; 1e-4 was seen in bfloat16.
ROUNDING = 5e-4


# Numbers of a row that are chosen by, and the largest of them.
_NUMBERS = {
    **dict.fromkeys(("p50_us", "p99_us", "promise_us", *PARTS), sys.float_info.max),
    **dict.fromkeys(("fit", "choice", "test", "novel"), 1.0),
}


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A path that was measured.

    network, checkpoint: name, and the first 12 digits of the SHA-256 of the file of weights, blank for random ones.
    path: its text. rung: ``trained``, as the weights are, or ``statistics``, with the batch norm's own of the path.
    batch, device, dtype: of the calls. compiled: whether torch compiled their parts, see `calls.Calls`. macs:
    multiplications of an image. p50_us: microseconds of a call among
    those of other paths. p99_us, promise_us: of calls as a stream makes them, until the maps are there, see `promised`;
    blank where none were made. fit, choice, test, novel: mean IoU on scenes of these splits, blank where not measured.
    predicted_us, predicted: of the planner. proposed: what proposed it. energy: of a cost model, over the full path's.
    dominated: text of a path that is no slower and sees as much, blank for none. frame: height and width of the uint8
    frames that a call takes to give their class maps, such as ``480x640``, see `frames`; blank for one that takes
    images and gives maps. copy_in_us to copy_out_us: medians of the parts of such a call.
    """

    network: str
    checkpoint: str
    path: str
    rung: str
    batch: int
    device: str
    dtype: str
    macs: int
    p50_us: float
    p99_us: float | None = None
    promise_us: float | None = None
    fit: float | None = None
    choice: float | None = None
    test: float | None = None
    novel: float | None = None
    predicted_us: float | None = None
    predicted: float | None = None
    proposed: str = ""
    energy: float | None = None
    dominated: str = ""
    compiled: bool = False
    frame: str = ""
    copy_in_us: float | None = None
    before_us: float | None = None
    network_us: float | None = None
    after_us: float | None = None
    copy_out_us: float | None = None


def checked_budget(budget_us: Any) -> float:
    """A budget in microseconds. Raises `BudgetError` for what is no positive number."""
    # Of each frame.
    if type(budget_us) is float and 0 < budget_us < math.inf:
        return budget_us
    found = arguments.real(budget_us)
    if found is None or found <= 0:
        raise BudgetError(f"budget: expected microseconds above 0, found {arguments.shown(budget_us)}")
    return found


def promised(samples_us: Sequence[float] | np.ndarray) -> float:
    """The promise of samples in microseconds: with 95 % confidence no less than the true 99th percentile.

    It is the 996th of 1,000 ordered ones, and the slowest of fewer than 299.
    """
    if not len(samples_us):
        raise ConfigError("promise: expected latencies in microseconds, found none")
    return float(np.sort(samples_us)[_rank(len(samples_us)) - 1])


@cache
def _rank(count):
    """The first rank r of `count` samples with P(Binomial(count, 1 - `BROKEN`) >= r) < `UNSURE`, or the last."""
    slower, likely = 0, 0.0
    while True:
        ways = math.lgamma(count + 1) - math.lgamma(slower + 1) - math.lgamma(count - slower + 1)
        likely += math.exp(ways + slower * math.log(BROKEN) + (count - slower) * math.log1p(-BROKEN))
        if likely >= UNSURE:
            return count - max(slower - 1, 0)
        slower += 1


def promises(samples_us: Mapping[str, Any]) -> dict[str, float]:
    """The promise of each path, microseconds, from samples that were taken in random order, see `pooled`."""
    return {text: promised(samples) for text, samples in pooled(samples_us).items()}


def pooled(samples_us: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """``{text: float64}`` microseconds: how long calls of each path may take.

    With `SAMPLES` of each they are its own. The tail of fewer is the slowest one or two: whichever path the host was
    busy beside would look slow. Then each path has its median and what all of them together took beyond theirs, see
    `scales`. ASSUME: what delays a call does not ask for its path.
    """
    found = {text: np.asarray(samples, dtype=np.float64) for text, samples in samples_us.items()}
    if all(len(samples) >= SAMPLES for samples in found.values()):
        return found
    scale, medians = scales(found), {text: float(np.median(samples)) for text, samples in found.items()}
    over = np.concatenate([(samples - medians[text]) / scale[text] for text, samples in found.items()])
    return {text: medians[text] + scale[text] * over for text in found}


def scales(samples_us: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What times of each path differ from its median in: 1, or its median over the mean one.

    A GPU's calls wait for the host, by as much whichever path they run. A host that is shared makes calls longer by a
    share. What leaves the deviations of paths more alike is taken.
    """
    medians = np.array([np.median(samples) for samples in samples_us.values()])
    usual = np.array([np.abs(samples - np.median(samples)).mean() for samples in samples_us.values()])
    shares = medians / medians.mean()
    relative = usual / shares
    by_share = np.std(relative) * np.mean(usual) <= np.std(usual) * np.mean(relative)
    return dict(zip(samples_us, shares.tolist() if by_share else [1.0] * len(medians), strict=True))


def marked(entries: Sequence[Entry], *, gain: float = ROUNDING) -> list[Entry]:
    """`entries` with `dominated` set: by promised time and accuracy on the scenes of ``choice``.

    gain: mean IoU beyond that of every faster path that a slower one needs. Of two that are equal, the second is
    dominated by the first.
    """
    best, over = None, {}
    for place in sorted(range(len(entries)), key=lambda at: (entries[at].promise_us, -_known(entries[at]))):
        if best is not None and _known(entries[place]) <= _known(best) + gain:
            over[place] = best.path
        else:
            best = entries[place]
    return [msgspec.structs.replace(entry, dominated=over.get(place, "")) for place, entry in enumerate(entries)]


def _known(entry):
    return -math.inf if entry.choice is None else entry.choice


class Table:
    """The paths of a network that a `Runner` may choose, from the fastest to the most accurate.

    Parameters
    ----------
    entries : sequence of Entry
        Measured paths of one network, size, device and type.
    least : float
        Smallest accuracy of a path, as a share of the best one's.
    joint : bool
        Whether entries may be of several networks, of which one call picks a path.

    Attributes
    ----------
    rows : tuple of Entry
        Paths of ascending promised latency and accuracy. The promised latency of a path is the one that 99 % of its
        calls keep.

    Raises
    ------
    ConfigError
        For entries of several networks or devices, and if none has a promised latency.
    """

    def __init__(self, entries: Sequence[Entry], *, least: float = 0.0, joint: bool = False):
        """The front of those of `entries` that have a promise, all of one network and checkpoint unless `joint`, of one
        rung, device, dtype, batch and frame, and all or none of them compiled.

        least: share of the best mean IoU on the scenes of ``choice`` that a path needs: one that hardly sees anything
        is no answer to a short budget. Paths whose mean IoU was not measured are kept.

        Raises `ConfigError` for others, or none.
        """
        given, least = arguments.each(entries), arguments.number("least", least)
        if given is None or not all(isinstance(entry, Entry) for entry in given):
            raise ConfigError(f"path table: expected entries, found {arguments.shown(entries)}")
        entries = [entry for entry in given if entry.promise_us is not None]
        best = max((entry.choice for entry in entries if entry.choice is not None), default=0.0)
        entries = [entry for entry in entries if entry.choice is None or entry.choice >= least * best]
        if not entries:
            raise ConfigError("path table: expected at least one path with a promise, found none")
        self.joint = arguments.flag("joint", joint)
        own = () if joint else ("network", "checkpoint")
        for field in (*own, "rung", "device", "dtype", "batch", "compiled", "frame"):
            values = sorted({str(getattr(entry, field)) for entry in entries})
            if len(values) > 1:
                raise ConfigError(f"path table: expected paths of one {field}, found {', '.join(values)}")
        front = sorted((entry for entry in marked(entries) if not entry.dominated), key=lambda x: x.promise_us)  # type: ignore[arg-type, return-value]  # rows of a table have promises
        # A joint one loses nothing that a table of each of its networks keeps.
        self.rows = _thinned(front, MOST * len({(entry.network, entry.checkpoint) for entry in entries}))
        self._promises = [entry.promise_us for entry in self.rows]

    def key(self, entry: Entry) -> str:
        """What a row is called by: its path, in a joint table behind the network's name and its checkpoint."""
        return " ".join(filter(None, (entry.network, entry.checkpoint, entry.path))) if self.joint else entry.path

    def state_parts(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        """Let rows state the parts of their times, ``{key: {column: microseconds}}``."""
        self.rows = [msgspec.structs.replace(entry, **parts.get(self.key(entry), {})) for entry in self.rows]

    def select(self, budget_us: float, *, late: str = "error") -> Entry:
        """The most accurate path whose promised latency fits a budget.

        Parameters
        ----------
        budget_us : float
            Time budget in microseconds.
        late : str
            If no path fits: ``error``, or ``fastest`` for the fastest path.

        Returns
        -------
        Entry

        Raises
        ------
        BudgetError
            For a budget that is no positive number, and for a budget below every promised latency with
            ``late="error"``.
        """
        budget_us = checked_budget(budget_us)
        at = bisect.bisect_right(self._promises, budget_us) - 1
        if at < 0:
            if late == "fastest":
                return self.rows[0]
            if late not in LATE:
                raise ConfigError(f"late: expected one of {', '.join(LATE)}, found {late!r}")
            raise BudgetError(
                f"budget: expected at least {self._promises[0]:.0f} us, which the fastest path promises, found "
                f'{budget_us:.0f} us; late="fastest" runs that path all the same'
            )
        return self.rows[at]

    def check(self, **asked: Any) -> None:
        """Raise `ConfigError` unless each field of `Entry` that is stated has this value, e.g. ``dtype="bfloat16"``."""
        for field, value in asked.items():
            if (found := getattr(self.rows[0], field)) != value:
                raise ConfigError(f"path table: expected one of {field} {value}, found {found}")


def _thinned(front, most):
    """At most `most` of a front, its ends among them: of all neighbours the nearest in time lose one each time."""
    kept = list(front)
    while len(kept) > most:
        spans = [kept[at + 1].promise_us / kept[at - 1].promise_us for at in range(1, len(kept) - 1)]
        del kept[1 + spans.index(min(spans))]
    return kept


def write(path: str | Path, entries: Sequence[Entry]) -> None:
    """Write `entries` as CSV, whole or not at all."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("kind", "version", *Entry.__struct_fields__))
    for entry in entries:
        values = msgspec.structs.astuple(entry)
        writer.writerow((KIND, VERSION, *("" if value is None else value for value in values)))
    artifacts.write_text(path, stream.getvalue())


def read(path: str | Path) -> list[Entry]:
    """The entries of a file: of `write`, or of the study's experiment, whose rows hold these columns among others.

    Rows of the study that have no time, since they failed, were skipped or served models alone, are left out. Raises
    `ArtifactError`.
    """
    path = arguments.path("path", path)
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a {WHAT}") from None
    except (OSError, ValueError, csv.Error) as error:
        raise ArtifactError(f"{path}: expected a {WHAT}, found a damaged file: {error}") from error
    found = []
    for number, row in enumerate(rows, 2):
        if (row.get("kind"), row.get("version")) != (KIND, str(VERSION)):
            raise ArtifactError(
                f"{path}: expected a {WHAT}: rows of kind {KIND}, version {VERSION}, found another at line {number}"
            )
        # Blank ones count as missing, but random weights have no checkpoint.
        stated = {"checkpoint": "", **{name: row[name] for name in Entry.__struct_fields__ if row.get(name)}}
        if "status" in row and (row["status"] != "ok" or not row["p50_us"]):
            continue
        try:
            found.append(msgspec.convert(stated, Entry, strict=False))
        except msgspec.ValidationError as error:
            raise ArtifactError(f"{path}: line {number} is no row of a {WHAT}: {error}") from None
        for name, most in _NUMBERS.items():
            value = getattr(found[-1], name)
            if value is not None and not 0 <= value <= most:
                raise ArtifactError(
                    f"{path}: line {number} is no row of a {WHAT}: expected {name} from 0 to {most:g}, found {value}"
                )
    if not found:
        raise ArtifactError(f"{path}: expected a {WHAT}, found no measured path")
    if len(cases := {row.get("case", "") for row in rows}) > 1:
        raise ArtifactError(f"{path}: expected a {WHAT} of one case, found {', '.join(sorted(cases))}")
    return found


def load(path: str | Path, *, least: float = 0.0, rung: str = "trained", joint: bool = False) -> Table:
    """Read the table of the paths of a file.

    Parameters
    ----------
    path : str or Path
        A CSV that the experiment `paths` or `write` wrote.
    least : float
        Paths whose accuracy is below this share of the best one are left out.
    rung : str
        ``trained`` or ``statistics``: with which statistics of batch norm paths were measured.
    joint : bool
        Whether paths may be of several networks, see `Table`.

    Returns
    -------
    Table

    Raises
    ------
    ArtifactError, ConfigError
        For a file that is no table, and for arguments out of range.
    """
    return Table([entry for entry in read(path) if entry.rung == rung], least=least, joint=joint)

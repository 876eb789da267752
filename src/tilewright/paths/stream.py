"""Frames that come one after the other, each with a budget: traces, who meets them, and a controller for slow times.

Numbers are microseconds. A contender is told a frame's budget and names what it runs; the frame's time is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.paths.table import Table

TRACES = ("uniform", "steps", "contended")
# Frames a second of the trace `steps`, for a third of the frames each.
RATES = (30, 60, 120)
# A slowdown that was seen counts for this share of itself at the next frame: one of a single frame, and one that
# another frame within so many confirmed.
FORGET, DECAY, CONFIRM = 0.6, 0.98, 4
# A controller moves by this share of a promise where a frame was late, and by so many times as much on the way to the
# first late one; it goes no further below promises than to the first of these shares of them, which are the medians
# where a busy host delays some calls by as much again, and no further above than to the second: beyond, it leaves that
# to others while the device is this much slower than promised.
STEP, HASTE, FLOOR, CEILING, ALARM = 0.02, 10, 0.5, 1.15, 1.05
# The budget under a load, in slowest promises; frames of a burst of it, and quiet ones before.
ROOM = 1.1
BURST, PAUSE = 24, 40


@dataclass
class Controller:
    """How much slower the device runs now than the table promises: a decaying maximum of measured over promised times.

    It is at least 1. A promise is not kept by some calls in a thousand on a quiet device, too: one slow frame is soon
    forgotten, unless another one follows it. closed: whether it looks at all; an open one always says 1.

    target: share of frames that may be late. Each late frame raises what promises are multiplied with, each other one
    lowers it, such that the share comes out in the long run whatever the times are (Gibbs and Candes, "Adaptive
    Conformal Inference", 2021), if `CEILING` is enough. floor: the least that they are multiplied with. Below 1 a path
    is picked whose promise a budget does not hold: promises are of the slowest few calls, and most budgets leave room
    beside them. How much is not known at first: until the first late frame it falls `HASTE` times as fast.
    """

    closed: bool = True
    target: float = 0.0
    floor: float = 1.0
    slowdown: float = 1.0
    _share: float = field(default=1.0, repr=False)
    _haste: float = field(default=HASTE, repr=False)
    _decay: float = field(default=FORGET, repr=False)
    _since: int = field(default=CONFIRM + 1, repr=False)

    @property
    def factor(self) -> float:
        """What promises are multiplied with: 1 or more, or less where `floor` is."""
        if self.floor < 1 and self.slowdown <= ALARM:
            return self._share
        return max(self._share, self.slowdown)

    def saw(self, measured_us: float, promised_us: float, *, late: bool = False) -> None:
        """Take in a frame's time, what its path promises, and whether it was late."""
        if not self.closed:
            return
        if self.target > 0:
            self._haste = 1 if late else self._haste
            moved = self._share + self._haste * STEP * (late - self.target)
            self._share = min(CEILING, max(self.floor, moved))
        ratio = measured_us / promised_us
        if ratio > 1:
            if self._since <= CONFIRM:
                self._decay = DECAY
            elif ratio >= self.slowdown:
                self._decay = FORGET
        self._since = 0 if ratio > 1 else self._since + 1
        self.slowdown = max(1.0, 1.0 + (self.slowdown - 1.0) * self._decay, ratio)


@dataclass(frozen=True)
class Trace:
    """Frames of a stream. budgets_us: float64 [frames]. period_us: of frames that come at a rate, float64 [frames], 0
    for those that come as the one before is done. loaded: bool [frames], whether a foreign load is on the device."""

    name: str
    budgets_us: np.ndarray
    period_us: np.ndarray
    loaded: np.ndarray

    def __len__(self):
        return len(self.budgets_us)


def trace(name: str, table: Table, frames: int, *, seed: int = 0) -> Trace:
    """A trace of `TRACES` for the paths of a table.

    ``uniform``: each budget drawn between the fastest promise and 1.2 of the slowest one. ``steps``: 30, 60 and 120
    frames a second where the fastest path meets them, else those rates divided alike; a budget is the period. Where the
    slowest path meets all of them, rates are multiplied, but no period is shorter than what the fastest path can meet.
    ``contended``: a constant budget, `ROOM` times the slowest promise, under bursts of a foreign load.

    Raises `ConfigError` for an unknown name, or no frame.
    """
    if name not in TRACES:
        raise ConfigError(f"trace: unknown {name!r}; known: {', '.join(TRACES)}")
    if frames < 1:
        raise ConfigError(f"trace: expected at least one frame, found {frames}")
    fastest, slowest = table.rows[0].promise_us, table.rows[-1].promise_us
    none, quiet = np.zeros(frames), np.zeros(frames, dtype=bool)
    if name == "uniform":
        drawn = np.random.default_rng(seed).uniform(fastest, max(1.2 * slowest, fastest), frames)
        return Trace(name, drawn, none, quiet)
    if name == "contended":
        return Trace(name, np.full(frames, ROOM * slowest), none, np.arange(frames) % (BURST + PAUSE) >= PAUSE)
    rates = np.array(RATES, dtype=np.float64)
    rates *= min(1.0, 0.8e6 / (rates.max() * fastest))
    # A much faster device would always run the full path: its rates are those at which it cannot.
    rates *= max(1.0, 1.0e6 / (rates.min() * 2 * slowest))
    rates = np.minimum(rates, 0.8e6 / fastest)
    periods = np.repeat(1e6 / rates, -(-frames // len(rates)))[:frames]
    return Trace(name, periods, periods, quiet)


def told(trace: Trace, count: int) -> np.ndarray:
    """int64, at most `count`: the first frames of a trace, of one with several rates the first at each."""
    ends = [0, *(1 + np.flatnonzero(np.diff(trace.period_us))), len(trace)]
    parts = [np.arange(*ends[at : at + 2]) for at in range(len(ends) - 1)]
    return np.concatenate([part[: count // len(parts)] for part in parts])


@dataclass
class Frames:
    """What became of the frames of a trace: a list for each column. slowdown: as the controller saw it before."""

    path: list[str] = field(default_factory=list)
    promised_us: list[float] = field(default_factory=list)
    measured_us: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)

    def missed(self, trace: Trace) -> np.ndarray:
        """bool [frames]: which took longer than their budget."""
        return np.asarray(self.measured_us) > trace.budgets_us


def run(trace: Trace, contender: Callable, *, controller: Controller, load=None) -> Frames:
    """The `Frames` of a trace.

    contender: ``contender(frame, budget_us, slowdown) -> (text, promised_us, call)``; ``call()`` runs the frame until
    its maps are on the device, as the host's clock sees it. load: ``load()`` starts a piece of foreign work beside a
    frame, where the trace wants it.
    """
    found = Frames()
    due = perf_counter_ns()
    for frame, budget in enumerate(trace.budgets_us):
        if trace.period_us[frame]:
            due = max(due, perf_counter_ns())
            _sleep_until(due)
            due += int(trace.period_us[frame] * 1e3)
        slowdown = controller.factor
        begin = perf_counter_ns()
        if trace.loaded[frame] and load is not None:
            load()
        text, promised, call = contender(frame, float(budget), slowdown)
        call()
        measured = (perf_counter_ns() - begin) / 1e3
        controller.saw(measured, promised, late=measured > budget)
        for column, value in zip(vars(found).values(), (text, promised, measured, slowdown), strict=True):
            column.append(value)
    return found


def oracle(trace: Trace, measured_us: dict[str, np.ndarray], accuracy: dict[str, float]) -> Frames:
    """The `Frames` of one that knows how long each path would take, and picks the best that meets the budget.

    measured_us: of each path, float64 [frames]. Where none meets the budget, it is the fastest. Nothing is run.
    """
    texts = list(measured_us)
    times = np.array([measured_us[text] for text in texts])
    scores = np.array([accuracy[text] for text in texts])[:, None]
    allowed = np.where(times <= trace.budgets_us, scores, -np.inf)
    best = np.where(np.isfinite(allowed).any(0), allowed.argmax(0), times.argmin(0))
    taken = times[best, np.arange(len(trace))].tolist()
    return Frames([texts[at] for at in best], taken, taken, [1.0] * len(trace))


def fixed(table: Table, least_us: float):
    """The entry that a contender with one path for all frames runs: the best for the least budget of all."""
    return table.select(least_us, late="fastest")


def _sleep_until(due_ns) -> None:
    """Wait without giving the processor away: sleeping is not exact to microseconds."""
    while perf_counter_ns() < due_ns:
        pass


def spans(flags) -> Iterator[tuple[int, int]]:
    """``(first, behind)`` of each run of true values, for shading in figures."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(flags, dtype=np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

"""Frames that come one after the other, each with a budget: traces, who meets them, and a controller for slow times.

Numbers are microseconds. A contender is told a frame's budget and names what it runs; the frame's time is measured.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.paths.odds import POWER
from tilewright.paths.table import Entry, Table

TRACES = ("uniform", "steps", "contended")
# Frames a second of the trace `steps`, for a third of the frames each.
RATES = (30, 60, 120)
# Foreign work on the device delays a frame by as much, whatever its path. The longest delay of so many frames counts,
# until so many in a row kept their promises.
WINDOW, CALM = 12, 4
# A controller multiplies promises by this share more after a late frame, and by this much at most: beyond, it leaves
# that to delays.
STEP, CEILING = 0.02, 1.15
# The price of a late frame at first, in mean IoU, and the share by which a late frame raises it.
PRICE, DEARER = 1.0, 0.2
# How much slower the device is than in the rehearsal moves by this share towards each frame, and is believed between
# these shares, while frames are delayed by less than this share of their promise.
FOLLOW, PACES, ALARM = 0.002, (0.7, 1.5), 0.05
# Microseconds that are left where a delay takes all of a budget: no path is that fast.
LEAST_US = 1e-3
# The budget under a load, in slowest promises; frames of a burst of it, and quiet ones before.
ROOM = 1.1
BURST, PAUSE = 24, 40


class Controller:
    """What budgets leave for a frame. This one is open: it learns nothing, and takes them as they are.

    price: what a late frame costs, see `runner.Picker.pick`; None where promises are kept instead.
    """

    price: float | None = None

    def room(self, budget_us: float) -> float:
        """Microseconds of a budget that promises may take."""
        return budget_us

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """Take in a frame's time, what ran, and whether it was late."""


@dataclass
class Closed(Controller):
    """One that sees how late frames are.

    A frame that takes longer than its path promises is delayed; what comes next is expected to be delayed by as much,
    see `WINDOW`. Besides, each late frame raises what promises are multiplied with, `pace`, each other one lowers it,
    such that a share `target` is late in the long run whatever the times are (Gibbs and Candes, "Adaptive Conformal
    Inference", 2021), if `CEILING` is enough. It is never below 1: promises are kept.
    """

    target: float
    pace: float = 1.0
    _over: deque = field(default_factory=lambda: deque([0.0], WINDOW), repr=False)
    _kept: int = field(default=0, repr=False)

    @property
    def delay_us(self) -> float:
        """By how much frames are delayed now, in microseconds."""
        return max(self._over)

    def room(self, budget_us: float) -> float:
        """As `Controller.room`: what a delay leaves, by the pace."""
        return max((budget_us - self.delay_us) / self.pace, LEAST_US)

    def saw(self, measured_us: float, entry: Entry, *, late: bool = False) -> None:
        """As `Controller.saw`."""
        self._move(measured_us, entry, late)
        over = measured_us - self.pace * entry.promise_us  # type: ignore[operator]  # rows of a table have promises
        self._kept = self._kept + 1 if over <= 0 else 0
        if self._kept >= CALM:
            self._over.clear()
        self._over.append(max(over, 0.0))

    def _move(self, measured_us, entry, late):
        self.pace = min(CEILING, max(1.0, self.pace + STEP * (late - self.target)))


@dataclass
class Priced(Closed):
    """One that lets a share `target` of the frames be late, where these give the most: see `odds.Odds`.

    The price of a late frame rises with each one and falls with each other, as the pace of `Closed` does. The pace is
    how much slower the device is than in the rehearsal: it follows the medians.
    """

    price: float = PRICE

    def _move(self, measured_us, entry, late):
        moved = self.price * math.exp(DEARER * (late - self.target))
        self.price = min(2.0**POWER, max(2.0**-POWER, moved))
        if self.delay_us <= ALARM * entry.promise_us:
            moved = self.pace * (1 + FOLLOW if measured_us > self.pace * entry.p50_us else 1 - FOLLOW)
            self.pace = min(PACES[1], max(PACES[0], moved))


@dataclass(frozen=True)
class Trace:
    """Frames of a stream. budgets_us: float64 [frames]. period_us: of frames that come at a rate, float64 [frames], 0
    for those that come as the one before is done. loaded: bool [frames], whether a foreign load is on the device."""

    name: str
    budgets_us: np.ndarray
    period_us: np.ndarray
    loaded: np.ndarray

    def __len__(self) -> int:
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
    """What became of the frames of a trace: a list for each column. slowdown: what budgets were divided by."""

    path: list[str] = field(default_factory=list)
    promised_us: list[float] = field(default_factory=list)
    measured_us: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)

    def missed(self, trace: Trace) -> np.ndarray:
        """bool [frames]: which took longer than their budget."""
        return np.asarray(self.measured_us) > trace.budgets_us


def run(trace: Trace, contender: Callable, *, controller: Controller, load=None, seen=None) -> Frames:
    """The `Frames` of a trace.

    contender: ``contender(frame, room_us, price) -> (entry, call)``, with what the controller leaves of the budget and
    asks for a late frame; ``call()`` runs the entry until its maps are on the device, as the host's clock sees it.
    load: ``load()`` starts a piece of foreign work beside a frame, where the trace wants it. seen: ``seen(frame, entry,
    maps)``, with what ``call()`` returned, once a frame was timed.
    """
    found = Frames()
    due = perf_counter_ns()
    for frame, budget in enumerate(trace.budgets_us.tolist()):
        if trace.period_us[frame]:
            due = max(due, perf_counter_ns())
            _sleep_until(due)
            due += int(trace.period_us[frame] * 1e3)
        room = controller.room(budget)
        begin = perf_counter_ns()
        if trace.loaded[frame] and load is not None:
            load()
        entry, call = contender(frame, room, controller.price)
        maps = call()
        measured = (perf_counter_ns() - begin) / 1e3
        controller.saw(measured, entry, late=measured > budget)
        if seen is not None:
            seen(frame, entry, maps)
        told = entry.path, entry.promise_us, measured, budget / room
        for column, value in zip(vars(found).values(), told, strict=True):
            column.append(value)
    return found


def oracle(trace: Trace, measured_us: dict[str, np.ndarray], accuracy: dict[str, float | np.ndarray]) -> Frames:
    """The `Frames` of one that knows how long each path would take, and picks the best that meets the budget.

    measured_us: of each path, float64 [frames]. accuracy: of each path, or of each frame by it, float64 [frames]: then
    no other sees more in time. Where none meets the budget, it is the fastest. Nothing is run.
    """
    texts = list(measured_us)
    times = np.array([measured_us[text] for text in texts])
    scores = np.array([np.broadcast_to(accuracy[text], len(trace)) for text in texts])
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

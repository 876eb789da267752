"""Frames that come one after the other, each with a budget: traces, and who meets them.

Numbers are microseconds. A contender is told a frame's budget and names what it runs; the frame's time is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.paths.lateness import Controller
from tilewright.paths.table import Entry, Table
from tilewright_study.experiments.stream import TRACES

# Frames a second of the trace `steps`, for a third of the frames each.
RATES = (30, 60, 120)
# The budget under a load, in slowest promises; frames of a burst of it, and quiet ones before.
ROOM = 1.1
BURST, PAUSE = 24, 40


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


def fixed(table: Table, least_us: float) -> Entry:
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

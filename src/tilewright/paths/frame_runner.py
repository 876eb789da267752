"""A runner from frames to class maps within a budget: paths of one network or of several, in one pool of memory."""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
import torch

from tilewright.core import arguments, timing
from tilewright.core.errors import ConfigError
from tilewright.paths import frames as places
from tilewright.paths.lateness import Closed, Priced
from tilewright.paths.record import Record
from tilewright.paths.runner import Picker, Told, facts, made, whole
from tilewright.paths.table import BROKEN, SAMPLES, Table, checked_budget

_LOG = logging.getLogger(__name__)
# Frames that paths are measured with where none were shown.
DRAWN = 4
# Calls of each path that promises are made of, at least.
FEWEST = 30
# A budget that every path fits.
ANY_US = 1e15
# What a call takes after its frame's time is known is foreseen from calls before, of which the latest counts so much.
COUNTING = 0.2
# Of the parts of a call: repetitions, and seconds of each.
PART_CALLS, PART_SECONDS = 3, 0.05


class FrameRunner(Picker):
    """Class maps of frames within a time budget, by paths of one network or of several.

    ``runner(frame, budget_us=900)`` returns ``(labels, told)``: a class for each pixel of the frame, uint8, and what
    ran. Resizing, normalisation, the network, interpolation to the frame's size and the largest logit are one CUDA
    graph on a GPU, with the copies from and to the host's memory. A promise is about all of it. One thread and one
    stream at a time may call.

    Parameters
    ----------
    networks : Module or sequence of Module
        On one device, in one type, for inference, with the same classes, of which there are at most 256. Their input
        sizes may differ.
    table : Table, optional
        Paths of these networks; with several, a joint one. A table whose promises are about maps, or frames of another
        size, needs a `rehearse` before the first call. None runs one network whole, and needs one, too.
    frame : (int, int)
        Height and width of frames.
    batch : int
        Frames of a call.
    margin : float
        Share of a promise that is added to it.
    late : str
        What happens where no path fits a budget: ``fastest`` runs the fastest one, and `told.short` says so, or
        ``error``.
    late_share : float, optional
        Share of frames that may exceed their budget, such as 0.01. The runner spends it where it gives the most mean
        IoU, which needs a `rehearse` and mean IoU in the table. None runs the best path whose promise a budget holds.
    mean, std : (float, float, float)
        Of the channels of the networks' training images in 0..1.
    folded : dict, optional
        ``{table.key(row): Folded}`` for paths with statistics of their own.
    pixels : (int, int), optional
        Height and width of the images that networks take of frames. None takes those that each was made for.

    Attributes
    ----------
    table : Table
        With the promises of now. ``paths.table.write(file, runner.table.rows)`` keeps it.
    record : Record
        Promises that were made and kept, by path and hour.
    control : Closed
        What frames teach: promises follow clocks and hosts, grow while more than 1 % of them are broken, and grow under
        foreign load.

    Raises
    ------
    ConfigError
        For networks whose classes, device or type differ, for a table of another device or with paths of a network
        that is not given, and as `Runner` does.
    """

    def __init__(
        self,
        networks: torch.nn.Module | Sequence[torch.nn.Module],
        table: Table | None,
        frame: tuple[int, int],
        *,
        batch: int = 1,
        margin: float = 0.0,
        late: str = "fastest",
        late_share: float | None = None,
        mean: tuple[float, float, float] = places.MEAN,
        std: tuple[float, float, float] = places.DEVIATION,
        folded: Mapping[str, Any] | None = None,
        pixels: tuple[int, int] | None = None,
    ):
        """Capture the paths of `table`."""
        if not isinstance(table, Table | None):
            raise ConfigError(f"table: expected a path table, found {arguments.shown(table)}")
        batch, known = arguments.whole("batch", batch), _known(networks)
        first, *others = known.values()
        if table is None:
            if others:
                raise ConfigError(f"table: expected one to pick among {len(known)} networks, found none")
            table = whole(first, batch=batch, joint=True)
        if pixels is not None:
            least = max(one.options.least for one in known.values())
            height, width = arguments.sizes("pixels", pixels, 2, least=least)
            pixels = height, width
        table.check(batch=batch, **{name: value for name, value in facts(first).items() if name in ("device", "dtype")})
        keys: dict[tuple, dict] = {}
        # The slowest first: its memory serves the others.
        for entry in reversed(table.rows):
            if (of := (entry.network, entry.checkpoint)) not in known:
                given = ", ".join(map(_said, known))
                raise ConfigError(f"networks: expected those of the path table, {_said(of)} among them, found {given}")
            if entry.rung != "trained" and table.key(entry) not in (folded or {}):
                raise ConfigError(f"folded: expected batch-norm statistics of {table.key(entry)}, found none")
            keys.setdefault(of, {})[table.key(entry)] = known[of].path(entry.path)
        self.places = places.Places(frame, batch, next(first.parameters()).device, mean, std)
        how = {"batch": batch, "folded": folded, "compiled": table.rows[0].compiled, "frames": self.places}
        how["pixels"] = pixels
        self._calls: dict[str, Any] = {}
        latest = None
        for of, paths in keys.items():
            latest = made(known[of], paths, beside=latest, **how)
            self._calls |= dict.fromkeys(paths, latest)
        super().__init__(lambda key, given: self._calls[key](key, given), table, margin=margin, late=late)
        self.record = Record()
        share = None if late_share is None else arguments.number("late_share", late_share, above=0, most=1)
        self.control: Closed = Closed(BROKEN) if share is None else Priced(share)
        # What measured calls count on, and change.
        self._scratch = Record(warns=False), Closed(BROKEN)
        self._frame = "x".join(map(str, self.places.size))
        self._shown: Any = None
        self._samples: dict[str, deque] = {key: deque(maxlen=SAMPLES) for key in self._calls}
        self._said_short = False
        self._counting_us = 0.0

    def __call__(self, frame: Any, budget_us: float, *, price: float | None = None) -> tuple[torch.Tensor, Told]:
        """Label a frame by the best path that fits a time budget.

        Parameters
        ----------
        frame : Tensor, array, image of Pillow, str or Path
            uint8 [H, W, 3] or [batch, H, W, 3] of the runner's size, in the host's memory or on the GPU; an RGB image,
            or its file, which is turned as its EXIF data says. To open these is not part of the promise.
        budget_us : float
            Time budget in microseconds.
        price : float, optional
            Mean IoU that a late call costs, see `Runner`.

        Returns
        -------
        (Tensor, Told)
            Classes, uint8 [H, W] or [batch, H, W], in memory of the caller's, on the device that the frame is on; and
            what ran.

        Raises
        ------
        BudgetError
            For a budget that is no positive number, and for one that no path fits with ``late="error"``.
        ConfigError
            Before promises about frames are known.
        PatternError, ArtifactError
            For a frame of another size, type or mode, for a file that is no whole image, and for a second caller.
        """
        begin = perf_counter_ns()
        given = places.opened(frame, self.places.size, len(self.places.frames))
        if not isinstance(frame, (np.ndarray, torch.Tensor)):
            # Of a file or an image.
            begin = perf_counter_ns()
        price, budget_us = self.control.price if price is None else price, checked_budget(budget_us)
        entry = self.pick(self.control.room(budget_us), price=price)
        several = getattr(frame, "ndim", 3) == 4
        return self._answer(entry, given, begin, self.record, self.control, budget_us, price, several)

    def _answer(self, entry, given, begin, record, control, budget_us, price, several=False):
        """Classes of frames by an entry, and what ran since `begin`, which `record` counts and `control` learns of."""
        promised = control.promised(entry)
        labels = self.run(entry, given)
        short = price is None and promised * (1 + self.margin) > budget_us
        if short and not self._said_short:
            self._said_short = True
            said = f"budget: expected at least {promised:.0f} us, which the fastest path promises, found "
            _LOG.warning("%s%.0f us; the fastest path runs", said, budget_us)
        found = labels if several else labels[0]
        if labels.is_cuda:
            record.saw(self.table.key(entry), promised, None, short=short)
            return found, Told(entry.path, promised, entry.test, entry.network, short)
        # The caller waits for the counting, too.
        counted = perf_counter_ns()
        took = (counted - begin) / 1e3 + self._counting_us
        record.saw(self.table.key(entry), promised, took, short=short)
        control.saw(took, entry, late=took > budget_us)
        told = Told(entry.path, promised, entry.test, entry.network, short, took)
        seen = min((perf_counter_ns() - counted) / 1e3, 4 * self._counting_us + 10)
        self._counting_us += COUNTING * (seen - self._counting_us)
        return found, told

    def _timed(self, entry, images):
        # Promises are about calls as users make them, with all that the host does.
        begin = perf_counter_ns()
        given = places.opened(images, self.places.size, len(self.places.frames))
        record, control = self._scratch
        super().pick(control.room(ANY_US))
        self._answer(entry, given, begin, record, control, math.inf, None)

    def _promise(self, found, **more):
        super()._promise(found, **more)
        if isinstance(self.control, Priced):
            self.control.odds = self.odds

    def pick(self, budget_us: float, *, price: float | None = None) -> Any:
        """As `Picker.pick`. Raises `ConfigError` before promises about frames of this size are known."""
        if self.table.rows[0].frame != self._frame:
            found = self.table.rows[0].frame
            raise ConfigError(
                f"path table: expected promises about frames of {self._frame}, found "
                f"{f'those of {found}' if found else 'those about maps'}; call runner.rehearse(frames) first"
            )
        return super().pick(budget_us, price=price)

    def rehearse(self, images: torch.Tensor | None = None, count: int = SAMPLES, *, seed: int = 0) -> dict[str, Any]:
        """Measure the paths of the table, whole and in parts, in this process.

        Paths that others then dominate are not picked.

        Parameters
        ----------
        images : Tensor, optional
            Frames, uint8 [n, H, W, 3], in the host's memory. None draws some.
        count : int
            Calls of each path.
        seed : int
            Seed of the random order of the calls.

        Returns
        -------
        dict
            Latencies in microseconds by `table.key`, float [count].
        """
        self._shown = self._drawn() if images is None else self._checked(images)
        found = self.times(self._shown, arguments.whole("count", count), seed=seed)
        for key, times in found.items():
            self._samples[key] = deque(times, SAMPLES)
        self._promise(found, frame=self._frame)
        self.control.restart()
        self.table.state_parts({key: self._calls[key].parts(key, _effort(self.places)) for key in self._keys()})
        return found

    def remeasure(self, seconds: float, *, seed: int | None = None) -> int:
        """Measure some paths again in idle time, and promise what their latest calls took.

        Parameters
        ----------
        seconds : float
            How long to measure; the last call may end later.
        seed : int, optional
            Seed of the random order of the calls.

        Returns
        -------
        int
            Calls that were measured.
        """
        end = perf_counter() + arguments.number("seconds", seconds, above=0)
        if self._shown is None:
            self._shown = self._drawn()
        drawn, count, batch = np.random.default_rng(seed), 0, len(self.places.frames)
        entries, parts = self.table.rows, self._shown.split(batch)
        while perf_counter() < end:
            entry = entries[drawn.integers(len(entries))]
            begin = perf_counter_ns()
            self._timed(entry, parts[count % len(parts)])
            self._samples[self.table.key(entry)].append((perf_counter_ns() - begin) / 1e3)
            count += 1
        if all(len(self._samples[key]) >= FEWEST for key in self._keys()):
            self._promise({key: np.array(self._samples[key]) for key in self._keys()}, frame=self._frame)
        return count

    def _keys(self):
        return [self.table.key(entry) for entry in self.table.rows]

    def _drawn(self):
        size = (DRAWN * len(self.places.frames), *self.places.shape[1:])
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def _checked(self, images):
        """Frames [n, H, W, 3] of the host. Raises `PatternError`."""
        return places.opened(images, self.places.size, len(images) if getattr(images, "ndim", 0) == 4 else 1)


def _effort(place):
    """``callable(call) -> microseconds``, the median of a part of a call."""
    effort: dict[str, Any] = {"min_reps": PART_CALLS, "max_seconds": PART_SECONDS, "rse_target": 0.02}
    if place.frames.is_cuda:
        return lambda call: timing.time_gpu(call, **effort).p50_us
    return lambda call: timing.time_call(call, warmups=1, **effort).p50_us


def _known(networks):
    """``{(name, checkpoint): network}``. Raises `ConfigError` for what is none, and for networks that differ."""
    given = (networks,) if isinstance(networks, torch.nn.Module) else arguments.each(networks)
    if not given or not all(isinstance(one, torch.nn.Module) and hasattr(one, "path") for one in given):
        raise ConfigError(f"networks: expected some that take paths, found {arguments.shown(networks)}")
    stated = [facts(one) | {"classes": one.options.num_classes} for one in given]
    for one in stated:
        for field in ("classes", "device", "dtype"):
            if one[field] != stated[0][field]:
                raise ConfigError(
                    f"networks: expected {field} {stated[0][field]} of all as of {stated[0]['network']}, found "
                    f"{one[field]} of {one['network']}"
                )
    if stated[0]["classes"] > places.MOST_CLASSES:
        raise ConfigError(f"networks: expected at most {places.MOST_CLASSES} classes, found {stated[0]['classes']}")
    found = {(one["network"], one["checkpoint"]): network for one, network in zip(stated, given, strict=True)}
    if len(found) < len(stated):
        raise ConfigError(f"networks: expected each once, found {_said(next(iter(found)))} again")
    return found


def _said(of):
    name, checkpoint = of
    return f"{name} with {f'weights {checkpoint}' if checkpoint else 'random weights'}"

"""What a calibration says, from the times of its points (stage T3)."""

from dataclasses import asdict, replace

import numpy as np
from scipy.optimize import nnls

from tilewright.attention.cuda import cost_model, tile_kernel
from tilewright.attention.cuda.cost.record import Calibration, Kernel

# Values of `by_age` that are tried, and rounds in which what is not linear is found.
BY_AGE, ROUNDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6), 6
# What is found beyond the variants, by the points that tell it; features of `cost_model.Launch` it is the cost of.
BEYOND: dict[str, dict[str, str | None]] = {
    "memory": {"scattered_us": "scattered", "missed_us": "missed"},
    "factors": {"apart_factors_us": "apart"},
    "tiles": {"apart_tiles_us": "apart", "own_tiles_us": "own", "missed_tiles_us": "missed_tiles"},
    "parts": {"part_us": None, "merge_us": None, "merge_few_us": None},
}


def fitted(setup, us, groups, needs, **stated):
    """The `Calibration` of a `Setup`.

    us: ``{Point: microseconds}``. groups: ``{"basic": {rank: points}}``, and points by words of `BEYOND`. needs: by
    rank and whether blocks are split, what a program takes, see `probe.resources`. stated: fields of the calibration
    that its points do not tell.
    """
    variants = {rank: _Variant(points, us) for rank, points in groups["basic"].items()}
    args = launch_us, by_age = _shared(variants.values(), min(us.values()))
    found = Calibration(
        rows=setup.rows,
        step_keys=setup.step_keys,
        multiprocessors=setup.multiprocessors,
        l2_bytes=setup.l2_bytes,
        kernels=tuple(_kernel(rank, each, needs, *args) for rank, each in variants.items()),
        launch_us=launch_us,
        by_age=by_age,
        **dict.fromkeys((name for names in BEYOND.values() for name in names), 0.0),  # type: ignore[arg-type]  # numbers
        error=0.0,
        timings=tuple(asdict(point) | {"us": each} for point, each in us.items()),
        **stated,
    )
    launches = {point: described(setup, point, found) for point in us}
    for group, names in BEYOND.items():
        points = groups.get(group, ())
        if not points:
            continue
        times = np.array([us[point] for point in points])
        columns = np.array([_columns(point, launches[point], names) for point in points], float)
        for _ in range(ROUNDS):
            # What ends last runs faster, with the others gone: a launch takes less more than its items do.
            left = times - [predicted(launches[point], found) for point in points]
            known = [getattr(found, name) for name in names]
            solved = _solved(columns, left + columns @ known, times)
            found = replace(found, **dict(zip(names, solved.tolist(), strict=True)))
    off = [abs(predicted(launches[point], found) / each - 1) for point, each in us.items()]
    return replace(found, error=float(np.median(off)))


def described(setup, point, calibration):
    """The `cost_model.Launch` of a point."""
    lists, _, batch = setup.work(point)
    launch = cost_model.describe(lists, calibration, batch, setup.head_dim, setup.dtype)
    return replace(launch, rank=point.rank, apart=float(point.own_masks))


def predicted(launch, calibration):
    """Microseconds of a `cost_model.Launch`, by what a calibration says."""
    took_us = cost_model.durations(launch, calibration)
    return calibration.launch_us + cost_model.makespan(*took_us, launch.hb, calibration)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked


def _shared(variants, least):
    """``(launch_us, by_age)`` of all variants. least: the shortest time."""
    # What the first wave takes beside steps, less what each later one does.
    launch_us = float(np.clip(np.median([each.ramp_us for each in variants]), 0, least / 2))
    off = [np.square(np.concatenate([each.off(launch_us, by_age) for each in variants])).mean() for by_age in BY_AGE]
    return launch_us, BY_AGE[int(np.argmin(off))]


class _Variant:
    """The times of plain items of one variant, and what follows from them.

    ramp_us: see `_shared`. steady_us: of an item, a full and a partial step, of programs that begin as others end.
    """

    def __init__(self, points, us):
        self.of = {
            (point.busy, point.waves, point.full, point.partial): us[point] for point in points if not point.more
        }
        self.uneven = {point: us[point] for point in points if point.more}
        self.levels = sorted({point.busy for point in points})
        self.steps = sorted({(point.full, point.partial) for point in points})
        self.columns = np.array([(1, *each) for each in self.steps], float)
        most, (fewer, more) = self.levels[-1], sorted({point.waves for point in points})[-2:]
        wave_us = [(self.of[most, more, *each] - self.of[most, fewer, *each]) / (more - fewer) for each in self.steps]
        self.steady_us = _solved(self.columns, wave_us, wave_us)
        self.ramp_us = self.costs(0.0, 0.0)[-1][0] - self.steady_us[0]

    def costs(self, launch_us, by_age):
        """float [levels, 3]: of an item, a full and a partial step of programs that begin together."""
        levels = np.array([self._durations(each, launch_us, by_age) for each in self.steps]).T
        return np.array([_solved(self.columns, level, level) for level in levels])

    def off(self, launch_us, by_age):
        """Relative errors of the points with other than full waves."""
        costs, found = self.costs(launch_us, by_age), []
        for point, us in self.uneven.items():
            took_us = self._interpolated(costs @ (1, point.full, point.partial))
            steady_us = self.steady_us @ (1, point.full, point.partial)
            later = took_us * (1 + np.linspace(0, min(0.0, steady_us / took_us[-1] - 1), len(took_us)))
            count = point.busy * point.waves + point.more
            found.append((launch_us + _played(took_us, later, count, by_age)) / us - 1)
        return np.array(found)

    def _durations(self, steps, launch_us, by_age):
        """What a program with `steps` takes with each of `levels` on a multiprocessor: such that a wave of them takes
        what it was timed with, though not all end at once."""
        known = np.array([max(self.of[busy, 1, *steps] - launch_us, 1e-3) for busy in self.levels])
        found = known.copy()
        for _ in range(ROUNDS if by_age else 0):
            for i, busy in enumerate(self.levels):
                took_us = self._interpolated(found)[:busy]
                found[i] *= known[i] / _played(took_us, took_us, busy, by_age)
        return found

    def _interpolated(self, by_level):
        return np.interp(np.arange(1, self.levels[-1] + 1), self.levels, by_level)


def _played(first, later, count, by_age):
    """Time that `count` programs take on a multiprocessor; first, later: with 1, 2, … at a time."""
    shares = cost_model.shares(first, by_age)
    return cost_model.played(first[None, :], later[None, :], np.zeros(count, np.int64), 1, 1, shares)


def _columns(point, launch, names):
    """What the time of a point grows by for each microsecond of the costs `names`."""
    if point.parts > 1:
        merged = -(-point.parts // tile_kernel.MERGED.value)
        return [point.busy, 0, merged * point.rows] if point.rows else [point.busy, point.parts, 0]
    depth = cost_model.depth(point.rank)
    steps = point.busy * point.waves * (point.full + point.partial)
    return [steps * getattr(launch, name) * (depth if point.own_masks else 1) for name in names.values()]


def _kernel(rank, variant, needs, launch_us, by_age):
    one = needs[rank, False]
    item_us, full_us, partial_us = variant.costs(launch_us, by_age).T.tolist()
    return Kernel(
        rank=rank,
        registers=one["registers"],
        spills=one["spills"],
        shared_bytes=one["shared_bytes"],
        resident=int(one["resident"]),
        resident_split=int(needs.get((rank, True), one)["resident"]),
        busy=tuple(variant.levels),
        item_us=tuple(item_us),
        full_us=tuple(full_us),
        partial_us=tuple(partial_us),
        steady_us=tuple(variant.steady_us.tolist()),
    )


def _solved(columns, values, us):
    """The costs, none below zero, that give `values` by their `columns` with the least error relative to `us`."""
    weight = 1 / np.asarray(us, float)
    return nnls(np.asarray(columns, float) * weight[:, None], np.asarray(values, float) * weight)[0]

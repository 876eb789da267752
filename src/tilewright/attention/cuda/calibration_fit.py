"""The launches that a calibration times, made-up items that are all alike, and what follows from their times (T3)."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tilewright.attention.cuda import cost_model, tile_kernel
from tilewright.attention.cuda.cost_model import Calibration, Kernel
from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, RANKS, Item, Part, TileLists

# The variants of the kernel, see `cost_model.Kernel`.
VARIANTS = (None, *RANKS, INTERVALS, BYTES, 0)
# Steps of an item, without and with a mask, that tell the parts of its time apart.
STEPS = ((2, 2), (16, 2), (2, 16))
# Full loads of the multiprocessors one after another.
WAVES = (1, 3, 6)
# Tokens of items whose keys lie together: far fewer than the second-level cache holds; of what is only compiled.
NEAR_TOKENS, FEW_TOKENS = 8192, 256
# Shares of the second-level cache that keys take which lie in it, and which do not; masks take the first at most.
SHARES = INSIDE, BEYOND = 0.4, 4.0
# Where at most so many programs fit a multiprocessor, each number of them is timed.
EACH = 8
# Values of `by_age` that are tried, and rounds in which what is not linear is found.
BY_AGE, ROUNDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6), 6
# What is found beyond the variants, by the points that tell it; features of `cost_model.Launch` it is the cost of.
FURTHER: dict[str, dict[str, str | None]] = {
    "memory": {"scattered_us": "scattered", "missed_us": "missed"},
    "factors": {"apart_factors_us": "apart"},
    "tiles": {"apart_tiles_us": "apart", "own_tiles_us": "own", "missed_tiles_us": "missed_tiles"},
    "parts": {"part_us": None, "merge_us": None, "merge_few_us": None},
}


@dataclass(frozen=True)
class Point:
    """One launch that is timed: items alike.

    rank: of the variant. busy, waves: programs of each multiprocessor at a time, and one after another. full, partial:
    steps of an item. tokens: None for few keys that lie together, else so many, of which any are taken.
    own_masks: other items do not have its masks. parts, rows: of each block, where blocks are split. more: programs of
    each multiprocessor beyond full waves.
    """

    rank: int | None
    busy: int
    waves: int = 1
    full: int = 0
    partial: int = 0
    tokens: int | None = None
    own_masks: bool = False
    parts: int = 1
    rows: int | None = None
    more: int = 0


@dataclass(frozen=True)
class Setup:
    """What all points of a calibration share: the form of the kernel, type and head dim, and sizes of the GPU."""

    rows: int
    step_keys: int
    head_dim: int
    dtype: str
    multiprocessors: int
    l2_bytes: int

    @property
    def batch(self) -> int:
        """Entries that share the lists: as many as the multiprocessors can be shared out to."""
        return next(batch for batch in (4, 3, 2, 1) if self.multiprocessors % batch == 0)

    def work(self, point: Point) -> tuple[TileLists, int, int]:
        """``(lists, tokens, batch)`` of a point."""
        batch = 1 if point.own_masks and point.waves == 1 else self.batch
        n_items = self.multiprocessors * (point.busy * point.waves + point.more) // batch
        n_tokens = point.tokens or NEAR_TOKENS
        return lists(point, self.rows, self.step_keys, n_items, n_tokens), n_tokens, batch

    def compiled(self, rank: int | None, split: bool) -> TileLists:
        """Lists of two items for which a variant is compiled; split: some block is."""
        point = Point(rank, 1, full=2, partial=0 if rank is None else 2, parts=1 + split)
        return lists(point, self.rows, self.step_keys, 2, FEW_TOKENS)

    def basic(self, rank: int | None, resident: int) -> list[Point]:
        """The points that tell what programs of a variant take; `resident` of them fit a multiprocessor."""
        steps = sorted({(full, 0) for full, _ in STEPS} if rank is None else STEPS)
        levels = range(1, resident + 1) if resident <= EACH else sorted({1, 2, 3, (resident + 1) // 2, resident})
        loads = [(busy, 1) for busy in levels] + [(resident, waves) for waves in WAVES[1:]]
        more = [Point(rank, resident, 1, *each, more=more) for more in sorted({1, resident // 2}) for each in steps]
        return [Point(rank, *load, *each) for load in loads for each in steps] + more

    def memory(self, resident: int) -> list:
        """Points whose keys lie together, apart, and beyond the second-level cache."""
        row_bytes = 2 * self.head_dim * (4 if self.dtype == "float32" else 2)
        tokens = [max(NEAR_TOKENS // 2, int(share * self.l2_bytes / (row_bytes * self.batch))) for share in SHARES]
        return [Point(RANKS[0], resident, WAVES[1], partial=STEPS[-1][1], tokens=n) for n in (None, *tokens)]

    def factors(self, resident: int) -> list:
        """A point whose items have factors of the greatest rank that no other item has."""
        return [Point(RANKS[-1], resident, WAVES[1], partial=STEPS[-1][1], own_masks=True)]

    def tiles(self, resident: int) -> list[Point]:
        """Points with tiles of masks that no other item has, few and many; in one wave, no other program."""
        few = max(1, int(INSIDE * self.l2_bytes / (4 * self.rows * self.step_keys)))
        points = []
        for waves, batch in ((WAVES[1], self.batch), (1, 1)):
            held = max(1, few * batch // (self.multiprocessors * resident * waves))
            points += [Point(0, resident, waves, partial=n, own_masks=True) for n in sorted({held, STEPS[-1][1]})]
        return points

    def parts(self, resident: int) -> list:
        """Points whose blocks are split."""
        forms = ((4, None), (16, None), (16, 1), (64, 1))
        return [Point(RANKS[0], resident, partial=4, parts=n, rows=rows) for n, rows in forms]


def lists(point: Point, rows: int, step_keys: int, n_items: int, n_tokens: int) -> TileLists:
    """`TileLists` of `n_items` items as a `Point` has them, over `n_tokens` tokens."""
    rng, item = np.random.default_rng(0), np.arange(n_items)
    steps, n_rows = point.full + point.partial, point.rows or rows
    block = item // point.parts
    if point.tokens is None:
        keys = (item[:, None] * rows + np.arange(steps * step_keys)) % n_tokens
    else:
        keys = rng.integers(0, n_tokens, (n_items, steps * step_keys))
    keys = keys.reshape(-1, step_keys)
    rank = RANKS[0] if point.rank is None else point.rank
    # Masks that are held: their left factors, and their steps.
    kinds = n_items if point.own_masks else 1
    held = max(1, point.partial * kinds)
    factored, tiled = rank in RANKS, rank in (BYTES, 0)
    fields = {
        Item.FIRST_ROW: block * n_rows % (n_tokens - n_rows + 1),
        Item.ROWS: np.full(n_items, n_rows),
        Item.FIRST_STEP: item * steps,
        Item.FULL_STEPS: np.full(n_items, point.full),
        Item.STEPS: np.full(n_items, steps),
        Item.MASK_STEP: item * (point.partial if point.own_masks else 0),
        Item.LEFT_FACTOR: item * (kinds > 1),
        Item.PART: item if point.parts > 1 else np.full(n_items, -1),
    }
    # In the order of `Part`.
    parts = np.stack([block, np.bincount(block)[block], block * point.parts * n_rows, item % point.parts], 1)
    is_split = point.parts > 1
    return TileLists(
        rows=rows,
        step_keys=step_keys,
        rank=rank,
        items=np.stack([fields[field] for field in Item], 1).astype(np.int32),
        keys=np.concatenate((keys, keys[:1])).astype(np.int32),
        # Nothing is forbidden: the right factors, bytes and tiles are zeros, and intervals are as long as a step.
        left=rng.random((kinds if factored else 1, rows, rank if factored else RANKS[0])) < 0.5,
        right=np.zeros((held if factored else 1, step_keys, rank if factored else RANKS[0]), bool),
        intervals=np.full((held if rank == INTERVALS else 0, rows), step_keys << 16, np.int32),
        bias_index=np.zeros((held if tiled else 0, rows, step_keys), np.int32),
        family=np.zeros(held if tiled else 0, np.int64),
        parts=parts.astype(np.int32) if is_split else np.zeros((0, len(Part)), np.int32),
        groups=int(block[-1]) + 1 if is_split else 0,
        part_rows=(int(block[-1]) + 1) * point.parts * n_rows if is_split else 0,
        full=True,
        partial=point.rank is not None,
    )


def fitted(
    setup: Setup,
    us: dict[Point, float],
    basic: dict[int | None, list[Point]],
    groups: dict[str, list[Point]],
    needs: dict[tuple[int | None, bool], dict[str, float]],
    **stated: Any,
) -> Calibration:
    """The `Calibration` of a `Setup`.

    us: ``{Point: microseconds}``. basic: points by rank. groups: points by words of `FURTHER`. needs: by rank and
    whether blocks are split, what a program takes, see `probe.resources`. stated: fields of the calibration that its
    points do not tell.
    """
    variants = {rank: _Variant(points, us) for rank, points in basic.items()}
    args = launch_us, by_age = _shared(variants.values(), min(us.values()))
    found = Calibration(
        rows=setup.rows,
        step_keys=setup.step_keys,
        multiprocessors=setup.multiprocessors,
        l2_bytes=setup.l2_bytes,
        kernels=tuple(_kernel(rank, each, needs, *args) for rank, each in variants.items()),
        launch_us=launch_us,
        by_age=by_age,
        **dict.fromkeys((name for names in FURTHER.values() for name in names), 0.0),  # type: ignore[arg-type]  # numbers
        error=0.0,
        timings=tuple(asdict(point) | {"us": each} for point, each in us.items()),
        **stated,
    )
    launches = {point: described(setup, point, found) for point in us}
    for group, names in FURTHER.items():
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


def described(setup: Setup, point: Point, calibration: Calibration) -> cost_model.Launch:
    """The `cost_model.Launch` of a point."""
    lists, _, batch = setup.work(point)
    launch = cost_model.describe(lists, calibration, batch, setup.head_dim, setup.dtype)
    return replace(launch, rank=point.rank, apart=float(point.own_masks))


def predicted(launch: cost_model.Launch, calibration: Calibration) -> float:
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
    # Here: it takes long to load, and who has a calibration fits none.
    from scipy.optimize import nnls

    return nnls(np.asarray(columns, float) * weight[:, None], np.asarray(values, float) * weight)[0]

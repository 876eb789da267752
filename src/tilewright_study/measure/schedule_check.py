"""The independent checker: is a schedule what it says it is, and does it keep every constraint?

It shares no code with the problem, the heuristics or the solvers. It reads the work list item by item and recomputes
coverage, constraints C1 to C6 and the makespan from blocks, profiles and limits alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from tilewright.attention.blocks import Blocks
from tilewright.attention.profile import Profile
from tilewright.attention.schedule.record import Schedule
from tilewright.devices import Limits

# Relative tolerance for sums of times, which depend on the order of their terms.
TOLERANCE = 1e-6


def violations(
    schedule: Schedule, blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile], limits: Limits
) -> list[str]:
    """Return a list of sentences, one for each way in which `schedule` is wrong; empty when it is right.

    blocks, profiles: by tile.
    """
    if wrong := _references(schedule, blocks, profiles):
        return wrong
    items = [
        (schedule.tiles[t], *rest)
        for t, *rest in zip(*(getattr(schedule, name).tolist() for name in _COLUMNS), strict=True)
    ]
    return [
        *_coverage(items, blocks),
        *_shapes(items, blocks, profiles),
        *_per_block(items, profiles, limits),
        *_rounds(items, profiles, limits),
        *_placement(items, profiles, limits),
        *_prediction(schedule, items, profiles, limits),
    ]


_COLUMNS = ("tile", "block", "run_lo", "run_hi", "shape", "split", "round", "lane", "start_us")


def _references(schedule, blocks, profiles):
    """Indices that point nowhere. The other checks need correct ones."""
    lengths = {name: len(getattr(schedule, name)) for name in _COLUMNS}
    if len(set(lengths.values())) != 1:
        return [f"the columns differ in length: {lengths}"]
    missing = [name for name in schedule.tiles if name not in blocks or name not in profiles]
    if missing:
        return [f"no blocks or profile for the tiles {missing}"]
    wrong = []
    for i, (t, b, k) in enumerate(zip(schedule.tile, schedule.block, schedule.shape, strict=True)):
        if not 0 <= t < len(schedule.tiles):
            wrong.append(f"item {i} names tile {t} of {len(schedule.tiles)}")
        elif not 0 <= b < blocks[schedule.tiles[t]].n_blocks:
            wrong.append(f"item {i} names block {b} of {blocks[schedule.tiles[t]].n_blocks}")
        elif not 0 <= k < len(shapes := profiles[schedule.tiles[t]].shapes):
            wrong.append(f"item {i} names shape {k} of {len(shapes)}")
    return wrong


def _coverage(items, blocks):
    """C1: each region with keys on one tile, in one round, every run of its blocks exactly once."""
    wrong, places, parts = [], defaultdict(set), defaultdict(list)
    for tile, b, lo, hi, _, _, r, _, _ in items:
        region = int(np.searchsorted(blocks[tile].region_ptr, blocks[tile].row_ptr[b], side="right")) - 1
        places[region].add((tile, r))
        parts[tile, b].append((lo, hi))
    cover = next(iter(blocks.values()))
    for region in range(len(cover.region_ptr) - 1):
        found = places.get(region, set())
        if len(found) > 1:
            wrong.append(f"C1: region {region} is placed {len(found)} times, in (tile, round) {sorted(found)}")
        for tile in {tile for tile, _ in found} or {cover.tile.name}:
            mine = blocks[tile]
            row_lo, row_hi = mine.region_ptr[region], mine.region_ptr[region + 1]
            first, last = np.searchsorted(mine.row_ptr, [row_lo, row_hi])
            for b in range(int(first), int(last)):
                wrong += _runs(region, tile, b, parts[tile, b], int(mine.run_ptr[b]), int(mine.run_ptr[b + 1]))
    return wrong


def _runs(region, tile, b, parts, first, last):
    position = first
    for lo, hi in sorted(parts):
        if lo != position or hi <= lo:
            return [f"C1: region {region}, tile {tile}, block {b}: runs {lo}..{hi} where {position} should follow"]
        position = hi
    if position != last:
        return [f"C1: region {region}, tile {tile}, block {b}: runs up to {position} of {first}..{last} are covered"]
    return []


def _shapes(items, blocks, profiles):
    """Every item fits the shape whose latency it is counted with."""
    wrong = []
    for i, (tile, b, lo, hi, k, split, *_) in enumerate(items):
        cover, shape = blocks[tile], profiles[tile].shapes[k]
        rows = int(cover.row_ptr[b + 1] - cover.row_ptr[b])
        masked = bool((cover.run_mask[lo:hi] >= 0).any()) or hi - lo < shape.runs
        whole = (lo, hi) == (cover.run_ptr[b], cover.run_ptr[b + 1])
        if rows > shape.rows or hi - lo > shape.runs or masked > shape.masked or split != shape.split or split == whole:
            wrong.append(
                f"item {i} ({tile}, block {b}: {rows} rows, {hi - lo} runs, masked {masked}, split {split}) "
                f"does not fit shape {k} ({shape.rows} rows, {shape.runs} runs, masked {shape.masked}, "
                f"split {shape.split})"
            )
    return wrong


def _per_block(items, profiles, limits):
    """C2: what one item needs."""
    wrong = []
    for i, (tile, b, _, _, k, *_) in enumerate(items):
        for name, most in limits.per_block.items():
            need = profiles[tile].shapes[k].resources[name]
            if need > most:
                wrong.append(f"C2: item {i} ({tile}, block {b}) needs {name} {need:g}, at most {most:g}")
    return wrong


def _rounds(items, profiles, limits):
    """C3, C5, C6: what a round holds; and that rounds follow one another."""
    wrong: list[str] = []
    kinds: defaultdict[int, set[str]] = defaultdict(set)
    units: defaultdict[int, float] = defaultdict(float)
    for tile, _, _, _, k, _, r, _, _ in items:
        kinds[r].add(tile)
        units[r] += profiles[tile].shapes[k].occupancy
    order = [item[6] for item in items]
    if order != sorted(order):
        wrong.append("rounds are not ascending in the work list")
    if outside := [r for r in kinds if not 0 <= r < limits.rounds]:
        wrong.append(f"rounds {sorted(outside)} lie outside 0..{limits.rounds - 1}")
    for r in sorted(kinds):
        if len(kinds[r]) > limits.max_tile_kinds:
            wrong.append(f"C3: round {r} holds {len(kinds[r])} tile kinds, at most {limits.max_tile_kinds}")
        for name, most in limits.envelope.items():
            need = sum(_largest(profiles[tile], name, limits) for tile in kinds[r])
            if need > most * (1 + TOLERANCE):
                wrong.append(f"C5: round {r}: the tiles {sorted(kinds[r])} take {name} {need:g}, at most {most:g}")
        if units[r] > limits.occupancy * (1 + TOLERANCE):
            wrong.append(f"C6: round {r} takes {units[r]:g} occupancy units, at most {limits.occupancy:g}")
    return wrong


def _largest(profile, name, limits):
    usable = [
        shape.resources[name]
        for shape in profile.shapes
        if all(shape.resources[other] <= most for other, most in limits.per_block.items())
    ]
    return max(usable, default=0.0)


def _placement(items, profiles, limits):
    """A lane holds one item at a time, and a round starts when the one before is over."""
    wrong: list[str] = []
    timeline: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
    spans: dict[int, tuple[float, float]] = {}
    for i, (tile, _, _, _, k, _, r, lane, start) in enumerate(items):
        if not 0 <= lane < limits.lanes:
            wrong.append(f"item {i} runs in lane {lane} of {limits.lanes}")
        end = start + profiles[tile].shapes[k].latency_us
        timeline[lane].append((start, end, i))
        first, last = spans.get(r, (np.inf, 0.0))
        spans[r] = min(first, start), max(last, end)
    horizon = TOLERANCE * max((last for _, last in spans.values()), default=0.0)
    for lane, entries in sorted(timeline.items()):
        entries.sort()
        for (_, end, i), (start, _, j) in pairwise(entries):
            if start < end - horizon:
                wrong.append(f"lane {lane}: item {j} starts at {start:g} us, before item {i} ends at {end:g} us")
    for r, following in pairwise(sorted(spans)):
        if spans[following][0] < spans[r][1] - horizon:
            wrong.append(f"C4: round {following} starts before round {r} is over")
    return wrong


def _prediction(schedule, items, profiles, limits):
    """C4: each round lasts as long as its longest item and as its load over the lanes, filled and emptied once.

    The sum of the rounds and their launches is what the record says.
    """
    longest: defaultdict[int, float] = defaultdict(float)
    load: defaultdict[int, float] = defaultdict(float)
    launches = set()
    for tile, _, _, _, k, _, r, _, _ in items:
        shape = profiles[tile].shapes[k]
        longest[r] = max(longest[r], shape.alone_us)
        load[r] += shape.latency_us
        launches.add((r, tile, k))
    uneven: defaultdict[int, float] = defaultdict(float)
    for r, tile, _ in launches:
        uneven[r] = max(uneven[r], profiles[tile].tile_us)
    rounds = {r: max(longest[r], load[r] / limits.lanes + uneven[r]) for r in load}
    total = sum(rounds.values()) + limits.round_us * len(rounds)
    total += sum(profiles[tile].launch_us for _, tile, _ in launches)
    wrong = []
    stated = schedule.predicted_us if schedule.own_us is None else schedule.own_us
    if not np.isclose(total, stated, rtol=TOLERANCE, atol=0):
        wrong.append(f"C4: the work list takes {total:g} us, the record predicts {stated:g} us")
    wrong += _choice(schedule, total, profiles)
    value = total if schedule.objective == "sum" else max(rounds.values(), default=0.0)
    if not np.isclose(value, schedule.objective_us, rtol=TOLERANCE, atol=0):
        wrong.append(
            f"the objective {schedule.objective} is {value:g} us, the record says {schedule.objective_us:g} us"
        )
    if schedule.bound_us > value * (1 + TOLERANCE):
        wrong.append(f"the bound {schedule.bound_us:g} us lies above the objective {value:g} us")
    return wrong


def _choice(schedule, tiles_us, profiles):
    """What runs is the fastest of the work list and torch's own kernels, as the profiles state their times."""
    timed = {"tiles": tiles_us, **{f"torch:{name}": us for name, us in (schedule.torch_us or {}).items()}}
    if schedule.runs not in timed:
        return [f"the schedule runs {schedule.runs}, of which no time is known; known: {', '.join(timed)}"]
    wrong, taken = [], timed[schedule.runs]
    if schedule.torch_us and schedule.torch_us not in [profiles[name].torch_us for name in schedule.tiles]:
        wrong.append(f"the schedule states {schedule.torch_us} us of torch's kernels, which no profile does")
    if (schedule.runs == "tiles") != (schedule.own_us is None):
        wrong.append(f"the schedule runs {schedule.runs} and states {schedule.own_us} us for its tiles beside it")
    if not np.isclose(taken, schedule.predicted_us, rtol=TOLERANCE, atol=0):
        wrong.append(f"{schedule.runs} takes {taken:g} us, the record predicts {schedule.predicted_us:g} us")
    best = min(timed, key=lambda name: timed[name])
    if taken > timed[best] * (1 + TOLERANCE):
        wrong.append(f"the schedule runs {schedule.runs}, {taken:g} us, where {best} takes {timed[best]:g} us")
    return wrong

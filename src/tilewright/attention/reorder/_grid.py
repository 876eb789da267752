"""Grids found in a pattern: windows on a line, an image or a volume, whatever the order of the tokens (stage T2).

A pattern is windows on a grid when its distinct rows have coordinates such that the rows which see a key fill a box.
What some queries forbid then is a union of few rectangles, one for each coordinate that they have along each axis (see
`attention.cuda.mask_factors`), and compact boxes of queries share most keys. No clustering by shared keys finds boxes
as exactly as coordinates do.

Coordinates are guessed, first from the offsets between the rows that see a key, which tell the sides of a grid whose
tokens come line by line, then from neighbours: of two neighbours on a grid, no row is closer to both than they are to
each other. A guess is checked against every key of the pattern, so that a wrong one costs time and is never used.
"""

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._axes import WIDE
from tilewright.attention.reorder._quotient import Quotient, join, quotient, rename, split, transpose
from tilewright.core.compiled import njit

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Most axes of a grid.
AXES = 3
# Queries of a box, those of the published measure of gathered work.
GROUP = 64
# Rows compared with each row. Windows ten times as long along one axis than along the other need about 20.
NEAR = 32
# Of the keys that tell two neighbours apart, about so many are counted to find near rows, all to find the nearest.
TELLING = 16
# Rows that are looked at first: where their neighbours are not those of a grid, the others are not.
PROBES = 24
# Keys in a step of a GPU, and depth of its two products with a head dim of 64: a mask of rank R costs R / DEPTH more.
STEP_KEYS, DEPTH = 64, 128


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the rows of a `Quotient` lie: coordinates int64 [R, axes] on the grid number `part` int64 [R].

    sides: of the largest grid. wrapped: whether windows go around, by axis. reach: most rows that see a key, by axis.
    """

    coordinates: np.ndarray
    part: np.ndarray
    sides: tuple[int, ...]
    wrapped: tuple[bool, ...]
    reach: tuple[int, ...]

    @property
    def info(self) -> dict:
        """What `reorder.apply` says of it."""
        return {"sides": list(self.sides), "wrapped": list(self.wrapped), "parts": int(self.part.max()) + 1}


def order(graph: "Graph") -> tuple[NDArray[np.int32], dict[str, Any]] | None:
    """``(row_order int32 [N_q], info)`` of `graph` in boxes of its grid; None where it has none.

    Wide rows and rows without keys come last (see `_quotient.parts`).
    """
    ordinary, others = _rows(graph)
    q = quotient(graph, ordinary, exact=True)
    grid = find(q)
    if grid is None:
        return None
    arranged, box = arrange(grid, q.size)
    rest = [(other, np.arange(len(other.rows))) for other in others]
    return join(graph, [(q, arranged), *rest]), grid.info | {"box": box}


def _rows(graph):
    """Distinct rows of a graph that are ordinary, and quotients of the others."""
    found = split(graph, WIDE)
    return found[0], [quotient(graph, rows) for rows in found[1:] if len(rows)]


# ------------------------------------------------------------------------------------ finding


def find(q: Quotient) -> Grid | None:
    """The `Grid` of the rows of a `Quotient` that holds all units, or None."""
    if not len(q.rows):
        return None
    return _by_offsets(q) or _by_neighbours(q)


def checked(q: Quotient, coordinates: NDArray[np.int64], part: NDArray[np.int64]) -> Grid | None:
    """The `Grid` of these coordinates int64 [R, axes], or None where the rows that see some key fill no box of it.

    Axes come in a fixed order, the longest last.
    """
    sides = tuple(int(n) for n in coordinates.max(0) + 1)
    cell = np.ravel_multi_index((part, *coordinates.T), (int(part.max()) + 1, *sides))
    if len(np.unique(cell)) < len(cell):
        return None
    reach, wrapped = np.zeros(len(sides), np.int64), np.zeros(len(sides), np.bool_)
    if not _boxes(q.col_ptr, q.col_rows, coordinates, part, np.array(sides), reach, wrapped) or reach.max() < 2:
        return None
    # Several grids may go around at the same place only.
    if wrapped.any() and len(cell) != math.prod(sides) * (int(part.max()) + 1):
        return None
    axes = sorted(range(len(sides)), key=lambda a: (sides[a], reach[a]))
    return Grid(
        np.ascontiguousarray(coordinates[:, axes]),
        part,
        tuple(sides[a] for a in axes),
        tuple(bool(wrapped[a]) for a in axes),
        tuple(int(reach[a]) for a in axes),
    )


@njit(cache=True)
def _boxes(col_ptr, col_rows, coordinates, part, sides, reach, wrapped):
    """Whether the rows of every unit fill a box of one part. Fills in, by axis, the longest side of these boxes, and
    whether some box goes around the end of the axis."""
    n_axes = len(sides)
    seen, count = np.full((n_axes, sides.max()), -1, np.int64), np.zeros(n_axes, np.int64)
    for k in range(len(col_ptr) - 1):
        lo, hi = col_ptr[k], col_ptr[k + 1]
        if lo == hi:
            continue
        count[:] = 0
        for e in range(lo, hi):
            row = col_rows[e]
            if part[row] != part[col_rows[lo]]:
                return False
            for a in range(n_axes):
                at = coordinates[row, a]
                if seen[a, at] != k:
                    seen[a, at] = k
                    count[a] += 1
        area = 1
        for a in range(n_axes):
            area *= count[a]
        # Rows have different places, so that as many as the product has places fill it.
        if area != hi - lo:
            return False
        for a in range(n_axes):
            reach[a] = max(reach[a], count[a])
            # A range begins where a place is taken and the one before it is not; one that goes around, nowhere else.
            begins = 0
            for e in range(lo, hi):
                at = coordinates[col_rows[e], a]
                if seen[a, at] == k and seen[a, (at - 1) % sides[a]] != k:
                    begins += 1
            begins //= area // count[a]
            if begins > 1:
                return False
            around = seen[a, 0] == k and seen[a, sides[a] - 1] == k and count[a] < sides[a]
            wrapped[a] = wrapped[a] or around
    return True


def _by_offsets(q):
    """The `Grid` of rows that come line by line, or None. The rows that see a key lie a line apart."""
    count = np.diff(q.col_ptr)
    most = np.flatnonzero(count == count.max())
    votes: dict = {}
    # Most windows do not go around an end.
    for unit in most[np.linspace(0, len(most) - 1, 15).astype(int)]:
        strides = _strides(q.col_rows[q.col_ptr[unit] : q.col_ptr[unit + 1]])
        votes[strides] = votes.get(strides, 0) + 1
    strides = max(votes, key=lambda each: votes[each])
    bounds = (len(q.rows), *strides[::-1], 1)
    if len(strides) >= AXES or any(outer % inner for outer, inner in itertools.pairwise(bounds)):
        return None
    sides = [outer // inner for outer, inner in itertools.pairwise(bounds)]
    coordinates = np.stack(np.unravel_index(np.arange(len(q.rows)), sides), 1)
    return checked(q, coordinates, np.zeros(len(q.rows), np.int64))


def _strides(rows):
    """Distances between the lines, then the planes, that ascending `rows` of one box lie in."""
    strides, begin = [], rows[np.append(True, np.diff(rows) != 1)]
    while len(begin) > 1:
        strides.append(int(np.diff(begin).min()))
        begin = begin[np.append(True, np.diff(begin) != strides[-1])]
    return tuple(strides)


def _by_neighbours(q):
    """The `Grid` that neighbouring rows form, or None."""
    n_rows = len(q.rows)
    order, *csr = _local(q.indptr, q.indices, q.col_ptr, q.col_rows)
    sample = _sampled(*csr)
    if n_rows > 4 * PROBES * NEAR:
        probes = np.random.default_rng(0).choice(n_rows, PROBES, replace=False)
        around = _nearest(csr, sample, probes)[0]
        around = np.unique(np.append(around[around >= 0], probes))
        near, apart = np.full((n_rows, NEAR), -1, np.int32), np.zeros((n_rows, NEAR), np.int32)
        near[around], apart[around] = _nearest(csr, sample, around)
        common = np.bincount(csr[1]) > 1
        pairs = zip(probes, _neighbours(near, apart, probes), strict=True)
        if not all(_amid(*csr, row, beside, common) for row, beside in pairs):  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
            return None
    every = np.arange(n_rows)
    adjacent = _neighbours(*_nearest(csr, sample, every), every)
    found = None if (adjacent[:, -1] >= 0).any() else _develop(adjacent[:, :-1])
    if found is None:
        return None
    place = np.argsort(order)
    return checked(q, *(each[place] for each in found))


def _amid(indptr, indices, row, beside, common):
    """Whether `row` may lie amid the neighbours `beside` on a grid.

    They are few, it sees whatever two of them see, and one of them sees whatever it sees. common: bool, the units that
    several rows see.
    """
    if beside[-1] >= 0:
        return False
    own, *others = (indices[indptr[r] : indptr[r + 1]] for r in (row, *beside[beside >= 0]))
    seen = np.bincount(np.concatenate((own[:0], *others)), minlength=len(common))
    return bool((seen[own[common[own]]] > 0).all() and np.isin(np.flatnonzero(seen > 1), own).all())


@njit(cache=True)
def _local(indptr, indices, col_ptr, col_rows):
    """``(order, indptr, indices)``: rows and units renumbered as a breadth-first search meets them.

    What is near in the pattern then is near in memory: of shuffled tokens, near rows are found four times as fast.
    """
    n_rows = len(indptr) - 1
    order, met, n = np.empty(n_rows, np.int64), np.zeros(n_rows, np.bool_), 0
    name, named = np.full(len(col_ptr) - 1, -1, np.int32), 0
    ptr, out, at = np.zeros(n_rows + 1, np.int64), np.empty(len(indices), np.int32), 0
    for first in range(n_rows):
        if not met[first]:
            met[first], order[n] = True, first
            n += 1
        while at < n:
            row = order[at]
            ptr[at + 1] = ptr[at] + indptr[row + 1] - indptr[row]
            for e in range(indptr[row], indptr[row + 1]):
                unit = indices[e]
                if name[unit] < 0:
                    name[unit] = named
                    named += 1
                    for f in range(col_ptr[unit], col_ptr[unit + 1]):
                        other = col_rows[f]
                        if not met[other]:
                            met[other], order[n] = True, other
                            n += 1
                out[ptr[at] + e - indptr[row]] = name[unit]
            at += 1
    return order, ptr, out


def _sampled(indptr, indices):
    """``(indptr, indices, col_ptr, col_rows)`` of a part of the units, enough to tell which rows are near."""
    n_units, generator = int(indices.max()) + 1, np.random.default_rng(0)
    some = generator.choice(len(indptr) - 1, min(len(indptr) - 1, PROBES), replace=False)
    apart = _near_rows(indptr, indices, *transpose(indptr, indices, n_units), indptr, indices, some)[1][:, 0]
    share = TELLING / max(TELLING, np.median(apart[apart > 0])) if apart.any() else 1.0
    name = np.full(n_units, -1, np.int32)
    kept = generator.random(n_units) < share
    name[kept] = np.arange(kept.sum())
    indptr, indices = rename(indptr, indices, name)
    return indptr, indices, *transpose(indptr, indices, int(kept.sum()))


def _nearest(csr, sample, rows):
    """``(near, apart)``, int32 [len(rows), NEAR] each: rows with the fewest units that only one of the two sees, the
    nearest first, and the number of these units; -1 where there are fewer rows."""
    workers = max(1, min(len(os.sched_getaffinity(0)), len(rows) // 1024))
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(lambda some: _near_rows(*sample, *csr, some), np.array_split(rows, workers)))
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


@njit(cache=True, nogil=True)
def _near_rows(indptr, indices, col_ptr, col_rows, full_ptr, full_indices, rows):
    """`_nearest` of some `rows`: chosen by the units of a sample, ordered by all units."""
    n_rows = len(indptr) - 1
    near, apart = np.full((len(rows), NEAR), -1, np.int32), np.zeros((len(rows), NEAR), np.int32)
    common, met = np.zeros(n_rows, np.int32), np.empty(n_rows, np.int32)
    marked = np.full(full_indices.max() + 1, -1, np.int32)
    best, least = np.empty(NEAR, np.int32), np.empty(NEAR, np.int32)
    for i in range(len(rows)):
        row, n = rows[i], 0
        for e in range(indptr[row], indptr[row + 1]):
            unit = indices[e]
            for f in range(col_ptr[unit], col_ptr[unit + 1]):
                other = col_rows[f]
                if common[other] == 0:
                    met[n] = other
                    n += 1
                common[other] += 1
        filled = 0
        for j in range(n):
            other = met[j]
            far = indptr[row + 1] - indptr[row] + indptr[other + 1] - indptr[other] - 2 * common[other]
            common[other] = 0
            if other == row or (filled == NEAR and far >= least[NEAR - 1]):
                continue
            filled = min(filled + 1, NEAR)
            at = filled - 1
            while at > 0 and least[at - 1] > far:
                least[at], best[at] = least[at - 1], best[at - 1]
                at -= 1
            least[at], best[at] = far, other
        degree = full_ptr[row + 1] - full_ptr[row]
        for e in range(full_ptr[row], full_ptr[row + 1]):
            marked[full_indices[e]] = i
        for j in range(filled):
            other, shared = best[j], 0
            for e in range(full_ptr[other], full_ptr[other + 1]):
                shared += marked[full_indices[e]] == i
            far = degree + full_ptr[other + 1] - full_ptr[other] - 2 * shared
            at = j
            while at > 0 and apart[i, at - 1] > far:
                apart[i, at], near[i, at] = apart[i, at - 1], near[i, at - 1]
                at -= 1
            apart[i, at], near[i, at] = far, other
    return near, apart


@njit(cache=True)
def _neighbours(near, apart, rows):
    """int32 [len(rows), 2 * AXES + 1], -1 where fewer: of the `near` rows of each of `rows`, its neighbours.

    No third row is nearer to both of two neighbours than they are to each other (the relative neighbourhood graph).
    """
    found = np.full((len(rows), 2 * AXES + 1), -1, np.int32)
    for i in range(len(rows)):
        row, n = rows[i], 0
        for j in range(near.shape[1]):
            other, far = near[row, j], apart[row, j]
            if other < 0 or n == found.shape[1]:
                break
            between = False
            for h in range(j):
                if apart[row, h] >= far:
                    break
                third = near[row, h]
                for g in range(near.shape[1]):
                    if near[third, g] < 0 or apart[third, g] >= far:
                        break
                    if near[third, g] == other:
                        between = True
                        break
                if between:
                    break
            if not between:
                found[i, n] = other
                n += 1
    return found


def _develop(adjacent):
    """``(coordinates int64 [R, axes], part int64 [R])`` of rows by their neighbours int32 [R, 2 * AXES], or None."""
    degree = (adjacent >= 0).sum(1)
    # A row amid the grid has two neighbours along each axis.
    seeds = np.argsort(-degree, kind="stable")
    coordinates, part, period = _walk(adjacent, seeds)
    if period is None:
        return None
    coordinates = np.where(period > 0, coordinates % np.maximum(period, 1), coordinates)
    least = np.full((int(part.max()) + 1, coordinates.shape[1]), len(part))
    np.minimum.at(least, part, coordinates)
    coordinates -= least[part]
    used = max(1, int((coordinates.max(0) > 0).sum()))
    return coordinates[:, :used], part


@njit(cache=True)
def _walk(adjacent, seeds):
    """``(coordinates, part, period)``, the last int64 [axes], 0 where an axis has an end; None where there is no grid.

    The directions of a row are carried to its neighbours: the corner of a square that three rows lie in is the one row
    next to both others.
    """
    n_rows, n_ways = adjacent.shape
    # Along axis a, way 2a leads up and 2a + 1 down.
    way = np.full((n_rows, n_ways), -1, np.int32)
    coordinates, part = np.zeros((n_rows, n_ways // 2), np.int64), np.full(n_rows, -1, np.int64)
    period = np.zeros(n_ways // 2, np.int64)
    queue, n_parts = np.empty(n_rows, np.int64), 0
    for seed in seeds:
        if part[seed] >= 0:
            continue
        axis = 0
        for i in range(n_ways):
            one = adjacent[seed, i]
            if one < 0 or _known(way, seed, one):
                continue
            opposite = -1
            for j in range(i + 1, n_ways):
                other = adjacent[seed, j]
                if other >= 0 and not _known(way, seed, other) and _corner(adjacent, one, other, seed) < 0:
                    if opposite >= 0:
                        return coordinates, part, None
                    opposite = other
            way[seed, 2 * axis] = one
            way[seed, 2 * axis + 1] = opposite
            axis += 1
            if axis == n_ways // 2:
                break
        part[seed], queue[0], n, at = n_parts, seed, 1, 0
        while at < n:
            row = queue[at]
            at += 1
            for a in range(n_ways):
                other = way[row, a]
                if other < 0:
                    continue
                if part[other] < 0:
                    part[other], queue[n] = n_parts, other
                    n += 1
                    coordinates[other] = coordinates[row]
                    coordinates[other, a // 2] += 1 - 2 * (a % 2)
                    way[other, a ^ 1] = row
                    for b in range(n_ways):
                        if b // 2 != a // 2 and way[row, b] >= 0:
                            way[other, b] = _corner(adjacent, other, way[row, b], row)
                    for i in range(n_ways):
                        if adjacent[other, i] >= 0 and not _known(way, other, adjacent[other, i]):
                            if way[other, a] >= 0:
                                return coordinates, part, None
                            way[other, a] = adjacent[other, i]
                elif part[other] != n_parts:
                    return coordinates, part, None
                else:
                    # Around the end of an axis, the same row is met again a period further.
                    for b in range(n_ways // 2):
                        step = (1 - 2 * (a % 2)) if b == a // 2 else 0
                        around = abs(coordinates[row, b] + step - coordinates[other, b])
                        if around:
                            if period[b] and period[b] != around:
                                return coordinates, part, None
                            period[b] = around
        n_parts += 1
    return coordinates, part, period


@njit(cache=True)
def _known(way, row, other):
    return (way[row] == other).any()


@njit(cache=True)
def _corner(adjacent, one, other, besides):
    """The row next to `one` and to `other`, besides that one; -1 where there is none."""
    for i in range(adjacent.shape[1]):
        for j in range(adjacent.shape[1]):
            if adjacent[one, i] >= 0 and adjacent[one, i] == adjacent[other, j] and adjacent[one, i] != besides:
                return adjacent[one, i]
    return -1


# ------------------------------------------------------------------------------------ boxes


def arrange(grid: Grid, size: NDArray[np.float64]) -> tuple[NDArray[np.int64], list[int]]:
    """``(order int64 [R], sides of a box)``: the rows of a `Grid`, `size` queries each, box by box along lines."""
    axes = [_slabs(coordinate, size) for coordinate in grid.coordinates.T]
    lengths = [float(width.sum()) for width in axes]
    density = size.sum() / ((int(grid.part.max()) + 1) * math.prod(lengths))
    # Rows that a box may have, each of as many queries as are usual.
    room = max(1.0, GROUP / density)
    counts = _best_counts(lengths, grid.reach, room)
    boxes, halves, height, passed = [], [], 1.0, 0
    for coordinate, width, count in zip(grid.coordinates.T, axes, (*counts, None), strict=True):
        middle = (np.cumsum(width) - width / 2) / width.sum()
        # Along the last axis, as few boxes as the sides along the others leave room for.
        count = count or np.ceil(width.sum() / np.maximum(1, np.floor(room / height + 1e-9)))
        place = middle[coordinate] * count
        box = np.floor(place).astype(np.int64)
        # Every other line runs backwards.
        boxes.append(np.where(passed % 2 == 1, -box, box))
        passed = passed + box
        # A half of a box of 64 queries suits a tile of 32, a quarter one of 16.
        halves.append(place - box >= 0.5)
        by_box = np.bincount(np.floor(middle * np.max(count)).astype(np.int64), weights=width)
        height = height * by_box[box] if len(boxes) < len(axes) else height
    keys = (grid.part, *boxes, *halves, *grid.coordinates.T)
    sides = [round(length / count) for length, count in zip(lengths, counts, strict=False)]
    return np.lexsort(keys[::-1]), [*sides, max(1, int(room / math.prod(sides)))]


def _slabs(coordinate, size):
    """float64 [side]: how wide the rows at each place along an axis count, from the queries that share them."""
    queries = np.bincount(coordinate, weights=size)
    return queries / np.median(queries)


def _best_counts(lengths, reach, room):
    """Boxes along each axis but the last, which make attention cheapest; boxes have at most `room` rows."""
    options = [
        sorted({max(1, round(length / height)) for height in range(1, int(min(length, room)) + 1)})
        for length in lengths[:-1]
    ]
    return min(itertools.product(*options), key=lambda counts: _cost(counts, lengths, reach, room))


def _cost(counts, lengths, reach, room):
    """Steps of a GPU, and what their masks take, of boxes of which there are `counts` along each axis but the last."""
    steps, rank = 0.0, 0
    for heights in itertools.product(*(_split(n, count) for n, count in zip(lengths, counts, strict=False))):
        area, many = math.prod(h for h, _ in heights), math.prod(n for _, n in heights)
        if area > room:
            return math.inf
        for last, n in _split(lengths[-1], math.ceil(lengths[-1] / math.floor(room / area + 1e-9))):
            box = [*(h for h, _ in heights), last]
            union = math.prod(r + h - 1 for r, h in zip(reach, box, strict=True))
            steps += many * n * math.ceil(union / STEP_KEYS)
            rank = max(rank, sum(box))
    # Depth of the product that applies a mask, see `attention.cuda.tile_lists`; beyond, it is read for each pair.
    depth = next((depth for depth in (16, 32) if rank <= depth), 64)
    return steps * (1 + depth / DEPTH)


def _split(length, count):
    """``(height, number)`` of the stretches of an axis that is divided evenly."""
    length = round(length)
    low, more = divmod(length, count)
    return [(h, n) for h, n in ((low, count - more), (low + 1, more)) if h and n]

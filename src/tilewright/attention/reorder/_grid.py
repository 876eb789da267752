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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._axes import AXES, WIDE
from tilewright.attention.reorder._quotient import Quotient, join, quotient, split, take

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Queries of a box, those of the published measure of gathered work.
GROUP = 64
# Keys in a step of a GPU, and depth of its two products with a head dim of 64: a mask of rank R costs R / DEPTH more.
STEP_KEYS, DEPTH = 64, 128
# Units that are looked at together where they fill no box that has an end.
_UNITS = 1024


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
    if (found := _by_offsets(q)) is not None:
        return found
    # Here: it takes long to load.
    from tilewright.attention.reorder import _neighbours

    guess = _neighbours.coordinates(q)
    return None if guess is None else checked(q, *guess)


def checked(q: Quotient, coordinates: NDArray[np.int64], part: NDArray[np.int64]) -> Grid | None:
    """The `Grid` of these coordinates int64 [R, axes], or None where the rows that see some key fill no box of it.

    Axes come in a fixed order, the longest last.
    """
    sides = tuple(int(n) for n in coordinates.max(0) + 1)
    cell = np.ravel_multi_index((part, *coordinates.T), (int(part.max()) + 1, *sides))
    if len(np.unique(cell)) < len(cell):
        return None
    found = _boxes(q.col_ptr, q.col_rows, coordinates, part, sides)
    if found is None or found[0].max() < 2:
        return None
    reach, wrapped = found
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


def _boxes(col_ptr, col_rows, coordinates, part, sides):
    """``(reach, wrapped)`` where the rows of every unit fill a box of one part, else None: by axis, the longest side of
    these boxes, and whether some box goes around the end of the axis."""
    counts = np.diff(col_ptr)
    units, counts = np.flatnonzero(counts), counts[counts > 0]
    least, most = (
        np.stack([bound.reduceat(place[col_rows], col_ptr[units]) for place in (part, *coordinates.T)])
        for bound in (np.minimum, np.maximum)
    )
    if (least[0] != most[0]).any():
        return None
    length = most[1:] - least[1:] + 1
    # Rows have different places, so that as many as a box has places fill it.
    filled = length.prod(0) == counts
    reach, wrapped = length[:, filled].max(1, initial=0), np.zeros(len(sides), bool)
    others = np.flatnonzero(~filled)
    for some in np.split(others, np.arange(_UNITS, len(others), _UNITS)):
        unit = np.repeat(np.arange(len(some)), counts[some])
        rows = take(col_ptr, col_rows, units[some])[1]
        area = np.ones(len(some), np.int64)
        for a, side in enumerate(sides):
            places, begins, around = _around(unit, coordinates[rows, a], side)
            if begins > 1:
                return None
            area, reach[a], wrapped[a] = area * places, max(reach[a], places.max(initial=0)), wrapped[a] or around
        if (area != counts[some]).any():
            return None
    return reach, wrapped


def _around(unit, place, side):
    """Of rows that units see, by their `place` along an axis that may go around: ``(places of each unit, ranges that
    the places of one form, at most, whether one goes around)``."""
    key = np.unique(unit * side + place)
    unit, place = np.divmod(key, side)
    before = key - 1 + side * (place == 0)
    begins = key[np.searchsorted(key, before) % len(key)] != before
    count, first, last = (np.bincount(unit[each]) for each in (place >= 0, place == 0, place == side - 1))
    n = min(len(first), len(last))
    around = (first[:n] * last[:n] * (count[:n] < side)).any()
    return count, np.bincount(unit[begins]).max(initial=0), around


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

"""The least descriptors that move a list of granules, or a proof that a mover has none.

A sequence is moved by one descriptor exactly if it is a nest of loops, and nests have one form: where the innermost
loop goes on as far as the steps stay equal, every other nest of the sequence is this one with loops cut into factors.
So a sequence is tested by reading it once, and the least chain of descriptors is a shortest path over all places where
a chain may be cut. A chain that is made several times is searched over one round of it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np

from tilewright.core import arguments, deadline
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.movers import Descriptor, Mover, Task, check, replay

# Places where a chain may be cut, at most: beyond, it is cut between whole contiguous blocks.
MOST_CUTS = 4096
# Of a path: its descriptors, then their loops, then the sum of their steps.
_ONE, _LOOP, _STEPS = 1 << 52, 1 << 42, (1 << 42) - 1
_FAR = np.iinfo(np.int64).max // 2

SOLVED, NONE, UNKNOWN = "solved", "none", "unknown"


@dataclass(frozen=True)
class Answer:
    """What was found. status: `SOLVED`, `NONE` where no legal descriptors exist, or `UNKNOWN`.

    tasks: of a solution. least: whether fewer descriptors are excluded. why: in words, of which limit.
    """

    status: str
    tasks: tuple[Task, ...] = ()
    least: bool = False
    why: str = ""

    @property
    def descriptors(self) -> int:
        """How many there are."""
        return sum(len(task.descriptors) for task in self.tasks)


class _NotFound(Exception):
    """Why a nest is none of a mover."""


def descriptors(
    indices: np.ndarray, element_bytes: int, own: Mover, elements: int | None = None, limit_s: float | None = None
) -> Answer:
    """The `Answer` for elements of a buffer that are to be moved in this order.

    indices: integers [n]. element_bytes: of an element, a divisor or a multiple of the mover's granule. elements: of
    the buffer, where that is known. limit_s: seconds, after which the least so far counts. Raises `MappingError` for
    sizes that do not fit each other, and for indices outside of the buffer.
    """
    answer = deadline.last(lambda: _of_elements(indices, element_bytes, own, elements), limit_s)
    return answer or Answer(UNKNOWN, why="the time limit ended the search")


def _of_elements(indices, element_bytes, own, elements):
    """Yield answers, the last one `descriptors`'."""
    indices = np.asarray(indices)
    if indices.ndim != 1 or not (np.issubdtype(indices.dtype, np.integer) or not indices.size):
        raise MappingError(f"indices: expected integers [n], found {arguments.shown(indices)}")
    indices = indices.astype(np.int64)
    end = "or more" if elements is None else f"to {elements - 1}"
    outside = np.flatnonzero((indices < 0) | (indices >= (np.iinfo(np.int64).max if elements is None else elements)))
    if len(outside):
        at = int(outside[0])
        raise MappingError(f"indices: expected 0 {end}, found {int(indices[at])} at place {at}")
    if element_bytes % own.granule == 0 and element_bytes:
        number = element_bytes // own.granule
        yield from _answers((indices[:, None] * number + np.arange(number)).reshape(-1), own)
        return
    if element_bytes < 1 or own.granule % element_bytes:
        raise MappingError(
            f"expected elements of a divisor or a multiple of {own.granule} bytes, found {element_bytes}"
        )
    number = own.granule // element_bytes
    whole = len(indices) // number * number
    groups = indices[:whole].reshape(-1, number)
    torn = np.flatnonzero((groups[:, 0] % number != 0) | (groups != groups[:, :1] + np.arange(number)).any(1))
    place = int(torn[0]) * number if len(torn) else whole
    if place < len(indices):
        found = ", ".join(map(str, indices[place : place + number].tolist()))
        why = f"{own.granule} bytes are moved at a time: elements {found} at place {place} are not the neighbours that"
        yield Answer(NONE, (), True, f"{why} fill them")
    else:
        yield from _answers(groups[:, 0] // number, own)


def program(addresses: np.ndarray, own: Mover) -> Answer:
    """The `Answer` for granules int64 [n] that a channel of a mover is to move in this order.

    First the fewest descriptors count, then the fewest loops, then the smallest steps. Every solution was replayed.
    Raises `MappingError` for negative addresses.
    """
    return [*_answers(addresses, own)][-1]


def _answers(addresses, own):
    """Yield answers, each better than those before it."""
    if len(addresses) and int(addresses.min()) < 0:
        raise MappingError(f"expected addresses of at least 0, found {int(addresses.min())}")
    if not len(addresses):
        yield Answer(SOLVED, (), True, "nothing is to be moved")
        return
    nest, why = _nest(addresses), "the sequence is no nest of loops"
    if nest is not None:
        try:
            yield _checked(Answer(SOLVED, (_task(int(addresses[0]), nest, own, True),), True), addresses, own)
            return
        except _NotFound as reason:
            why = str(reason)
    block = 1 if len(addresses) <= MOST_CUTS else _block(addresses, min(own.longest, own.longest_step))
    every: Iterable
    if len(addresses) // block > MOST_CUTS:
        every = [_unrolled(int(addresses[0]), nest, own)] if nest else []
    else:
        every = chain([_plain(addresses, own, block)], _rounds(addresses, own, block))
        every = chain([_unrolled(int(addresses[0]), nest, own)], every) if nest and block > 1 else every
    cost, best = _FAR, None
    for own_cost, tasks in filter(None, every):
        if own_cost < cost:
            cost, best = own_cost, Answer(SOLVED, tasks, False, f"one descriptor is not enough: {why}")
            yield _checked(best, addresses, own)
    # One descriptor is excluded above.
    needed = max(2, _apart(addresses, own))
    if best is not None:
        yield replace(best, least=block == 1 or cost // _ONE == needed)
    elif needed > own.descriptors:
        yield Answer(NONE, (), True, f"{needed} parts are further apart than {own.longest_step} granules: {why}")
    elif len(addresses) // block > MOST_CUTS:
        yield Answer(UNKNOWN, why=f"{why}, and its {len(addresses)} granules have too many places for a cut")
    else:
        why = f"more than {own.descriptors} descriptors are needed: {why}"
        yield Answer(NONE, (), True, why) if block == 1 else Answer(UNKNOWN, why=why)


def _apart(addresses, own):
    """Parts that are further apart than the longest step: a descriptor each at least, where no address goes back. What
    is made several times then moves on by more than it spans, and so has no such step in it."""
    steps = np.diff(addresses)
    return int((steps > own.longest_step).sum()) + 1 if (steps >= 0).all() else 1


def _checked(answer, addresses, own):
    """The answer, if the mover may have it and it moves what it should."""
    check(answer.tasks, own)
    if not np.array_equal(replay(answer.tasks), addresses):
        raise AssertionError("descriptors move other granules than those that were asked for")
    return answer


def _nest(addresses):
    """Loops ``[(rounds, step)]``, innermost first, whose addresses these are, or None."""
    loops, rows = [], addresses
    while len(rows) > 1:
        width = _equal_steps(rows)
        if len(rows) % width:
            return None
        starts = rows[::width]
        if not np.array_equal(rows.reshape(-1, width), starts[:, None] + (rows[:width] - rows[0])):
            return None
        loops.append((width, int(rows[1] - rows[0])))
        rows = starts
    return loops


def _equal_steps(rows):
    """How many of `rows`, from the first, are as far from each other as the first two."""
    steps = np.diff(rows)
    others = np.flatnonzero(steps != steps[0])
    return int(others[0]) + 1 if len(others) else len(rows)


def _task(base, loops, own, iterated):
    """One descriptor as a `Task`. iterated: it may be made several times. Raises `_NotFound`."""
    reasons, found = [], []
    rounds, step = loops[-1] if loops else (1, 1)
    for times in _divisors(rounds) if iterated else (1,):
        inner = loops[:-1] + [(rounds // times, step)] * (rounds > times)
        if times > (own.most_repeats if step == 0 else own.most_iterations):
            continue
        forward = step * (rounds // times) if times > 1 else 0
        try:
            sizes, steps = _slots(inner, own)
        except _NotFound as reason:
            reasons.append(str(reason))
            continue
        if not 0 <= forward <= own.longest_step:
            reasons.append(f"a step of {forward} granules, where {own.longest_step} is the longest")
            continue
        found.append(Task((Descriptor(base, sizes, steps, forward),), times))
    if not found:
        raise _NotFound(reasons[0])
    return min(found, key=lambda task: _cost(task.descriptors[0], task.times))


def _cost(descriptor, times=1):
    loops = descriptor.dimensions + (times > 1)
    return loops, sum(s for n, s in zip(descriptor.sizes, descriptor.steps, strict=True) if n > 1) + descriptor.forward


def _slots(loops, own):
    """``(sizes, steps)`` of a descriptor. Raises `_NotFound`."""
    for rounds, step in loops:
        if step < 1:
            known = "goes back" if step < 0 else "stays in place"
            raise _NotFound(f"a loop of {rounds} rounds {known} (step {step}), where steps are at least 1")
    parts = [part for loop in loops[:-1] for part in _split(*loop, own.longest_wrap, own.dimensions)]
    sizes, steps = [n for n, _ in parts], [s for _, s in parts]
    if loops:
        rounds, step = loops[-1]
        # The outermost loop of all has no wrap.
        free = 0 if rounds <= own.longest_wrap else own.dimensions - 1 - len(sizes)
        sizes, steps = [*sizes, *[1] * free, rounds], [*steps, *[1] * free, step]
    if len(sizes) > own.dimensions:
        raise _NotFound(f"{len(sizes)} loops are needed, where {own.dimensions} are there")
    if max(steps, default=1) > own.longest_step:
        raise _NotFound(f"a step of {max(steps)} granules, where {own.longest_step} is the longest")
    if (length := math.prod(sizes)) > own.longest:
        raise _NotFound(f"{length} granules at a time, where {own.longest} are the most")
    return tuple(sizes) or (1,), tuple(steps) or (1,)


@lru_cache(4096)
def _split(rounds, step, most, loops):
    """A loop as the fewest loops of at most `most` rounds, of small steps. Raises `_NotFound` beyond `loops`."""
    for number in range(1, loops + 1):
        if (found := _factors(rounds, most, number)) is not None:
            steps = np.cumprod([step, *found[:-1]], dtype=object)
            return tuple(zip(found, map(int, steps), strict=True))
    raise _NotFound(f"a loop of {rounds} rounds is no product of {loops} wraps of at most {most}")


def _factors(rounds, most, number):
    """So many factors of at most `most` each, small ones first, or None."""
    if number == 1:
        return (rounds,) if rounds <= most else None
    for first in _divisors(rounds)[1:]:
        if first <= most and (rest := _factors(rounds // first, most, number - 1)) is not None:
            return (first, *rest)
    return None


@lru_cache(4096)
def _divisors(n):
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _block(addresses, most):
    """Granules, at most so many, of which contiguous blocks all runs consist."""
    ends = np.flatnonzero(np.diff(addresses) != 1) + 1
    return max(each for each in _divisors(math.gcd(len(addresses), *map(int, ends))) if each <= most)


def _plain(addresses, own, block):
    """``(cost, tasks)`` of the least chain in which each descriptor may be made several times, or None."""
    found = _chain(addresses, own, block, True, np.zeros(0, np.int64))
    if found is None:
        return None
    cost, pieces = found
    made = [_task(int(piece[0]), _nest(piece), own, True) for piece in pieces]
    tasks: list[Task] = []
    for task in made:
        if tasks and tasks[-1].times == task.times == 1:
            tasks[-1] = Task((*tasks[-1].descriptors, *task.descriptors))
        else:
            tasks.append(task)
    return cost, tuple(tasks)


def _unrolled(base, nest, own):
    """``(cost, tasks)`` of a nest whose outer loops are written out and the next one is cut in parts, or None."""
    best = None
    for outer in range(len(nest)):
        inner, (rounds, step) = nest[: -outer - 1], nest[-outer - 1]
        starts = np.array([base])
        for count, further in nest[: len(inner) : -1]:
            starts = (starts[:, None] + further * np.arange(count)).reshape(-1)
        most = own.descriptors // len(starts) if best is None else (best[0] // _ONE - 1) // len(starts)
        for parts in range(1, min(most, rounds) + 1):
            each = -(-rounds // parts)
            sizes = [each] * (rounds // each) + [rounds % each] * (rounds % each > 0)
            begins = np.cumsum([0, *sizes[:-1]]) * step
            try:
                made = [
                    _task(int(start + begin), inner + [(size, step)] * (size > 1), own, True)
                    for start in starts
                    for begin, size in zip(begins, sizes, strict=True)
                ]
            except _NotFound:
                continue
            best = len(made) * _ONE, tuple(made)
            break
    return best


def _rounds(addresses, own, block) -> Iterator:
    """``(cost, tasks)`` of the least chain of one round, for each number of rounds that the sequence consists of."""
    for times in _divisors(len(addresses))[1:]:
        length = len(addresses) // times
        if times > own.most_repeats or length < 2 or length % block:
            continue
        rows = addresses.reshape(times, length)
        forward = rows[1] - rows[0]
        if not np.array_equal(rows, rows[0] + np.arange(times)[:, None] * forward):
            continue
        if int(forward.min()) < 0 or int(forward.max()) > own.longest_step:
            continue
        if times > own.most_iterations and forward.any():
            continue
        breaks = np.flatnonzero(np.diff(forward)) + 1
        if (breaks % block).any() or (found := _chain(rows[0], own, block, False, breaks)) is None:
            continue
        cost, pieces = found
        at, made = 0, []
        for piece in pieces:
            (descriptor,) = _task(int(piece[0]), _nest(piece), own, False).descriptors
            made.append(Descriptor(descriptor.base, descriptor.sizes, descriptor.steps, int(forward[at])))
            at += len(piece)
        yield cost + len(pieces) * _LOOP + sum(own.forward for own in made), (Task(tuple(made), times),)


def _chain(addresses, own, block, iterated, breaks):
    """``(cost, pieces)`` of the least chain, cut between blocks and at all `breaks`; None where none is legal."""
    starts = addresses[::block]
    n = len(starts)
    stops = np.append(breaks // block, n)
    cost, before = np.full(n + 1, _FAR), np.zeros(n + 1, np.int64)
    cost[0] = 0
    for i in range(n):
        if cost[i] >= own.descriptors * _ONE:
            continue
        stop = stops[np.searchsorted(stops, i, "right")]
        for ends, added in _ends(starts[i:stop], own, block, iterated):
            better = ends[cost[i] + added < cost[i + ends]] + i
            cost[better], before[better] = cost[i] + added, i
    if cost[n] >= _FAR:
        return None
    cuts = [n]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    cuts.reverse()
    pieces = [addresses[a * block : b * block] for a, b in pairwise(cuts)]
    return int(cost[n]), pieces


def _ends(rows, own, block, iterated):
    """Yield ``(blocks, cost)`` for pieces of `rows`, the starts of blocks, that are one descriptor each: how many
    blocks they have, int64 [k], of the same cost."""
    inner = [(block, 1)] if block > 1 else []
    yield np.array([1]), _ONE + len(inner) * (_LOOP + 1)
    unit, steps, slots = 1, 0, 0
    while len(rows) > 1:
        width, step = _equal_steps(rows), int(rows[1] - rows[0])
        if unit == 1 and inner and step == block:
            # Blocks that touch are one loop.
            inner = []
            size, own_step = block, 1
        else:
            size, own_step = 1, step
            try:
                slots = sum(len(_split(*loop, own.longest_wrap, own.dimensions)) for loop in inner)
            except _NotFound:
                return
        if own_step > own.longest_step or own_step < 0 or slots > own.dimensions:
            return
        moved = math.prod(n for n, _ in inner) * size
        nested = own_step > 0 and slots < own.dimensions
        most = own.longest // moved if nested else 0
        if iterated and moved <= own.longest:
            most = max(most, own.most_repeats if own_step == 0 else own.most_iterations)
        counts = np.arange(2, min(width, most) + 1)
        loops = len(inner) + 1
        yield unit * counts, _ONE + loops * _LOOP + min(steps + own_step + (block > 1 and unit == 1), _STEPS)
        if own_step == 0:
            return
        whole = len(rows) // width
        table = rows[: whole * width].reshape(whole, width)
        same = np.flatnonzero((table - table[:, :1] != table[0] - table[0, 0]).any(1))
        whole = int(same[0]) if len(same) else whole
        if whole < 2:
            return
        inner = [*inner, (size * width, own_step)]
        rows, unit, steps = table[:whole, 0], unit * width, steps + own_step

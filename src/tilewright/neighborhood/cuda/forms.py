"""How neighbourhoods are cut into boxes for a GPU (stages T3 and T4): the candidates, what they cost, the choice."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import torch

from tilewright.neighborhood.rule import Axis, Rule

# ASSUME: an H200's; which box is best does not hang on a few more or less.
MULTIPROCESSORS = 132
# Boxes of an axis that its extents are read from, at each end: windows repeat in between.
_ENDS = 512


@dataclass(frozen=True)
class Form:
    """A box of queries, and how its keys are walked.

    box: queries along each axis of the grid, powers of two. walk: the axis whose places are walked. step_keys: keys a
    step. num_warps, num_stages: of a program. registers: most of a thread, None for what the compiler takes. run: boxes
    of a program, one after the other along that axis.
    """

    box: tuple[int, ...]
    walk: int
    step_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None
    run: int = 1

    @property
    def options(self) -> dict:
        """What a launch is told of it."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}

    @property
    def name(self) -> str:
        """The form as tables name it, such as ``4x4x4 along 0``."""
        again = f", {self.run} a program" if self.run > 1 else ""
        return f"{'x'.join(map(str, self.box))} along {self.walk}{again}"


@lru_cache(4096)
def extent(axis: Axis, length: int, size: int, turned: bool = False) -> int:
    """Tokens that a box of `size` queries sees along an axis, at most; turned: queries that see a box of keys, as is
    usual away from borders."""
    n = -(-length // axis.dilation)
    first = np.arange(0, n, size, dtype=np.int64)
    if first.size > 2 * _ENDS:
        first = np.concatenate([first[:_ENDS], first[-_ENDS:]])
    last = np.minimum(first + size, n) - 1
    reach = axis.queries if turned else axis.keys
    spans = reach(last, n)[1] - reach(first, n)[0]
    return max(1, int(np.median(spans) if turned else spans.max()))


def chunks(cells: int, places: int, step_keys: int) -> tuple[int, int, int]:
    """``(C1, C2, steps)`` of `kernels` for a plane of `cells`, walked at so many places: the fewest steps."""

    def steps(c):
        return -(-places // (step_keys // c)) if c else 0

    if cells <= step_keys:
        # One chunk, made once for all boxes of a program.
        c = 1 << (cells - 1).bit_length()
        return c, 0, steps(c)
    whole, rest = divmod(cells, step_keys)
    if not rest:
        return 0, 0, whole * places
    above = 1 << (rest - 1).bit_length()
    found = [(steps(above), above, 0)]
    if below := above // 2:
        more = 1 << (rest - below - 1).bit_length()
        found.append((steps(below) + steps(more), below, more))
    least, c1, c2 = min(found)
    # A chunk of all keys of a step is a whole one.
    return (0 if c1 == step_keys else c1), c2, whole * places + least


@dataclass(frozen=True)
class Work:
    """What a form has to do for one head of one image: boxes, the steps of each, and the chunks beside whole ones."""

    boxes: int
    steps: int
    c1: int
    c2: int
    single: bool


def work(rule: Rule, grid: tuple[int, ...], form: Form, turned: bool = False) -> Work:
    """The `Work` of a form; turned: of the gradients of keys, whose boxes are of keys."""
    extents = [extent(a, n, t, turned) for a, n, t in zip(rule.axes, grid, form.box, strict=True)]
    boxes = prod(a.dilation * -(-n // (a.dilation * t)) for a, n, t in zip(rule.axes, grid, form.box, strict=True))
    places = extents[form.walk]
    cells = prod(extents) // places
    c1, c2, steps = chunks(cells, places, form.step_keys)
    return Work(boxes, steps, c1, c2, cells <= form.step_keys)


def boxes(rule: Rule, grid: tuple[int, ...], queries: int) -> list[tuple[int, ...]]:
    """Boxes of so many queries, a power of two, none longer than twice its axis where there are such."""
    powers = [1 << i for i in range(queries.bit_length())]
    found = [box for box in product(powers, repeat=len(grid)) if prod(box) == queries]
    most = [max(2, 2 * -(-n // a.dilation)) for a, n in zip(rule.axes, grid, strict=True)]
    return [box for box in found if all(t < m for t, m in zip(box, most, strict=True))] or found


# What a step takes an H200, in one multiprocessor's time, by queries of a box in 16 bits, in parts of one with 64; and
# with four programs a multiprocessor rather than three, which hide more of each other's waits.
# Beside their steps, in steps: a box, a program, which computes a run of boxes, a part of a plane of several chunks.
# Fitted to times of windows of 3 to 15 tokens along an axis.
_STEP = {64: 1.0, 128: 2.17}
_FOUR = 0.88
_BOX, _PROGRAM, _PART = 2.0, 1.0, 1.5
_RUNS = (1, 2, 3, 4, 6, 8)
# Waves of programs beyond which the last one, not full, does not count.
_WAVES = 5


def shaped(box: tuple[int, ...], walk: int, chunk: int, head_dim: int, dtype: torch.dtype) -> Form:
    """The form of a box that the compiler makes the best of; chunk: cells of the plane's only one, 0 for several."""
    if dtype.itemsize > 2:
        return Form(box, walk, 32, num_warps=4, num_stages=1)
    warps = max(4, prod(box) // 16)
    if head_dim > 64:
        return Form(box, walk, 64 if head_dim <= 128 else 32, warps, num_stages=3 if head_dim <= 128 else 2)
    few = prod(box) > 64 or head_dim <= 32 or 0 < chunk < 64
    return Form(box, walk, 64, warps, num_stages=3, registers=128 if few else 168)


def slots(form: Form) -> int:
    """Programs that a multiprocessor holds, by their registers."""
    return max(1, 65536 // (32 * form.num_warps * (form.registers or 255)))


def candidates(rule: Rule, grid: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> list[Form]:
    """Forms of all boxes, each walked along each axis, without runs."""
    found = []
    for queries in _STEP if dtype.itemsize == 2 else (32,):
        for box in boxes(rule, grid, queries):
            for walk in range(len(grid)):
                form = shaped(box, walk, 0, head_dim, dtype)
                seen = work(rule, grid, form)
                found.append(shaped(box, walk, seen.c1 if seen.single else 0, head_dim, dtype))
    return found


def cost(rule: Rule, grid: tuple[int, ...], form: Form, heads: int) -> float:
    """The time that a form is predicted to take, in steps of a box of 64 queries on one multiprocessor.

    heads: of all images.
    """
    seen = work(rule, grid, form)
    parts = 0 if seen.single else 1 + bool(seen.c1) + bool(seen.c2)
    step = _STEP.get(prod(form.box), prod(form.box) / 64) * form.step_keys / 64 * (_FOUR if slots(form) == 4 else 1)
    one = form.run * (seen.steps + _BOX + _PART * parts) + _PROGRAM
    walked = -(-grid[form.walk] // (form.box[form.walk] * rule.dilation[form.walk]))
    programs = seen.boxes / walked * -(-walked // form.run) * heads
    waves = programs / (MULTIPROCESSORS * slots(form))
    return (waves if waves > _WAVES else math.ceil(waves)) * slots(form) * one * step


@lru_cache(1024)
def choose(rule: Rule, grid: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype) -> Form:
    """The form that is predicted to take the least time; heads: of all images."""
    found = candidates(rule, grid, head_dim, dtype)
    return with_run(rule, grid, min(found, key=lambda form: cost(rule, grid, form, heads)), heads, head_dim)


def with_run(rule: Rule, grid: tuple[int, ...], form: Form, heads: int, head_dim: int) -> Form:
    """A form with the fewest boxes a program that are predicted to take the least time."""
    if not work(rule, grid, form).single:
        return form
    costs = {run: cost(rule, grid, replace(form, run=run), heads) for run in _RUNS}
    # The fewest that are no worse: what is predicted is not known to 1 %.
    best = replace(form, run=next(run for run in _RUNS if costs[run] <= 1.01 * min(costs.values())))
    # A program of one box keeps what it needs to compute that once more.
    spills = best.run == 1 and best.registers == 128 and prod(best.box) == 64 and head_dim > 32
    return replace(best, registers=168) if spills else best


@lru_cache(1024)
def choose_backward(
    rule: Rule, grid: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Form, Form]:
    """Forms of the gradients of queries and of keys, whose boxes are of keys."""
    best = min(
        (form for form in candidates(rule, grid, head_dim, dtype) if prod(form.box) <= 64),
        key=lambda form: cost(rule, grid, replace(form, registers=None), heads),
    )
    # More blocks of registers than forward.
    keys = 32 if dtype.itemsize == 2 and head_dim <= 64 else 16
    form = replace(best, step_keys=keys, registers=None, num_stages=3 if dtype.itemsize == 2 and head_dim <= 64 else 1)
    return form, form

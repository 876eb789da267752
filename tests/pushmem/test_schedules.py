"""Schedules of stencils against brute force."""

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.push import stencil
from tilewright.pushmem import rates, schedule
from tilewright.pushmem.dsl import Input, Stage
from tilewright.pushmem.lowering import lower


@st.composite
def small(draw):
    """A program of up to three stages on an image of 4 × 4 to 6 × 6."""
    outputs = stencil(
        lambda low, high: draw(st.integers(low, high)), lambda m: draw(st.sampled_from(m)), most=3, sides=(4, 6)
    )
    return lower(outputs)


@st.composite
def meeting(draw):
    """Two early stages, a late one, and one that reads all: waiting keeps words of one buffer instead of two."""
    image = Input("in", (6, 5))
    (i, j), (k, m) = ((draw(st.integers(0, 2)), draw(st.integers(0, 1))) for _ in range(2))
    early = Stage("early", (6 - k, 5), lambda y, x: image[y + k, x] * 2)
    other = Stage("other", early.shape, lambda y, x: image[y + k, x] ^ 1)
    late = Stage("late", (6 - i, 5 - j), lambda y, x: image[y + i, x + j] + 1)
    shape = (min(early.shape[0], late.shape[0]), min(5 - m, late.shape[1]))
    return lower([Stage("meet", shape, lambda y, x: early[y, x + m] + other[y, x] + late[y, x])])


def spans(program, strides):
    """``{(reader, number of the read): (buffer, least, largest)}``: cycles from write to read, both begun at 0; by
    looking at every iteration."""
    found = {}
    for s in program.statements:
        grid = dict(zip(s.loops, np.indices(s.extents).reshape(len(s.extents), -1), strict=True))
        now = sum(grid[n] * k for n, k in zip(s.loops, strides[s.name], strict=True))
        for k, read in enumerate(s.reads):
            places = zip(read.indices, strides[read.buffer], strict=True)
            born = sum(np.broadcast_to(i.evaluate(grid), now.shape) * step for i, step in places)
            found[s.name, k] = read.buffer, int((now - born).min()), int((now - born).max())
    return found


def words_alive(edges, starts):
    """The cost of start cycles [choices, names]: of each buffer the largest distance, summed."""
    buffers = {b for _, b, _, _ in edges}
    return sum(np.max([high + starts[c] - starts[b] for c, b, _, high in edges if b == one], axis=0) for one in buffers)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(small(), meeting()))
def test_no_start_cycles_keep_fewer_words_than_the_linear_program(program):
    strides = rates.stencil(program)
    plan = schedule.schedule(program, strides)
    asked = spans(program, strides)
    assert {(e.statement, e.read): (e.buffer, e.low, e.high) for e in plan.edges} == asked
    edges = [(c, b, low, high) for (c, _), (b, low, high) in asked.items()]
    names = [s.name for s in program.statements]
    # All paths from the input add up to no more than this; the input itself starts at 0.
    most = sum(max([0, *(-low for c, _, low, _ in edges if c == n)]) for n in names) + 1
    grids = np.meshgrid(*[np.arange(most)] * len(names), indexing="ij")
    starts = dict(zip(names, (g.ravel() for g in grids), strict=True)) | {n: 0 for n in program.inputs}
    legal = np.all([starts[c] - starts[b] + low >= 0 for c, b, low, _ in edges], axis=0)
    cost = np.where(legal, words_alive(edges, starts), 1 << 40)
    assert words_alive(edges, plan.starts) == cost.min()
    assert all(plan.starts[c] - plan.starts[b] + low >= 0 for c, b, low, _ in edges)


def test_the_linear_program_waits_where_it_keeps_fewer_words_than_as_soon_as_possible():
    from tilewright.pushmem import mapping

    image = Input("in", (32, 32))
    twice = Stage("twice", (32, 32), lambda y, x: image[y, x] * 2)
    odd = Stage("odd", (32, 32), lambda y, x: image[y, x] + 1)
    late = Stage("late", (30, 32), lambda y, x: image[y + 2, x] + 1)
    # What reads twice and odd waits two rows for late: they may as well.
    meet = Stage("meet", (30, 32), lambda y, x: twice[y, x] + odd[y, x] + late[y, x])
    plan = mapping.compile([meet]).schedule
    assert plan.starts["twice"] == plan.starts["odd"] == 64


def test_spans_of_every_kind_of_index_are_those_of_enumeration():
    image = Input("in", (12, 12))
    for y_of, x_of in itertools.product(
        (lambda i: i, lambda i: i // 2 + 1, lambda i: 2 * (i // 2), lambda i: i - i % 3), repeat=2
    ):
        program = lower([Stage("s", (10, 10), lambda y, x, f=y_of, g=x_of: image[f(y), g(x)])])
        strides = {"in": (40, 3), "s": (37, 2)}
        found = {(e.statement, e.read): (e.buffer, e.low, e.high) for e in schedule.gaps(program, strides)}
        assert found == spans(program, strides)

"""Banks by enumeration: no two reads of one cycle ask one bank for different words."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.push import fails, without_parts, words
from tilewright.pushmem import banks, mapping, rates, simulate
from tilewright.pushmem import stencil as policy
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.extract import extract
from tilewright.pushmem.program import lower

pytest.importorskip("islpy")


def asked(program, plan, ports):
    """``[{cycle: index}]``: what each read asks for, by running its loops."""
    statements, found = {s.name: s for s in program.statements}, []
    for name, k in ports:
        s = statements[name]
        grid = dict(zip(s.loops, np.indices(s.extents).reshape(len(s.extents), -1), strict=True))
        times = sum(grid[n] * step for n, step in zip(s.loops, plan.strides[name], strict=True)) + plan.starts[name]
        places = [np.broadcast_to(i.evaluate(grid), times.shape).tolist() for i in s.reads[k].indices]
        found.append(dict(zip(times.tolist(), zip(*places, strict=True), strict=True)))
    return found


def collisions(reads, alpha, count):
    return sum(
        one[t] != other[t] and sum(a * (i - j) for a, i, j in zip(alpha, one[t], other[t], strict=True)) % count == 0
        for one, other in itertools.combinations(reads, 2)
        for t in one.keys() & other.keys()
    )


def scheduled(outputs):
    program = extract(lower(outputs))
    coarse = rates.is_coarse(program)
    strides = rates.coarse(program, 0, 4) if coarse else rates.stencil(program)
    plan = policy.schedule(program, strides, "coarse" if coarse else "stencil", {})
    return program, plan, [(s.name, k) for s in program.statements for k, r in enumerate(s.reads) if r.buffer == "in"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5, unique=True),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 4)]),
    st.booleans(),
)
def test_the_fewest_banks_never_collide(offsets, steps, halves):
    image = Input("in", (14, 22))
    parts = [offsets] if not halves or len(offsets) < 2 else [offsets[:1], offsets[1:]]
    outputs = []
    for n, part in enumerate(parts):

        def word(y, x, part=part):
            return sum(
                (image[steps[0] * y + i, steps[1] * x + j] for i, j in part[1:]),
                image[steps[0] * y + part[0][0], steps[1] * x + part[0][1]],
            )

        outputs.append(Stage(f"s{n}", (5, 4), word))
    program, plan, ports = scheduled(outputs)
    found, reads = banks.bank(program, plan, "in", ports), asked(program, plan, ports)
    assert not found.copies
    assert collisions(reads, found.alpha, found.count) == 0
    # No function of fewer banks keeps them apart.
    for count in range(1, found.count):
        assert all(collisions(reads, alpha, count) for alpha in itertools.product(range(count), repeat=2))
    for port, number in found.ports:
        of = [int(found.of(place)) for place in reads[ports.index(port)].values()]
        assert set(of) == {number}


def test_columns_of_a_patch_are_banks_of_their_own():
    image = Input("in", (8, 16))

    def word(y, x):
        return Reduce((4, 4), lambda ry, rx: image[4 * y + ry, 4 * x + rx], unroll=(1,))

    found = banks.bank(*scheduled([Stage("s", (2, 4), word)])[:2], "in", [("s", k) for k in range(4)])
    assert (found.function, found.folded) == ("(a1) mod 4", 1)
    assert [number for _, number in found.ports] == [0, 1, 2, 3]


def test_a_window_of_3_by_3_takes_nine_banks_or_copies(monkeypatch):
    image = Input("in", (8, 9))
    window = [(i, j) for i in range(3) for j in range(3)]
    outputs = [Stage("s", (6, 7), lambda y, x: sum((image[y + i, x + j] for i, j in window[1:]), image[y, x]))]
    program, plan, ports = scheduled(outputs)
    found = banks.bank(program, plan, "in", ports)
    assert (found.count, found.copies) == (9, False)
    assert collisions(asked(program, plan, ports), found.alpha, 9) == 0
    monkeypatch.setattr(banks, "MOST", 8)
    found = banks.bank(program, plan, "in", ports)
    assert (found.count, found.copies, found.function) == (9, True, "each port its own")


@pytest.mark.parametrize(("memory", "space"), [("pub", 0), ("dp", 0), ("dp", 1)])
@pytest.mark.parametrize("side", [2, 4])
def test_rows_or_columns_that_are_read_together_are_stored_in_banks(side, memory, space):
    image, weights = Input("in", (24, 32)), Input("weights", (4,))

    # What is done in space: rows (0) or columns (1) of a square of the image.
    def word(y, x):
        at = ((lambda i, j: (side * y + i, 4 * x + j)), (lambda i, j: (4 * y + i, side * x + j)))[space]
        extents = ((side, 4), (4, side))[space]
        return Reduce(extents, lambda i, j: image[at(i, j)] * weights[(j, i)[space]], unroll=(space,))

    outputs = [Stage("s", ((24 // side, 8), (6, 32 // side))[space], word)]
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    (found,) = mapped.wiring.banks
    assert (found.count, found.folded) == (side, space)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0
    # Each word is in one bank: all banks together hold the image once.
    stored = [u for u in mapped.wiring.uses if u.buffer == "in"]
    assert len(stored) == side and sum(len(u.write.times) for u in stored) == 24 * 32
    for what, fewer in without_parts(mapped):
        assert fails(fewer, outputs, data), what


def test_one_port_or_one_word_needs_one_bank():
    image = Input("in", (8, 8))
    program, plan, ports = scheduled([Stage("s", (8, 8), lambda y, x: image[y, x] * 2)])
    assert banks.bank(program, plan, "in", ports).count == 1

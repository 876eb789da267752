"""Paces of stages: whatever is sampled up or down, no two iterations share a cycle, and every word is delivered."""

import numpy as np
import pytest

from helpers import extras
from helpers.push import words
from tilewright.pushmem import dsl, expressions, mapping, netlist, rates, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.errors import MappingError, ProgramError
from tilewright.pushmem.lowering import lower


def sums_twice_as_large():
    """Sums of squares of 2 × 2 words, each of which is read in a square of 2 × 2."""
    image = Input("in", (9, 9))
    sums = Stage("sums", (8, 8), lambda y, x: Reduce((2, 2), lambda i, j: image[y + i, x + j]))
    return [Stage("larger", (16, 16), lambda y, x: sums[y // 2, x // 2])]


def program(draw):
    """Outputs of a random chain of stages that sample up and down, reduce, transpose, mirror and meet."""

    def whole(low, high):
        return int(draw.integers(low, high + 1))

    sources = [Input("in", (2 * whole(3, 8), 2 * whole(3, 8)))]
    for number in range(whole(1, 4)):
        s = sources[-1]
        h, w = s.shape
        other = sources[whole(0, len(sources) - 1)]
        shape, word = (
            ((2 * h, 2 * w), lambda y, x, s=s: s[y // 2, x // 2]),
            ((h, 3 * w), lambda y, x, s=s: s[y, x // 3] + 1),
            ((4 * h, w), lambda y, x, s=s: s[y // 4, x]),
            ((h // 2, w // 2), lambda y, x, s=s: s[2 * y, 2 * x + 1]),
            ((h - 1, w - 1), lambda y, x, s=s: Reduce((2, 2), lambda i, j: s[y + i, x + j])),
            ((w, h), lambda y, x, s=s: s[x, y]),
            ((h, w), lambda y, x, s=s, last=h - 1: s[last - y, x]),
            ((min(h, other.shape[0]), min(w, other.shape[1])), lambda y, x, s=s, o=other: s[y, x] + o[y, x]),
        )[whole(0, 7)]
        if min(shape) > 1:
            sources.append(Stage(f"s{number}", shape, word))
    read = {r.source.name for s in sources[1:] for r in expressions.reads(s.traced(*dsl.variables(s, {})))}
    return [s for s in sources[1:] if s.name not in read]


@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_every_word_of_a_random_program_is_delivered(memory):
    draw, done = np.random.default_rng(4), 0
    for _ in range(6):
        outputs = program(draw)
        try:
            mapped = mapping.compile(outputs, memory)
        except (ProgramError, MappingError):
            continue
        data = words(outputs)
        run = simulate.run(mapped, data)
        assert run.words == sum(np.prod(output.shape) for output in outputs)
        assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0
        done += 1
    assert done >= 2


def test_rows_that_are_read_twice_take_twice_as_long_also_in_rtl():
    extras.need("amaranth", "pyosys")
    outputs = sums_twice_as_large()
    mapped, data = mapping.compile(outputs, "dp"), words(outputs)
    assert mapped.schedule.strides["larger"] == (32, 2)
    assert simulate.differing_words(mapped, outputs, data, netlist.run(mapped, data)) == 0


def test_iterations_that_share_a_cycle_are_refused():
    lowered = lower(sums_twice_as_large())
    strides = rates.coarse(lowered, 0, 4)
    rates.check(lowered, strides)
    with pytest.raises(
        ProgramError, match="larger: two iterations share a cycle: a loop advances every 16 cycles, and"
    ):
        rates.check(lowered, strides | {"larger": (16, 2)})


SPACE = {"in": (3, 8, 8), "bias": (3,), "weights": (2, 2)}


@pytest.mark.parametrize(
    "word",
    [
        lambda image, bias, weights: lambda c, y, x: image[c, y, x] + bias[c],
        lambda image, bias, weights: lambda c, y, x: Reduce((2, 2), lambda i, j: image[c, y + i, x + j] * bias[c]),
        lambda image, bias, weights: (
            lambda c, y, x: Reduce((2, 2), lambda i, j: image[c, y + i, x + j] * weights[i, j], unroll=(0, 1))
        ),
        lambda image, bias, weights: (lambda twice: lambda c, y, x: image[c, y, x] + twice[c])(
            Stage("twice", (3,), lambda c: bias[c] * 2, unroll=(0,))
        ),
    ],
    ids=["added", "in a reduction", "in two dimensions", "of a stage"],
)
def test_an_input_all_of_whose_dimensions_are_in_space_is_a_word_a_copy(word):
    image, bias, weights = (
        Input(name, shape, unroll=tuple(range(len(shape) if len(shape) < 3 else 1))) for name, shape in SPACE.items()
    )
    outputs = [Stage("out", (3, 7, 7), word(image, bias, weights), unroll=(0,))]
    data = words(outputs)
    for memory in ("pub", "dp"):
        mapped = mapping.compile(outputs, memory)
        assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0

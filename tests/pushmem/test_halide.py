"""Pipelines written in Halide: the program is that of the app, and its words are those of Halide's own compiler."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.push import words
from tilewright.pushmem import dsl, halide, mapping, simulate
from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.lowering import lower
from tilewright_study.experiments.push import apps
from tilewright_study.experiments.push.apps import BINOMIAL, BOX, SOBEL_X, SOBEL_Y, THRESHOLD

extras.need("halide")
import halide as hl  # noqa: E402

X, Y, C = hl.Var("x"), hl.Var("y"), hl.Var("c")
# Halide gives the second function of a name a number, which the front end takes away; names of a test are its own.
NUMBER = count()


def image(name, *shape):
    """A parameter and its shape."""
    return hl.ImageParam(hl.UInt(16), len(shape), name), shape


def function(name, definition, root=True, kind=None):
    """A function of x and y."""
    made = hl.Func(name)
    made[X, Y] = definition if kind is None else hl.cast(kind, definition)
    return made.compute_root() if root else made


def windowed(source, weights, kind=None):
    """The weighted sum of a window."""
    total = None
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            if weight:
                word = source[X + j, Y + i]
                part = (word if kind is None else hl.cast(kind, word)) * weight
                total = part if total is None else part + total
    return total


def brighten_blur():
    source = image("in", 64, 64)
    bright = function("brighten", source[0][X, Y] * 2)
    return function("blur", windowed(bright, ((1, 1), (1, 1))) >> 2), [source], (63, 63)


def gaussian():
    source = image("in", 64, 64)
    return function("blur", windowed(source[0], BINOMIAL) >> 4), [source], (62, 62)


def harris():
    source, word = image("in", 64, 64), hl.Int(16)
    dx = function("dx", windowed(source[0], SOBEL_X, word))
    dy = function("dy", windowed(source[0], SOBEL_Y, word))

    def product(name, left, right):
        return function(name, ((left[X, Y] >> 2) * (right[X, Y] >> 2)) >> 7)

    sxx = function("sxx", windowed(product("dxx", dx, dx), BOX))
    sxy = function("sxy", windowed(product("dxy", dx, dy), BOX))
    syy = function("syy", windowed(product("dyy", dy, dy), BOX))
    trace = sxx[X, Y] + syy[X, Y]
    strength = function("strength", (sxx[X, Y] * syy[X, Y] - sxy[X, Y] * sxy[X, Y]) - ((trace * trace) >> 4))
    around = strength[X, Y]
    for i in range(3):
        for j in range(3):
            around = hl.max(around, strength[X + j, Y + i])
    centre = strength[X + 1, Y + 1]
    found = hl.select((centre == around) & (centre > THRESHOLD), hl.u16(255), hl.u16(0))
    return function("corners", found), [source], (58, 58)


def convolution():
    channels = 8
    source, weights = image("in", channels, 30, 30), image("weights", channels, channels, 3, 3)
    sums, box = hl.Func("sums"), hl.RDom([(0, 3), (0, 3), (0, channels)])
    sums[X, Y, C] = hl.u16(0)
    sums[X, Y, C] += source[0][X + box.x, Y + box.y, box.z] * weights[0][box.x, box.y, box.z, C]
    sums.bound(C, 0, channels).unroll(C)
    sums.update().reorder(box.x, box.y, X, Y, box.z, C).unroll(C).unroll(box.z)
    return sums, [source, weights], (channels, 28, 28)


PIPELINES = {
    "brighten_blur-64": brighten_blur,
    "gaussian-64": gaussian,
    "harris-64": harris,
    "resnet-28": convolution,
}


def realised(func, inputs, shape, data):
    """What Halide's compiler gives."""
    found = np.zeros(shape, np.uint16)
    for param, _ in inputs:
        param.set(hl.Buffer(data[param.name()]))
    func.realize(hl.Buffer(found))
    return found


def terms(index, loops):
    """An index as ``{atom: factor}``, whatever the order of its parts; loops go by their place, not by their name."""
    match index.kind:
        case "const":
            return {1: index.args[0]}
        case "add":
            found = dict(terms(index.args[0], loops))
            for atom, factor in terms(index.args[1], loops).items():
                found[atom] = found.get(atom, 0) + factor
            return {a: f for a, f in found.items() if f}
        case "mul":
            return {a: f * index.args[1] for a, f in terms(index.args[0], loops).items()}
        case "var":
            return {f"loop {loops.index(index.args[0])}": 1}
    return {str(index): 1}


def normal(outputs):
    """What a program is, but for the order of operands: buffers, inputs, outputs, and of each statement its loops and
    reads."""
    program = lower(outputs)
    statements = {
        s.name: (s.extents, s.rank, s.reduction,
                 {(r.buffer, *(frozenset(terms(i, s.loops).items()) for i in r.indices)) for r in s.reads})
        for s in program.statements
    }  # fmt: skip
    buffers = {n: (b.shape, b.dtype) for n, b in program.buffers.items()}
    return set(program.inputs), program.outputs, buffers, statements


@pytest.mark.parametrize("app", PIPELINES)
def test_the_program_is_that_of_the_app_and_the_words_are_those_of_halide(app):
    func, inputs, shape = PIPELINES[app]()
    outputs = halide.outputs(func, inputs, shape)
    own = apps.program(app)
    assert normal(outputs) == normal(own)
    mapped, ours = mapping.compile(outputs), mapping.compile(own)
    assert mapped.schedule.starts == ours.schedule.starts and mapped.schedule.strides == ours.schedule.strides
    assert mapped.registers == ours.registers and len(mapped.tiles) == len(ours.tiles)
    for tile, other in zip(mapped.tiles, ours.tiles, strict=True):
        assert tile.controllers == other.controllers
    for data in (words(outputs), words(outputs, value=65535), words(outputs, value=0)):
        expected = realised(func, inputs, shape, data)
        run = simulate.run(mapped, data).outputs
        found = np.stack(list(run.values())) if len(run) > 1 else next(iter(run.values()))
        np.testing.assert_array_equal(found, expected)
        assert simulate.differing_words(mapped, own, data, run) == 0
    assert app != "resnet-28" or len(mapped.tiles) <= 40


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_pipelines(data):
    def small(least, most):
        return data.draw(st.integers(least, most))

    number = next(NUMBER)
    source = image(f"in{number}x", small(12, 20), small(12, 20))
    stages, shape = [(source[0], source[1])], source[1]
    for n in range(small(1, 4)):
        one, other = stages[-1], stages[small(0, len(stages) - 1)]
        i, j, k, m = (small(0, 2) for _ in range(4))
        shape = tuple(min(a - p, b - q) for a, b, p, q in zip(one[1], other[1], (i, k), (j, m), strict=True))
        left, right = one[0][X + k, Y + i], other[0][X + m, Y + j]
        made = data.draw(
            st.sampled_from(
                [
                    left * small(2, 9) + right,
                    hl.max(left, right) - hl.min(left, right),
                    hl.select(left < right, left ^ 5, right & 255),
                    (left >> small(1, 3)) | (right << 2),
                    hl.cast(hl.UInt(16), hl.cast(hl.Int(16), left) >> 1) - right,
                ]
            )
        )
        stages.append((function(f"s{number}x{n}", made), shape))
    func = stages[-1][0]
    outputs = halide.outputs(func, [source], shape)
    # Halide finds that some programs need no image.
    mapped, given_words = mapping.compile(outputs), {source[0].name(): np.zeros(source[1], np.uint16)} | words(outputs)
    (found,) = simulate.run(mapped, given_words).outputs.values()
    np.testing.assert_array_equal(found, realised(func, [source], shape, given_words))


def test_sampling_down_and_up():
    source = image("fine", 32, 32)
    half = function("half", source[0][2 * X, 2 * Y + 1] + 1)
    back = function("back", half[X // 2, Y // 2] - 3)
    outputs = halide.outputs(back, [source], (32, 32))
    mapped, data = mapping.compile(outputs), words(outputs)
    (found,) = simulate.run(mapped, data).outputs.values()
    np.testing.assert_array_equal(found, realised(back, [source], (32, 32), data))


BORDERS = hl.BoundaryConditions
SIDES = (12, 16)


def small(definition, shape=SIDES, kind=None, sides=SIDES):
    """A pipeline of one function of an image, `definition(source, box)`, and its inputs and shape."""
    number = next(NUMBER)
    param = hl.ImageParam(kind or hl.UInt(16), 2, f"small{number}x")
    box = [hl.Range(0, sides[1]), hl.Range(0, sides[0])]
    return function(f"made{number}x", definition(param, box)), [(param, sides)], shape


def around(border):
    """The image less its neighbours, with a border."""
    return lambda source, box: border(source, box)[X - 1, Y] * 3 - border(source, box)[X + 2, Y + 2]


def padded_first():
    number = next(NUMBER)
    param = hl.ImageParam(hl.UInt(16), 2, f"small{number}x")
    near = BORDERS.repeat_edge(param, [hl.Range(0, 16), hl.Range(0, 12)]).compute_root()
    return function(f"made{number}x", near[X - 1, Y] + near[X + 1, Y + 2]), [(param, SIDES)], SIDES


def tiled():
    func, inputs, shape = small(lambda s, _: s[X, Y] + s[X + 1, Y + 1], sides=(13, 17))
    inner, outer = [hl.Var(n) for n in ("xi", "yi")], [hl.Var(n) for n in ("xo", "yo")]
    return func.tile(X, Y, *outer, *inner, 4, 4), inputs, shape


def updated(best, first):
    number, box = next(NUMBER), hl.RDom([(0, 3), (0, 3)])
    param, made = hl.ImageParam(hl.UInt(16), 2, f"small{number}x"), hl.Func(f"made{number}x")
    made[X, Y] = hl.u16(first)
    made[X, Y] = best(made[X, Y], param[X + box.x, Y + box.y])
    return made.compute_root(), [(param, SIDES)], (10, 14)


def within(reduce):
    box = hl.RDom([(0, 3), (0, 3)])
    return small(lambda s, _: reduce(s[X + box.x, Y + box.y]), (10, 14))


def wide(word):
    return hl.cast(hl.UInt(16), word)


SMALL = {
    "repeat_edge": lambda: small(around(BORDERS.repeat_edge)),
    "constant_exterior": lambda: small(around(lambda s, box: BORDERS.constant_exterior(s, hl.u16(7), box))),
    "mirror_interior": lambda: small(around(BORDERS.mirror_interior)),
    "mirror_image": lambda: small(around(BORDERS.mirror_image)),
    "repeat_image": lambda: small(around(BORDERS.repeat_image)),
    "padded first": padded_first,
    "sum": lambda: within(hl.sum),
    "maximum": lambda: within(hl.maximum),
    "minimum": lambda: within(hl.minimum),
    "an update to a maximum": lambda: updated(hl.max, 0),
    "a maximum of at least 40000": lambda: updated(hl.max, 40000),
    "a sum from 5": lambda: updated(lambda a, b: a + b, 5),
    "tiles": tiled,
    "bytes": lambda: small(lambda s, _: hl.cast(hl.UInt(8), (wide(s[X, Y]) * 3 + wide(s[X, 0])) >> 2), kind=hl.UInt(8)),
    "bytes that wrap": lambda: small(lambda s, _: s[X, Y] * 3 - 7, kind=hl.UInt(8)),
    "bytes that saturate": lambda: small(
        lambda s, _: hl.cast(hl.UInt(8), hl.min(wide(s[X, Y]) * 5 / 3, 255)), kind=hl.UInt(8)
    ),
    "quotients": lambda: small(lambda s, _: s[X, Y] / 7 + hl.cast(hl.UInt(16), s[X, Y] % 10)),
    "signed quotients": lambda: small(lambda s, _: s[X, Y] / 9, kind=hl.Int(16)),
}  # fmt: skip


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize("name", SMALL)
def test_a_small_pipeline_gives_the_words_of_halide(name, memory):
    func, inputs, shape = SMALL[name]()
    outputs = halide.outputs(func, inputs, shape)
    data, expected = words(outputs), np.zeros(shape, outputs[0].dtype)
    (given,) = data.values()
    inputs[0][0].set(hl.Buffer(given))
    func.realize(hl.Buffer(expected))
    (found,) = simulate.run(mapping.compile(outputs, memory), data).outputs.values()
    np.testing.assert_array_equal(found, expected)


def refused(func, inputs, shape):
    with pytest.raises(ProgramError) as found:
        halide.outputs(func, inputs, shape)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_no_program_says_is_refused_in_one_line():
    source = image("r1", 16, 16)
    assert "expected words of uint16 or int16 or uint8, found float32" in refused(
        function("r2", hl.cast(hl.Float(32), source[0][X, Y]), root=True).compute_root(), [source], (16, 16)
    )
    func = function("r3", source[0][X, Y] * 2)
    func.vectorize(X, 8)
    assert "found vectors in line" in refused(func, [source], (16, 16))
    func = function("r4", source[0][X, hl.clamp(hl.cast(hl.Int(32), source[0][X, Y]), 0, 15)])
    assert "affine" in refused(func, [source], (16, 16))
    func = function("r5", source[0][X, Y] / source[0][X, 3])
    assert "operators of a 16-bit PE" in refused(func, [source], (16, 16))
    wide = hl.ImageParam(hl.UInt(32), 2, "r6")
    assert "r6: expected words of uint16 or int16 or uint8, found uint32" in refused(
        function("r7", hl.cast(hl.UInt(16), wide[X, Y])), [(wide, (16, 16))], (16, 16)
    )


def test_text_that_is_no_loop_nest_is_refused():
    for line in ("parallel (f.s0.y, 0, 4) {", "f[ramp(0, 1, 4)] = in[ramp(0, 1, 4)]", "if (x < 3) {", "f[x] = 'a'"):
        with pytest.raises(ProgramError, match="expected"):
            halide.read(f"produce f {{\n{line}\n", {"in": ((4, 4), "uint16")}, {"f": ((4, 4), "uint16")})


def test_stages_can_be_read_by_others():
    """What comes from Halide is a stage as any other."""
    source = image("mixed", 16, 16)
    (blur,) = halide.outputs(function("soft", windowed(source[0], BINOMIAL) >> 4), [source], (14, 14))
    outputs = (dsl.Stage("turned", (14, 14), lambda y, x: blur[x, y] + 1),)
    mapped, data = mapping.compile(outputs), words(outputs)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0

"""What one's own programs may use: borders, bytes, exact division, broadcasts, reads backwards, choices by indices."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from public_programs import PROGRAMS

from helpers import extras
from helpers.push import words
from tilewright.pushmem import dsl, lowering, mapping, netlist, program, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage, bounded, divide, maximum, minimum, saturate, select
from tilewright.pushmem.expressions import BORDERS, Const, Coordinate, number

# As numpy.pad names them.
MODES = {"clamp": "edge", "zero": "constant", "mirror": "reflect", "symmetric": "symmetric", "wrap": "wrap"}
# Sums over time, whose schedules on `pub` are searched for seconds.
LONG = ("max_filter", "max_pool", "depthwise", "cosine_transform")
IMAGE, SIGNED = Input("image", (6, 10)), Input("signed", (6, 10), "int16")


def found(outputs, data, memory="pub"):
    """What a mapped program gives, in the order of its outputs."""
    return list(simulate.run(mapping.compile(outputs, memory), data).outputs.values())


def as_numpy(name, data):
    """What the definition in NumPy gives, of whole numbers."""
    return PROGRAMS[name].numpy(**data)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *((name, "dp" if name in LONG else "pub") for name in PROGRAMS),
        *(pytest.param(name, "pub", marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_a_public_program_gives_the_words_of_its_definition(name, memory):
    outputs = dsl.stages(PROGRAMS[name].outputs())
    for seed in (0, 1):
        data = words(outputs, seed)
        for ours, theirs in zip(found(outputs, data, memory), as_numpy(name, data), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_hardware_gives_the_words_of_two_definitions():
    extras.need("amaranth", "pyosys")
    names = ("composite", "canny_thinning")
    outputs = [s for name in names for s in dsl.stages(PROGRAMS[name].outputs())]
    mapped, data = mapping.compile(outputs), words(outputs)
    expected = [
        array
        for name in names
        for array in as_numpy(
            name, {s.name: data[s.name] for s in dsl.stages_of(PROGRAMS[name].outputs()) if s.name in data}
        )
    ]
    for ours, theirs in zip(netlist.run(mapped, data).values(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_words_beyond_a_border_are_those_of_numpy(border, memory):
    near, data = bounded(IMAGE, border), words([Stage("s", (6, 10), lambda y, x: IMAGE[y, x])])
    p = np.pad(data["image"], 3, mode=MODES[border])
    in_space = Stage("s", (6, 10), lambda y, x: near[y - 2, x + 3] ^ near[y + 3, x - 1])
    (ours,) = found(in_space, data, memory)
    np.testing.assert_array_equal(ours, p[1:7, 6:16] ^ p[6:12, 2:12])
    in_time = Stage("t", (6, 10), lambda y, x: Reduce((3, 3), lambda i, j: near[y + i - 1, x + j - 1]))
    (ours,) = found(in_time, data, memory)
    np.testing.assert_array_equal(ours, sum(p[2 + i : 8 + i, 2 + j : 12 + j] for i in range(3) for j in range(3)))


def quotients(divisor, signed, make):
    """What the operations of PEs give for all words."""
    source = Input("a", (1,), "int16" if signed else "uint16")
    made = {"a": np.arange(1 << 16)}
    for s in lowering.lower(Stage("q", (1,), lambda _: make(source[0], divisor), dtype=source.dtype)).statements:
        made[s.name] = np.asarray(program.word(s.expression, [made[r.buffer] for r in s.reads], {"i0": 0}))
    return number(made["a"], signed), number(made["q"], signed)


DIVISORS = [*range(1, 40), 60, 85, 100, 127, 128, 225, 255, 256, 641, 1000, 9999, 16384, 21845, 32767]


def test_every_word_is_divided_exactly():
    for divisor in [*DIVISORS, 32768, 40000, 43691, 65534, 65535]:
        for make, wanted in (
            (lambda a, d: a // d, lambda a, d: a // d),
            (lambda a, d: a % d, lambda a, d: a % d),
            (lambda a, d: divide(a, d, "nearest"), lambda a, d: (2 * a + d) // (2 * d)),
        ):
            given, got = quotients(divisor, False, make)
            np.testing.assert_array_equal(got, wanted(given, divisor))


def test_every_signed_word_is_divided_exactly():
    for divisor in [d * sign for d in DIVISORS for sign in (1, -1)][1::3]:
        for make, wanted in (
            (lambda a, d: a // d, lambda a, d: a // d),
            (lambda a, d: a % d, lambda a, d: a % d),
            (lambda a, d: divide(a, d, "zero"), lambda a, d: np.sign(a) * np.sign(d) * (abs(a) // abs(d))),
            (lambda a, d: divide(a, d, "nearest"), lambda a, d: (2 * a * np.sign(d) + abs(d)) // (2 * abs(d))),
        ):
            given, got = quotients(divisor, True, make)
            # 32768 is no signed word: it wraps around.
            np.testing.assert_array_equal(got, (wanted(given, divisor) + 32768) % 65536 - 32768, str(divisor))


def test_bytes_wrap_around_or_saturate_as_they_are_told():
    source = Input("image", (4, 8), "uint8")
    data = {"image": np.arange(32, dtype=np.uint8).reshape(4, 8) * 8}
    wide = data["image"].astype(int)
    for word, wanted in (
        (lambda y, x: source[y, x] * 3, wide * 3 % 256),
        (lambda y, x: saturate(source[y, x] * 3), np.minimum(wide * 3, 255)),
        (lambda y, x: saturate((source[y, x] - 100).as_signed()), np.maximum(wide - 100, 0)),
        (lambda y, x: Reduce((1, 1), lambda i, j: source[y + i, x + j] * 3), wide * 3 % 256),
    ):
        (ours,) = found(Stage("s", (4, 8), word, dtype="uint8"), data)
        assert ours.dtype == np.uint8
        np.testing.assert_array_equal(ours, wanted)


def test_what_is_known_to_be_a_byte_is_not_cut_again():
    source = Input("image", (4, 8), "uint8")
    for word in (
        lambda y, x: saturate((source[y, x] - 100).as_signed()),
        lambda y, x: maximum(source[y, x], 3),
        lambda y, x: select(source[y, x] > 5, source[y, x] // 3, 7),
    ):
        kept, cut = (mapping.compile(Stage("s", (4, 8), word, dtype=d)).pes for d in ("uint16", "uint8"))
        assert kept == cut


ROW, COLUMN = Input("row", (10,)), Input("column", (6,))


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        (lambda y, x: IMAGE[y, x] + ROW[x], lambda a, r, c: a + r),
        (lambda y, x: IMAGE[y, x] ^ COLUMN[y] ^ ROW[0], lambda a, r, c: a ^ c[:, None] ^ r[0]),
        (lambda y, x: IMAGE[y, 9 - x], lambda a, r, c: a[:, ::-1]),
        (lambda y, x: IMAGE[5 - y, x] - ROW[9 - x], lambda a, r, c: a[::-1] - r[::-1]),
        (lambda y, x: select(x > 0, IMAGE[y, x - 1], 7), lambda a, r, c: np.insert(a, 0, 7, axis=1)[:, :-1]),
        (lambda y, x: IMAGE[maximum(y - 2, 0), minimum(x + 1, 9)],
         lambda a, r, c: np.pad(a, ((2, 0), (0, 1)), mode="edge")[:6, 1:]),
        (lambda y, x: IMAGE[y, (x + 3) % 10], lambda a, r, c: np.roll(a, -3, 1)),
        (lambda y, x: (Reduce((3,), lambda k: bounded(IMAGE, "zero")[y, x + k]) + ROW[x]) >> 1,
         lambda a, r, c: sum(np.pad(a, ((0, 0), (0, 2)))[:, k : k + 10] for k in range(3)).astype(np.uint16) + r >> 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_broadcasts_flips_and_choices_by_indices(word, wanted, memory):
    stage = Stage("s", (6, 10), word)
    data = words([Stage("all", (6, 10), lambda y, x: IMAGE[y, x] + ROW[x] + COLUMN[y])])
    (ours,) = found(stage, data, memory)
    np.testing.assert_array_equal(ours, wanted(data["image"], data["row"], data["column"]))


def test_rates_that_no_raster_has_are_kept_in_memory():
    stage = Stage("s", (6, 5), lambda y, x: IMAGE[y, x] + IMAGE[y, 2 * x])
    data = words(stage)
    (ours,) = found(stage, data)
    np.testing.assert_array_equal(ours, data["image"][:, :5] + data["image"][:, ::2])


@st.composite
def expressions(draw, depth=3):
    """``(in the language, in NumPy)``: a function of y and x, and one of the words of both images, of whole numbers."""
    if not depth or draw(st.integers(0, 5)) == 0:
        kind = draw(st.sampled_from(["read", "read", "border", "index", "number"]))
        source, i, j = draw(st.sampled_from([IMAGE, SIGNED])), draw(st.integers(-2, 2)), draw(st.integers(-2, 2))
        if kind == "read":
            return lambda y, x: source[y, x], lambda data: numbers(data[source.name], source.dtype == "int16")
        if kind == "border":
            border = draw(st.sampled_from(BORDERS))
            rows, columns = slice(2 + i, 8 + i), slice(2 + j, 12 + j)
            beyond = lambda data: np.pad(data[source.name], 2, mode=MODES[border])[rows, columns]  # noqa: E731
            return (
                lambda y, x: bounded(source, border)[y + i, x + j],
                lambda data: numbers(beyond(data), source.dtype == "int16"),
            )
        if kind == "index":
            return lambda y, x: Coordinate(2 * x + y), lambda data: numbers(np.indices((6, 10))[0] + 2 * np.arange(10))
        value = draw(st.integers(0, 300))
        return lambda y, x: Const(value), lambda data: numbers(np.full((6, 10), value))
    (one, a), (other, b) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    name, divisor = draw(st.sampled_from(sorted(PAIRS))), draw(st.integers(1, 300))
    ours, theirs = PAIRS[name]
    return lambda y, x: ours(one(y, x), other(y, x), divisor), lambda data: theirs(a(data), b(data), divisor)


def numbers(words, signed=False):
    """``(whole numbers of 16 bits, whether they are signed)``, as a PE reads them."""
    bits = np.asarray(words).astype(np.int64) & 65535
    return np.where(bits > 32767, bits - 65536, bits) if signed else bits, signed


def each(function):
    """An operation of two words of one type: a signed one makes both of them so."""

    def done(one, other, divisor):
        signed = one[1] or other[1]
        return numbers(function(numbers(one[0], signed)[0], numbers(other[0], signed)[0]), signed)

    return done


def alone(function):
    return lambda one, other, divisor: numbers(function(one[0], divisor), one[1])


PAIRS = {
    "add": (lambda a, b, d: a + b, each(np.add)),
    "subtract": (lambda a, b, d: a - b, each(np.subtract)),
    "multiply": (lambda a, b, d: a * b, each(np.multiply)),
    "least": (lambda a, b, d: minimum(a, b), each(np.minimum)),
    "most": (lambda a, b, d: maximum(a, b), each(np.maximum)),
    "xor": (lambda a, b, d: a ^ b, each(np.bitwise_xor)),
    "quotient": (lambda a, b, d: a // d, alone(np.floor_divide)),
    "rest": (lambda a, b, d: a % d, alone(np.mod)),
    "nearest": (lambda a, b, d: divide(a, d, "nearest"), alone(lambda a, d: (2 * a + d) // (2 * d))),
    "halved": (lambda a, b, d: a >> 3, alone(lambda a, d: a // 8)),
    "byte": (lambda a, b, d: saturate(a), alone(lambda a, d: np.clip(a, 0, 255))),
    "chosen": (
        lambda a, b, d: select(a < b, a.as_unsigned(), b.as_unsigned()),
        lambda a, b, d: numbers(np.where(each(np.less)(a, b, d)[0] != 0, a[0], b[0])),
    ),
}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions(), st.integers(0, 1 << 30), st.sampled_from(["pub", "dp"]))
def test_random_expressions_give_the_words_of_numpy(both, seed, memory):
    word, wanted = both
    stage = Stage("s", (6, 10), lambda y, x: word(y, x) + IMAGE[y, x] * 0 + SIGNED[y, x].as_unsigned() * 0)
    data = words(stage, seed)
    (ours,) = found(stage, data, memory)
    np.testing.assert_array_equal(ours, wanted(data)[0] & 65535)

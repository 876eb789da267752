"""Programs and streams at the edge of what a tile can do."""

import numpy as np
import pytest

from helpers.push import compiled, words
from tilewright.pushmem import configuration, dsl, mapping, memories, recurrence, simulate
from tilewright.pushmem.dsl import Input, Lut, Reduce, Stage
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.pack import TileUse
from tilewright.pushmem.vectorise import Stream, Use, plan_dp, plan_pub


def exact(outputs, data, memory="pub", **options):
    """`outputs` mapped, after a run that gave the words of numpy."""
    mapped = mapping.compile(outputs, memory, **options)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0
    return mapped


def later(distance, shape=(8, 16)):
    """A stage that takes each word of a line `distance` cycles after it came."""
    image = Input("in", (1, shape[0] * shape[1]))
    width = image.shape[1] - distance
    return [Stage("late", (1, width), lambda y, x: image[y, x + distance] - image[y, x])]


@pytest.mark.parametrize("distance", [7, 8, 9, 10])
def test_words_that_are_just_storable_go_through_a_tile(distance):
    outputs = later(distance)
    mapped = exact(outputs, words(outputs), threshold=distance)
    assert [t.distance for t in mapped.wiring.taps] == [distance]
    assert mapped.registers == 0 and len(mapped.tiles) == 1


def test_a_word_that_is_needed_before_it_can_leave_a_tile_is_refused():
    text = (
        "in: no conflict-free affine schedule on one pub tile: output in@6 takes in cycle 6 a word that came 6 cycles "
    )
    with pytest.raises(
        MappingError, match=text + "before, and one takes 7; a threshold of registers above this distance"
    ):
        mapping.compile(later(6), threshold=6)


def one_buffer(distance, count=6000):
    """A stream of `count` words whose reader is `distance` cycles behind."""
    at = np.arange(count)
    return Use("b", "b", Stream(at, at), (("late", Stream(at + distance, at)),))


def replayed(memory, use, controllers):
    """The words that leave one tile whose input is 1, 2, 3 …; strict, so that no rule of the hardware is broken."""
    member = memories.member(memory)
    made = configuration.configuration(TileUse(memory, ("b",), ("b",), ("late",), controllers))
    cycles = int(use.reads[0][1].times[-1]) + 2
    data = np.zeros((cycles, member.PARAMETERS.inputs), np.int64)
    data[use.write.times, 0] = use.write.addresses + 1
    run = member.run(recurrence.fired(made, member, cycles), data)
    assert run.valid_out[:, 0].sum() == len(use.write.times)
    return run.data_out[use.reads[0][1].times, 0]


def test_the_last_read_and_the_next_write_of_a_slot_may_be_in_one_cycle():
    # A word leaves a cycle after its fetch: word a is fetched when word a + 2048 takes its slot.
    use = one_buffer(2049)
    controllers = plan_dp([use])
    assert controllers["sram2out0"].cycle.start == 2048
    np.testing.assert_array_equal(replayed("dp", use, controllers), use.write.addresses + 1)
    assert plan_dp([one_buffer(2050)]) is None


def test_a_full_wide_memory_gives_each_word_before_its_slot_is_taken():
    distances = [d for d in range(2040, 2090) if plan_pub([one_buffer(d)]) is not None]
    # Words that a tile can hold: 16 in the aggregator, 2,048 in the memory and 8 in the transpose buffer.
    assert distances == list(range(2040, distances[-1] + 1)) and 2048 <= distances[-1] <= 16 + 2048 + 8
    for distance in (2040, distances[-1]):
        use = one_buffer(distance)
        np.testing.assert_array_equal(replayed("pub", use, plan_pub([use])), use.write.addresses + 1)


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize("pitch", [61, 62, 63, 64])
def test_rows_of_any_pitch_are_reduced(pitch, memory):
    image = Input("in", (5, pitch))
    weights = Input("weights", (3, 3))

    def word(y, x):
        return Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[ry, rx])

    outputs = [Stage("sums", (3, pitch - 2), word)]
    exact(outputs, words(outputs), memory)


def test_a_stage_that_reads_nothing_is_read_twice():
    image = Input("in", (8, 8))
    ramp = Stage("ramp", (8, 8), lambda y, x: y * 8 + x)
    outputs = [
        Stage("up", (8, 8), lambda y, x: image[y, x] + ramp[y, x]),
        Stage("down", (6, 6), lambda y, x: image[y + 2, x] - ramp[y, x + 2]),
    ]
    exact(outputs, words(outputs))


def test_a_program_without_inputs_is_its_indices():
    outputs = [Stage("ramp", (8, 8), lambda y, x: (y * 8 + x) // 3)]
    mapped = exact(outputs, {})
    assert not mapped.tiles and not mapped.wiring.delays


def test_a_word_that_is_read_twice_in_one_place_is_one_wire():
    image = Input("in", (8, 8))
    outputs = [Stage("square", (8, 8), lambda y, x: image[y, x] * image[y, x])]
    assert len(exact(outputs, words(outputs)).wiring.wires) == 1


@pytest.mark.parametrize("value", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
@pytest.mark.parametrize("app", ["harris-16", "camera-16", "unsharp-16", "mobilenet-8"])
def test_constant_images(app, value):
    outputs, mapped = compiled(app)
    data = words(outputs, value=value)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0


@pytest.mark.parametrize("length", [1, 2, 16, 4096])
def test_a_table_is_read_at_all_its_indices_and_wraps(length):
    table = [(i * 7919 + 3) % 65536 for i in range(length)]
    side = max(4, round(length**0.5))
    image = Input("in", (side, 2 * side))
    outputs = [Stage("looked", image.shape, lambda y, x: Lut.of(table, image[y, x]))]
    data = {"in": np.arange(2 * side * side).reshape(image.shape).astype(np.uint16)}
    mapped = exact(outputs, data)
    found = simulate.run(mapped, data).outputs["looked"].ravel().tolist()
    assert found == [table[i % length] for i in range(2 * side * side)] and set(found) == set(table)


def test_every_operation_of_a_pe_at_the_ends_of_its_range():
    ends = np.array([0, 1, 2, 15, 16, 17, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint16)
    left, right = (a.ravel() for a in np.meshgrid(ends, ends))
    one, other = Input("one", (1, 144)), Input("other", (1, 144))

    def made(name, signed):
        def word(y, x):
            a, b = (s[y, x].as_signed() if signed else s[y, x] for s in (one, other))
            made = {
                "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "shr": lambda: a >> b,
                "shl": lambda: a << b, "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
                "min": lambda: dsl.minimum(a, b), "max": lambda: dsl.maximum(a, b), "abs": lambda: abs(a) + b * 0,
                "lt": lambda: a < b, "le": lambda: a <= b, "eq": lambda: a == b, "ne": lambda: a != b,
                "select": lambda: dsl.select(a, b, a),
            }  # fmt: skip
            return made[name]()

        return Stage(f"{name}_{'s' if signed else 'u'}", (1, 144), word)

    names = ("add", "sub", "mul", "shr", "shl", "and", "or", "xor", "min", "max", "abs", "lt", "le", "eq", "ne")
    outputs = [made(name, signed) for name in (*names, "select") for signed in (False, True)]
    data = {"one": left[None], "other": right[None]}
    mapped = exact(outputs, data)
    found = simulate.run(mapped, data).outputs
    a, b = (np.array([v if v < 32768 else v - 65536 for v in w.tolist()]) for w in (left, right))
    assert (found["max_s"].ravel().view(np.int16) == np.maximum(a, b)).all()
    assert (found["lt_s"].ravel() == (a < b)).all() and (found["lt_u"].ravel() == (left < right)).all()
    assert (found["shr_s"].ravel().view(np.int16) == a >> (right & 15)).all()

"""Orders of loops: every legal one gives numpy's words, ``auto`` finds the fastest, and others are refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.cases import rest_slow
from helpers.push import words
from tilewright.pushmem import mapping, netlist, orders, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.lowering import lower
from tilewright_study.experiments.push import apps


def convolution(order, size=8):
    """A 3 × 3 reduction and a stage that follows it."""
    image, weights = Input("in", (size + 2, size + 2)), Input("weights", (3, 3))
    sums = Stage(
        "sums",
        (size, size),
        lambda y, x: Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[ry, rx]),
        order=order,
    )
    return [Stage("more", (size, size), lambda y, x: sums[y, x] + 1)]


def matmul(order, rows, columns, inner):
    """A reduction whose reads skip an outer loop each."""
    left, right = Input("left", (rows, inner)), Input("right", (inner, columns))
    return [
        Stage(
            "product",
            (rows, columns),
            lambda y, x: Reduce((inner,), lambda r: left[y, r] * right[r, x]),
            order=order,
        )
    ]


def exact(outputs, memory):
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0
    return mapped


def test_the_legal_orders_are_those_whose_reduced_loops_are_innermost():
    statement = lower(convolution(None)).statements[0]
    found = list(orders.legal(statement))
    expected = [p for p in itertools.permutations(statement.loops) if {*p[:2]} == {"i0", "i1"}]
    assert sorted(found) == sorted(expected) and found[0] == statement.loops


@pytest.mark.parametrize("order", [("i0", "i1", "r1", "r0"), ("i1", "i0", "r0", "r1"), ("i1", "i0", "r1", "r0")])
def test_the_words_are_numpys_in_any_legal_order(order):
    mapped = exact(convolution(order), "dp")
    assert mapped.program.statements[0].loops == order
    assert mapped.program.statements[1].loops == order[:2]


@pytest.mark.parametrize("memory", rest_slow(["pub", "dp"], 1))
def test_auto_is_as_fast_as_the_best_order_that_is_named(memory):
    least = []
    for order in orders.legal(lower(convolution(None)).statements[0]):
        try:
            mapped = mapping.compile(convolution(order), memory)
        except mapping.MappingError:
            continue
        least.append((mapped.schedule.last_cycle, len(mapped.tiles)))
    found = exact(convolution("auto"), memory)
    assert (found.schedule.last_cycle, len(found.tiles)) == min(least)


@pytest.mark.parametrize(
    ("app", "written"), rest_slow([("mobilenet-28", "depthwise"), ("patch_embed-32", "tokens")], 1)
)
def test_an_app_finds_the_order_that_it_was_written_in(app, written):
    mapped = exact(apps.program(app), "pub")
    assert mapped.program.axes == {}
    assert {s.loops for s in mapped.program.statements if mapped.program.origins[s.name][0] == written} == {
        ("i1", "i2", "r0", "r1") if written == "depthwise" else ("i1", "i2", "r1", "r2")
    }


def test_columns_that_only_round_up_a_loop_cost_nothing_where_they_come_last():
    # 14 columns run as 16: with columns outermost, the two that nobody takes come after the last word.
    mapped = exact(apps.program("mobilenet-14"), "pub")
    assert mapped.program.axes["depthwise_0"] == (1, 0)
    assert mapped.schedule.last_cycle < 14 * 16 * 9
    assert len(mapped.tiles) == 6


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_reductions(data):
    """Any legal order gives numpy's words or is refused in one line; ``auto`` is never slower than one that maps."""
    memory = data.draw(st.sampled_from(["pub", "dp"]), label="memory")
    if data.draw(st.booleans(), label="matmul"):
        sizes = [data.draw(st.integers(2, 7)) for _ in range(3)]

        def program(order):
            return matmul(order, *sizes)
    else:
        size = data.draw(st.integers(3, 9), label="size")

        def program(order):
            return convolution(order, size)

    order = data.draw(st.sampled_from(list(orders.legal(lower(program(None)).statements[0]))), label="order")
    try:
        named = exact(program(order), memory)
    except mapping.MappingError as error:
        assert "\n" not in str(error)
        return
    found = exact(program("auto"), memory)
    assert found.schedule.last_cycle <= named.schedule.last_cycle


def test_the_rtl_of_a_transposed_stage_gives_the_words_of_numpy():
    extras.need("amaranth", "pyosys")
    outputs = convolution(("i1", "i0", "r1", "r0"))
    mapped, data = mapping.compile(outputs, "dp"), words(outputs)
    assert simulate.differing_words(mapped, outputs, data, netlist.run(mapped, data)) == 0


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("fast", "sums: unknown order 'fast'; known: 'auto', or each of i0, i1, r0, r1 once"),
        (("i0", "i1", "r0"), "sums: unknown order .*; known: 'auto', or each of i0, i1, r0, r1 once"),
        (("i0", "r0", "i1", "r1"), "sums: order i0, r0, i1, r1 breaks a dependence: r0 adds to one sum, and i1"),
    ],
)
def test_an_order_that_is_unknown_or_breaks_a_dependence_is_refused(order, message):
    with pytest.raises(ProgramError, match=message) as caught:
        mapping.compile(convolution(order))
    assert "\n" not in str(caught.value)


def test_a_stage_that_reduces_nothing_names_no_order_of_its_own():
    image = Input("in", (8, 8))
    with pytest.raises(ProgramError, match="without a reduction in time takes the order of its sources"):
        mapping.compile([Stage("s", (8, 8), lambda y, x: image[y, x] + 1, order=("i1", "i0"))])

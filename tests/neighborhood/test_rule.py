"""The rule of neighbourhoods against the definition by coordinates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import reference
from tilewright.core.errors import TilewrightError
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.boxes import cover
from tilewright.neighborhood.cpu.slabs import tables


@st.composite
def axes(draw):
    """``(axis, length)`` that fit each other."""
    length = draw(st.integers(1, 60))
    window = draw(st.integers(1, length))
    dilation = draw(st.integers(1, length // window))
    causal = draw(st.booleans())
    cut = not causal and draw(st.booleans())
    return rules.Axis(window, draw(st.integers(1, window)), dilation, causal, cut), length


def by_coordinates(axis, length):
    border = "cut" if axis.cut else "shift"
    return reference.axis_pairs(length, axis.window, axis.stride, axis.dilation, axis.causal, border).numpy()


@settings(max_examples=150)
@given(axes())
def test_intervals_of_both_directions_are_those_of_the_definition(given):
    axis, length = given
    expected = by_coordinates(axis, length)
    assert rules._pairs(axis, length) == expected.sum()
    for first, n in enumerate(axis.lengths(length)):
        inside = expected[first :: axis.dilation, first :: axis.dilation]
        assert inside.shape == (n, n)
        place = np.arange(n)
        lo, hi = axis.keys(place, n)
        assert np.array_equal(inside, (lo[:, None] <= place) & (place < np.broadcast_to(hi, n)[:, None]))
        lo, hi = axis.queries(place, n)
        assert np.array_equal(inside.T, (lo[:, None] <= place) & (place < hi[:, None]))
        assert axis.keys(n // 2, n) == tuple(x[n // 2] for x in axis.keys(place, n))
        assert axis.queries(n // 2, n) == (lo[n // 2], hi[n // 2])
    apart = np.subtract.outer(np.arange(length), np.arange(length)) % axis.dilation != 0
    assert not expected[apart].any()


@settings(max_examples=50)
@given(axes(), st.integers(1, 8), st.booleans())
def test_boxes_hold_the_pairs_of_a_sub_axis_once(given, size, of_keys):
    axis, length = given
    expected = by_coordinates(axis, length)[:: axis.dilation, :: axis.dilation]
    (table,) = tables([axis], [len(expected)], (size,), 1, of_keys)
    found = np.zeros_like(expected)
    for begin, count, bits, *lanes in table.data.tolist():
        for lane, (own, lo, many) in enumerate(np.reshape(lanes, (3, -1)).T):
            if bits >> lane & 1 and lane < size:
                assert lo + many <= max(count, lo)
                found[own, begin + lo : begin + lo + many] = True
    assert np.array_equal(found.T if of_keys else found, expected)


@settings(max_examples=50)
@given(axes(), st.integers(1, 8), st.integers(60, 400))
def test_long_axes_are_counted_by_short_ones(given, size, length):
    axis, _ = given
    made = [tables([axis], [n], (size,), 1)[0] for n in axis.lengths(length)]
    assert cover(axis, length, size) == (sum(x.keys for x in made), sum(map(len, made)))
    places = [axis.keys(np.arange(n), n) for n in axis.lengths(length)]
    assert rules._pairs(axis, length) == sum(int((hi - lo).sum()) for lo, hi in places)


def test_rules_are_read_from_integers():
    rule = rules.make(3, (3, 5, 4), (1, 2, 4), 2, (True, False, False), "shift")
    assert rules.from_ints(tuple(rule.ints)) == rule
    assert rule.pairs((8, 10, 9)) == by_coordinates(rule.axes[0], 8).sum() * 10 * 5 * 9 * 4
    cut = rules.make(2, [3, 5], 1, 1, False, "cut")
    assert rules.from_ints(tuple(cut.ints)) == cut == rules.make(2, [3, 5], 1, 1, False, "cut")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, 0, 1, 1, False, "shift"), "window: expected 2 integers of at least 1, found (0, 0)"),
        ((2, (3, 3, 3), 1, 1, False, "shift"), "window: expected 2 integers of at least 1, found (3, 3, 3)"),
        ((1, 3, 4, 1, False, "shift"), "stride: expected at most the window 3, found 4"),
        ((1, 3, 1, 0, False, "shift"), "dilation: expected 1 integers of at least 1, found (0,)"),
        ((1, 3, 1, 1, 2, "shift"), "causal: expected True or False, or 1 of them, found 2"),
        ((1, 3, 1, 1, False, "wrap"), "unknown border 'wrap'; known: shift, cut"),
        ((1, 3, 1, 1, True, "cut"), 'border: expected "shift" with a causal axis, found "cut"'),
        ((4, 3, 1, 1, True, "cut"), "grid: expected 1 to 3 axes, found 4"),
    ],
)
def test_rules_that_are_none_are_refused(given, message):
    with pytest.raises(TilewrightError) as refusal:
        rules.make(*given)
    assert str(refusal.value) == message


def test_a_rule_says_which_grid_it_does_not_fit():
    rule = rules.make(2, (3, 5), 1, (1, 2), False, "shift")
    rule.check_grid((3, 10))
    for grid, message in {
        (2, 10): "window: expected at most the 2 tokens of axis 0, found window 3",
        (3, 9): "window: expected at most the 9 tokens of axis 1, found window 5 times dilation 2",
        (9,): "window: expected 1 values for the grid (9,), found (3, 5)",
    }.items():
        with pytest.raises(TilewrightError) as refusal:
            rule.check_grid(grid)
        assert str(refusal.value) == message


def test_the_oracle_of_a_whole_axis_is_dense_attention():
    q, k, v = torch.randn(3, 2, 5, 3, 8)
    out, lse = reference.neighborhood(q, k, v, 5)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)))
    assert torch.allclose(out, expected.transpose(1, 2))
    assert lse.shape == (2, 5, 3)

"""Workloads of neighbourhood attention, pair by pair against the oracle's axes, and their names."""

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright import graph as graph_file
from tilewright import masks, reference
from tilewright.core.errors import ConfigError


@st.composite
def rules(draw):
    """``(grid, window, stride, dilation, causal)`` by axes."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 9))
        dilation = draw(st.integers(1, length))
        window = draw(st.integers(1, length // dilation))
        axes.append((length, window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    return tuple(zip(*axes, strict=True))


def by_x(numbers):
    return "x".join(map(str, numbers))


@settings(max_examples=40)
@given(rule=rules(), cut=st.booleans())
def test_a_pattern_has_the_pairs_of_the_oracle(rule, cut):
    grid, window, stride, dilation, causal = rule
    causal = (False,) * len(grid) if cut else causal
    name = f"neighborhood-{by_x(grid)}-w{by_x(window)}-s{by_x(stride)}-d{by_x(dilation)}"
    name += f"-causal{''.join(str(axis) for axis, one in enumerate(causal) if one)}" * any(causal) + "-cut" * cut
    graph = masks.build(name)
    each = zip(grid, window, stride, dilation, causal, strict=True)
    pairs = [reference.axis_pairs(*axis, "cut" if cut else "shift").numpy().astype(np.int8) for axis in each]
    np.testing.assert_array_equal(graph.to_dense(), reduce(np.kron, pairs).astype(bool))
    # Distinct rows are held once, in order of appearance.
    assert graph.id == graph_file.from_pattern(graph.to_csr()).id
    assert masks.size(name) >= graph.n_rows + len(graph.indices) and graph.meta["grid"] == list(grid)


def test_one_number_is_that_of_all_axes():
    short, long = (masks.build(f"neighborhood-{rest}") for rest in ("6x6x8-w3-causal", "6x6x8-w3x3x3-causal012"))
    assert short.id == long.id
    assert masks.build("neighborhood-6x6x8-w3-causal0").id != short.id


def test_tokens_of_a_box_of_one_remainder_belong_together():
    hint = np.asarray(masks.build("neighborhood-32x9-w3-d2x1").row_hint).reshape(32, 9)
    _, counts = np.unique(hint, return_counts=True)
    assert sorted(counts) == [8] * 4 + [64] * 4
    assert (hint[:16:2, :8] == hint[0, 0]).all() and hint[1, 0] != hint[0, 0]


@pytest.mark.parametrize("name", ["neighborhood-6x9x8-w3x5x4-s1x2x1-causal0", "neighborhood-20x21-w7-d2x1-cut"])
def test_a_plan_of_the_pattern_is_the_closed_form(name):
    params, graph = masks.parse(name)[1], masks.build(name)
    q, k, v = torch.randn(3, 1, *params.grid, 2, 16, generator=torch.Generator().manual_seed(0))
    plan = tw.plan(graph, heads=2, head_dim=16, device="cpu", reorder="window", solver="greedy")
    expected = plan(*(x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))).transpose(1, 2).reshape(q.shape)
    rule = {"stride": params.stride, "dilation": params.dilation, "causal": params.causal, "border": params.border}
    torch.testing.assert_close(tw.neighborhood.attend(q, k, v, params.window, **rule), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("neighborhood-8x8-w9", "window: expected at most the 8 tokens of axis 0, found window 9"),
        ("neighborhood-8x8-w3-d3", "found window 3 times dilation 3"),
        ("neighborhood-8x8-w3-s4", "stride: expected at most the window 3, found 4"),
        ("neighborhood-8x8-w3x3x3", "window: expected"),
        ("neighborhood-8x8-w3-causal0-cut", 'border: expected "shift" with a causal axis'),
        ("neighborhood-8x8-w0", "window"),
    ],
)
def test_windows_that_do_not_fit_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        masks.build(name)

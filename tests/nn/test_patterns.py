"""Ready patterns by name, against their definitions pair by pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError, PatternError, TilewrightError, UnknownNameError
from tilewright.graph import from_pattern
from tilewright.masks import vision_longformer
from tilewright.nn import patterns


def matrix(graph):
    found = np.zeros(graph.shape, bool)
    indptr, indices = graph.expand()
    found[np.repeat(np.arange(graph.n_rows), np.diff(indptr)), indices] = True
    return found


def sees(name, grid, n_special):
    """The definition: bool [N, N]."""
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    dy, dx = abs(y[:, None] - y), abs(x[:, None] - x)
    kind, *rest = name.split("-")
    side = int(rest[0]) if rest else 0
    half = side // 2
    if kind == "window":
        near = (dy <= half) & (dx <= half)
    elif kind == "chunk":
        near = (abs(y[:, None] // half - y // half) <= 1) & (abs(x[:, None] // half - x // half) <= 1)
    elif kind == "axial":
        near = (dy == 0) | (dx == 0)
    elif kind == "full":
        near = dy >= 0
    else:
        by = half if rest[1:] else 0
        # Windows begin `by` tokens late; what is before them, or after the last whole one, is apart.
        parts = [(at - by) // side for at in (y, x)]
        near = (parts[0][:, None] == parts[0]) & (parts[1][:, None] == parts[1])
    found = np.ones((n_special + len(y),) * 2, bool)
    found[n_special:, n_special:] = near
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        ["window-3", "window-7", "chunk-5", "chunk-7", "axial", "full", "swin-2", "swin-4-shift", "swin-3"]
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_a_named_pattern_is_its_definition(name, rows, columns, n_special):
    if name.startswith("swin"):
        side = int(name.split("-")[1])
        rows, columns = side * (1 + rows % 3), side * (1 + columns % 3)
    full_name = name + f"-g{n_special}" * (n_special > 0)
    found = patterns.graph(full_name, (rows, columns), n_special)
    assert np.array_equal(matrix(found), sees(name, (rows, columns), n_special))
    assert found.row_hint is not None


def test_cyclic_chunks_of_a_square_are_vision_longformers():
    found = patterns.graph("cyclic-5-g1", (6, 6), 1)
    assert found.id == vision_longformer.pattern(6, 1, 2, "cyclic").id
    # Over a grid that is none, each axis wraps around by itself.
    wide = matrix(patterns.graph("cyclic-5", (6, 8), 0)).reshape(6, 8, 6, 8)
    assert wide[0, 0, 5, 7] and not wide[0, 0, 0, 4] and wide[0, 2, 0, 4]


def test_patterns_of_other_forms():
    grid, wanted = (2, 3), np.eye(7, dtype=bool)
    wanted[0] = True
    forms = wanted, from_pattern(wanted), lambda grid, n_special: wanted
    assert all(np.array_equal(matrix(patterns.graph(form, grid, 1)), wanted) for form in forms)


@pytest.mark.parametrize(
    ("pattern", "grid", "n_special", "error", "line"),
    [
        ("window", (4, 4), 0, UnknownNameError, "unknown pattern 'window'; known: window-<side>"),
        ("window-4", (4, 4), 0, ConfigError, "pattern window-4: window: expected an odd number"),
        ("window-3-g2", (4, 4), 1, PatternError, "special tokens, 1, found 2; name it window-3-g1"),
        ("window-3", (4, 4), 1, PatternError, "special tokens, 1, found 0; name it window-3-g1"),
        ("cyclic-7", (9, 8), 0, PatternError, "at least 3 chunks, 9 tokens, a side, found 9 x 8"),
        ("swin-3", (9, 8), 0, PatternError, "whole windows of 3, found 9 x 8"),
        (np.ones((4, 4), bool), (2, 2), 1, PatternError, "expected 5 x 5 for 1 special tokens and a grid of 2 x 2"),
        ("full", (0, 4), 0, PatternError, "at least 1 x 1 tokens, found 0 x 4"),
    ],
)
def test_what_does_not_fit_is_named(pattern, grid, n_special, error, line):
    with pytest.raises(error, match=line) as found:
        patterns.graph(pattern, grid, n_special)
    assert isinstance(found.value, TilewrightError) and "\n" not in str(found.value)


def test_a_graph_in_another_order_is_refused():
    graph = from_pattern(np.eye(4, dtype=bool))
    order = np.array([1, 0, 2, 3])
    with pytest.raises(PatternError, match="own token order"):
        patterns.graph(graph.reordered(order, order), (2, 2), 0)

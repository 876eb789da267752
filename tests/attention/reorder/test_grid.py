"""T2: the grid of a windowed pattern is found in any order of its tokens, and no other pattern is taken for one."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import masks
from tilewright.attention import blocks, reorder
from tilewright.attention.blocks import tiles, work
from tilewright.attention.cuda import tile_lists
from tilewright.attention.reorder import _grid, _neighbours, _quotient
from tilewright.attention.reorder._quality import work_fraction
from tilewright.graph import Graph, from_pattern

# Sides, reach of the windows along each axis, edge.
GRIDS = {
    "line": ((200,), (3,), "clipped"),
    "image": ((24, 16), (2, 2), "clipped"),
    "flat-windows": ((20, 20), (1, 4), "clipped"),
    "shifted": ((24, 24), (3, 3), "shifted"),
    "wrapped": ((16, 16), (2, 2), "wrapped"),
    "wrapped-odd": ((15, 21), (2, 3), "wrapped"),
    "volume": ((8, 9, 10), (1, 1, 2), "clipped"),
}


def axis(n, reach, edge):
    at = np.arange(n)
    if edge == "wrapped":
        distance = abs(at[:, None] - at)
        return np.minimum(distance, n - distance) <= reach
    centre = np.clip(at, reach, n - 1 - reach) if edge == "shifted" else at
    return abs(centre[:, None] - at) <= reach


def windows(sides, reach, edge="clipped", n_global=0):
    """Dense pattern of windows, with tokens before the grid that see and are seen by all."""
    dense = np.ones((1, 1), bool)
    for n, f in zip(sides, reach, strict=True):
        dense = np.kron(dense, axis(n, f, edge))
    whole = np.ones((n_global + len(dense),) * 2, bool)
    whole[n_global:, n_global:] = dense
    return whole


def shuffled(dense, seed):
    order = np.random.default_rng(seed).permutation(len(dense))
    return dense[order][:, order]


def found_in(dense):
    graph = from_pattern(dense)
    return _grid.find(_quotient.quotient(graph, _quotient.split(graph, 2.0)[0], exact=True))


def fills_boxes(grid, dense):
    """Whether the distinct rows that see each key are all the places between their bounds, wrapped ones any stretch."""
    rows = dense[np.sort(np.unique(dense, axis=0, return_index=True)[1])]
    rows = rows[:, ~rows.all(0)]
    rows = rows[rows.any(1)]
    taken = set()
    for part, at in zip(grid.part, grid.coordinates, strict=True):
        taken.add((part, *at))
    for key in rows.T[rows.any(0)]:
        at, part = grid.coordinates[key], set(grid.part[key])
        values = [sorted(set(column)) for column in at.T]
        box = {(*part, *place) for place in itertools.product(*values)}
        gaps = [sum(b - a > 1 for a, b in itertools.pairwise(v)) for v in values]
        whole = all(gap <= around for gap, around in zip(gaps, grid.wrapped, strict=True))
        if len(part) > 1 or not whole or box != {(*part, *place) for place in map(tuple, at)}:
            return False
    return len(taken) == len(grid.part)


# ------------------------------------------------------------------------------------ finding


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["in-order", "shuffled", "shuffled-otherwise"])
@pytest.mark.parametrize(("sides", "reach", "edge"), GRIDS.values(), ids=GRIDS)
def test_a_grid_is_found_whatever_the_order_of_its_tokens(sides, reach, edge, seed):
    dense = windows(sides, reach, edge)
    dense = dense if seed is None else shuffled(dense, seed)
    grid = found_in(dense)
    # Windows that are shifted inwards at an end are equal there.
    rows = [n - 2 * f if edge == "shifted" else n for n, f in zip(sides, reach, strict=True)]
    assert sorted(grid.sides) == sorted(rows)
    assert grid.wrapped == (edge == "wrapped",) * len(sides)
    assert sorted(grid.reach) == sorted(2 * f + 1 for f in reach)
    assert grid.part.max() == 0
    assert fills_boxes(grid, dense)


def test_the_first_guess_needs_no_neighbours(monkeypatch):
    monkeypatch.setattr(_neighbours, "coordinates", None)
    for sides, reach, edge in GRIDS.values():
        assert found_in(windows(sides, reach, edge)).part.max() == 0


@pytest.mark.parametrize("seed", [None, 0])
def test_global_tokens_are_no_part_of_the_grid(seed):
    dense = windows((16, 16), (2, 2), n_global=2)
    dense = dense if seed is None else shuffled(dense, seed)
    ordered, info = reorder.apply(from_pattern(dense), "ic")
    assert info["params"]["sides"] == [16, 16]
    assert ordered.row_degree[-1] == 258
    assert (ordered.row_degree[:-2] < 30).all()


def test_queries_may_be_fewer_than_keys():
    dense = windows((24, 24), (3, 3))
    y, x = np.divmod(np.arange(576), 24)
    order = np.random.default_rng(0).permutation(576)
    dense = dense[(y % 2 == 0) & (x % 2 == 0)][:, order]
    assert found_in(dense[np.random.default_rng(1).permutation(144)]).sides == (12, 12)


def test_windows_with_gaps_are_grids_side_by_side():
    y, x = np.divmod(np.arange(400), 20)
    dy, dx = abs(y[:, None] - y), abs(x[:, None] - x)
    dense = (dy <= 4) & (dx <= 4) & (dy % 2 == 0) & (dx % 2 == 0)
    grid = found_in(shuffled(dense, 0))
    assert grid.sides == (10, 10)
    assert grid.part.max() == 3
    assert fills_boxes(grid, shuffled(dense, 0))


def test_large_grids_are_found_by_a_sample_of_keys():
    dense = shuffled(windows((60, 60), (5, 5)), 0)
    graph = from_pattern(dense)
    q = _quotient.quotient(graph, np.arange(3600), exact=True)
    _, *csr = _neighbours._local(q.indptr, q.indices, q.col_ptr, q.col_rows)
    assert len(_neighbours._sampled(*csr)[1]) < 0.8 * len(q.indices)
    assert _grid.find(q).sides == (60, 60)


@pytest.mark.parametrize("change", ["holes", "further-keys"])
def test_a_few_rows_of_a_large_pattern_tell_that_it_is_no_grid(change, monkeypatch):
    dense = shuffled(windows((60, 60), (4, 4)), 0)
    chance = np.random.default_rng(0).random(dense.shape)
    dense = dense & (chance < 0.9) if change == "holes" else dense | (chance < 0.01)
    compared, nearest = [], _neighbours._nearest

    def counted(csr, sample, rows):
        compared.append(len(rows))
        return nearest(csr, sample, rows)

    monkeypatch.setattr(_neighbours, "_nearest", counted)
    assert found_in(dense) is None
    assert sum(compared) < 1000


def not_grids():
    generator, line = np.random.default_rng(0), windows((300,), (6,))
    image = windows((20, 20), (3, 3))
    yield "random", generator.random((300, 300)) < 0.05
    ranks = 1 / np.arange(1, 301)
    yield "power-law", generator.random((300, 300)) < np.minimum(1, 30 * ranks[:, None] * ranks * 10)
    yield "band-with-holes", line & (generator.random(line.shape) < 0.9)
    yield "band-and-random", line | (generator.random(line.shape) < 0.01)
    yield "image-with-holes", image & (generator.random(image.shape) < 0.95)
    lacking = image.copy()
    lacking[210, 211] = False
    yield "image-without-one-pair", lacking
    further = image.copy()
    further[210, 0] = True
    yield "image-with-one-pair-more", further
    y, x = np.divmod(np.arange(400), 20)
    yield "discs", (y[:, None] - y) ** 2 + (x[:, None] - x) ** 2 <= 10
    yield "same-window", np.kron(np.eye(12, dtype=bool), np.ones((5, 5), bool))


NOT_GRIDS = dict(not_grids())


@pytest.mark.parametrize("seed", [None, 0], ids=["in-order", "shuffled"])
@pytest.mark.parametrize("dense", NOT_GRIDS.values(), ids=NOT_GRIDS)
def test_other_patterns_are_not_taken_for_grids(dense, seed):
    dense = dense if seed is None else shuffled(dense, seed)
    assert found_in(dense) is None
    assert "grid" not in reorder.apply(from_pattern(dense), "ic", {"cap": 16})[1]["params"]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 14), st.integers(2, 14), st.sampled_from([0.1, 0.3, 0.6]), st.integers(0, 2**32 - 1))
def test_whatever_is_found_is_a_grid(rows, cols, share, seed):
    dense = np.random.default_rng(seed).random((rows, cols)) < share
    dense[-1, -1] = True
    grid = _grid.find(_quotient.quotient(from_pattern(dense), np.arange(len(np.unique(dense, axis=0))), exact=True))
    assert grid is None or fills_boxes(grid, dense)


def test_a_wrong_guess_is_refused():
    dense = windows((12, 12), (2, 2))
    q = _quotient.quotient(from_pattern(dense), np.arange(144), exact=True)
    right = np.stack(np.divmod(np.arange(144), 12), 1)
    part = np.zeros(144, np.int64)
    assert _grid.checked(q, right, part).sides == (12, 12)
    swapped = right.copy()
    swapped[[30, 31]] = swapped[[31, 30]]
    assert _grid.checked(q, swapped, part) is None
    assert _grid.checked(q, np.stack(np.divmod(np.arange(144), 18), 1), part) is None
    assert _grid.checked(q, np.minimum(right, 10), part) is None
    assert _grid.checked(q, right, np.arange(144) // 72) is None


# ------------------------------------------------------------------------------------ boxes


def executed(graph, order):
    """Steps and rank of the factors of the 64-row slices of `graph` in `order`."""
    ordered = reorder.apply(graph, order)[0]
    cover = blocks.extract(ordered, tiles.parse("64x1"))
    items = work.items(cover, None)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    return lists.items[:, tile_lists.Item.STEPS].sum(), lists.rank


EXACT = [(f"vil-tiny-{r}-s1", mode) for r in (128, 224, 384) for mode in ("exact", "chunk")]


@pytest.mark.parametrize("order", ["ic", "hc"])
@pytest.mark.parametrize(("model", "mode"), EXACT)
def test_boxes_execute_no_more_than_the_windows_of_the_model(model, mode, order):
    graph = masks.build(model, {"mode": mode})
    place = np.random.default_rng(0).permutation(graph.n_rows)
    keys = np.argsort(place).astype(np.int32)
    mixed = [np.sort(keys[graph.indices[a:b]]) for a, b in itertools.pairwise(graph.indptr)]
    blind = Graph(graph.indptr, np.concatenate(mixed), graph.row_id[place], graph.n_cols)
    steps, rank = executed(graph, "window")
    found_steps, found_rank = executed(blind, order)
    assert found_rank == rank == 16
    assert found_steps <= 1.01 * steps


def test_quarters_of_boxes_are_squares():
    graph = from_pattern(windows((24, 24), (3, 3)))
    y, x = np.divmod(np.arange(576), 24)
    by_lines = np.lexsort((x, y, x // 8, y // 8))
    ordered = reorder.apply(graph, "ic")[0]
    assert work_fraction(ordered) == work_fraction(graph, by_lines)
    assert work_fraction(ordered, rows=16) < 0.95 * work_fraction(graph, by_lines, rows=16)


def test_flat_boxes_that_gather_less_pay_for_their_masks(monkeypatch):
    # Boxes of 4 x 16 queries gather 12 x 46 keys, those of 8 x 8 gather 16 x 38. Their masks have 20 factors and 16.
    assert _grid._best_counts([64.0, 64.0], (9, 31), 64) == (8,)
    monkeypatch.setattr(_grid, "DEPTH", 1e9)
    assert _grid._best_counts([64.0, 64.0], (9, 31), 64) == (16,)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_the_tokens_changes_no_boxes(seed):
    dense = windows((24, 16), (3, 3), n_global=1)
    plain, info = reorder.apply(from_pattern(dense), "ic")
    mixed, other = reorder.apply(from_pattern(shuffled(dense, seed)), "ic")
    assert info["params"] == other["params"]
    assert sorted(mixed.row_order) == list(range(len(dense)))
    assert work_fraction(mixed, best_cut=True) == pytest.approx(work_fraction(plain, best_cut=True), rel=0.01)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(3, 12), min_size=1, max_size=3), st.integers(1, 2), st.booleans())
def test_boxes_hold_each_row_once_and_few_enough(sides, reach, wrapped):
    if wrapped:
        sides = [n + 4 for n in sides]
    grid = found_in(windows(sides, [reach] * len(sides), "wrapped" if wrapped else "clipped"))
    if grid is None:
        return
    order, box = _grid.arrange(grid, np.ones(len(grid.part)))
    assert sorted(order) == list(range(len(grid.part)))
    assert len(box) == len(grid.sides)
    assert math.prod(box) <= 1.5 * _grid.GROUP


def test_boxes_suit_the_windows():
    square, flat, volume = (
        reorder.apply(from_pattern(windows(sides, reach)), "ic")[1]["params"]["box"]
        for sides, reach in (((32, 32), (7, 7)), ((32, 32), (1, 9)), ((16, 16, 16), (2, 2, 2)))
    )
    assert square == [8, 8]
    assert volume == [4, 4, 4]
    assert flat[0] < flat[1]


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_settings_ask_for_the_procedure_or_for_the_grid(name):
    graph = from_pattern(windows((12, 12), (2, 2)))
    assert reorder.apply(graph, name)[1]["params"]["grid"] is True
    assert "cap" in reorder.apply(graph, name, {"grid": False})[1]["params"]
    assert "grid" not in reorder.apply(graph, name, {"cap": 8})[1]["params"]
    assert reorder.apply(graph, name, {"cap": 8, "grid": True})[1]["params"]["sides"] == [12, 12]

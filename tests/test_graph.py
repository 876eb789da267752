"""The graph: distinct rows, orders, files, and every way in which a pattern can be wrong."""

import json
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import graph
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, PatternError

TRIANGLE = np.tril(np.ones((5, 5), bool))


@st.composite
def patterns(draw, max_side=9):
    """Bool [N_q, N_k] with at least one entry and, often, equal rows."""
    rows, cols = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    pool = draw(st.lists(st.lists(st.booleans(), min_size=cols, max_size=cols), min_size=1, max_size=3))
    picked = draw(st.lists(st.integers(0, len(pool) - 1), min_size=rows, max_size=rows))
    dense = np.array([pool[i] for i in picked])
    dense[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = True
    return dense


def reorder(pattern, seed):
    rng = np.random.default_rng(seed)
    return pattern.reordered(rng.permutation(pattern.n_rows), rng.permutation(pattern.n_cols))


def header_of(path):
    with np.load(path) as archive:
        return json.loads(bytes(archive["tilewright"]))


@given(patterns())
def test_a_pattern_comes_back_whole_with_each_distinct_row_held_once(dense):
    pattern = graph.from_pattern(dense)
    assert pattern.shape == dense.shape
    assert pattern.n_distinct == len(np.unique(dense, axis=0))
    assert pattern.entries == dense.sum()
    assert pattern.density == dense.mean()
    np.testing.assert_array_equal(pattern.row_degree, dense.sum(1))
    np.testing.assert_array_equal(pattern.to_dense(), dense)
    np.testing.assert_array_equal(pattern.to_csr().toarray(), dense)
    for query in range(len(dense)):
        np.testing.assert_array_equal(pattern.row(query), np.flatnonzero(dense[query]))


@given(patterns())
def test_scipy_and_arrays_give_the_same_graph(dense):
    wanted = graph.from_pattern(dense).id
    for form in (sp.csr_array, sp.coo_array, sp.csc_array, sp.lil_array):
        assert graph.from_pattern(form(dense)).id == wanted
    assert graph.from_pattern(dense.astype(np.float32)).id == wanted


@given(patterns(), st.integers(0, 2**32 - 1))
def test_a_new_order_moves_rows_and_columns(dense, seed):
    moved = reorder(graph.from_pattern(dense, row_hint=np.arange(len(dense)), col_hint=np.arange(dense.shape[1])), seed)
    np.testing.assert_array_equal(moved.to_dense(), dense[moved.row_order][:, moved.col_order])
    np.testing.assert_array_equal(moved.row_hint, moved.row_order)
    np.testing.assert_array_equal(moved.col_hint, moved.col_order)
    indptr, indices = moved.expand()
    assert all((np.diff(indices[lo:hi]) > 0).all() for lo, hi in pairwise(indptr))


def test_rows_of_classes_that_are_equal_are_merged():
    rows = np.array([0, 1, 0, 1, 2], np.int32)
    pattern = graph.from_distinct_rows(np.array([0, 2, 4, 5]), rows, np.array([0, 1, 2, 1], np.int32), 3)
    assert pattern.n_distinct == 2
    np.testing.assert_array_equal(pattern.to_dense(), [[1, 1, 0], [1, 1, 0], [0, 0, 1], [1, 1, 0]])


def test_indices_may_come_unsorted():
    pattern = graph.from_csr([0, 3, 4], [2, 0, 1, 1], (2, 3))
    np.testing.assert_array_equal(pattern.row(0), [0, 1, 2])
    np.testing.assert_array_equal(pattern.row(1), [1])


def test_stored_zeros_are_no_entries():
    stored = sp.csr_array((np.array([1.0, 0.0, 1.0]), np.array([0, 1, 1]), np.array([0, 2, 3])), shape=(2, 2))
    np.testing.assert_array_equal(graph.from_pattern(stored).to_dense(), [[1, 0], [0, 1]])


def test_rows_without_keys_stay():
    pattern = graph.from_pattern(np.array([[0, 0], [0, 1], [0, 0]]))
    np.testing.assert_array_equal(pattern.row_degree, [0, 1, 0])


def test_one_token():
    assert graph.from_pattern(np.ones((1, 1), bool)).entries == 1


def test_expanding_stops_at_a_limit():
    pattern = graph.from_pattern(TRIANGLE)
    assert len(pattern.expand(limit=15)[1]) == 15
    with pytest.raises(PatternError, match=r"has 15 entries; expected at most 14"):
        pattern.expand(limit=14)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        pytest.param([0, 1, 2, 3, 3], "row_order: expected a permutation of 0..4", id="repeated"),
        pytest.param([0, 1, 2, 3], r"row_order: expected .* shape \(4,\)", id="short"),
        pytest.param([1, 2, 3, 4, 5], "row_order: expected a permutation", id="out-of-range"),
    ],
)
def test_an_order_must_be_a_permutation(order, message):
    with pytest.raises(PatternError, match=message):
        graph.from_pattern(TRIANGLE).reordered(order, np.arange(5))


@pytest.mark.parametrize("long", [0, 1 << 10], ids=["row-by-row", "at-once"])
@pytest.mark.parametrize("n_rows", [1, 40])
def test_a_reordered_graph_is_the_reordered_pattern(monkeypatch, long, n_rows):
    monkeypatch.setattr(graph, "_LONG", long)
    rng = np.random.default_rng(n_rows)
    dense = rng.random((n_rows, 90)) < 0.4
    dense[n_rows // 2 :, 5] = True
    rows, cols = rng.permutation(n_rows), rng.permutation(90)
    found = graph.from_pattern(dense).reordered(rows, cols)
    assert np.array_equal(found.to_dense(), dense[rows][:, cols]) and found.indices.dtype == np.int32
    steps = np.diff(found.indices)
    starts = np.zeros(len(found.indices), bool)
    starts[found.indptr[:-1][np.diff(found.indptr) > 0]] = True
    assert (steps[~starts[1:]] > 0).all()


def test_a_graph_is_reordered_once():
    with pytest.raises(PatternError, match="natural order"):
        reorder(reorder(graph.from_pattern(TRIANGLE), 0), 1)


def test_the_id_tells_patterns_and_orders_apart():
    first = graph.from_pattern(TRIANGLE)
    assert first.id == graph.from_pattern(TRIANGLE.copy(), meta={"model": "other"}).id
    assert len({first.id, graph.from_pattern(TRIANGLE.T).id, reorder(first, 0).id, reorder(first, 1).id}) == 4


@pytest.mark.parametrize(
    ("indptr", "indices", "shape", "message"),
    [
        pytest.param([0], [], (0, 3), "at least one query and one key, found shape 0 x 3", id="no-query"),
        pytest.param([0, 0], [], (1, 0), "at least one query and one key", id="no-key"),
        pytest.param([0, 1], [0], (2, 2), "indptr does not describe 2 rows of 1 indices", id="short-indptr"),
        pytest.param([0, 2, 1], [0], (2, 2), "indptr does not describe", id="falling-indptr"),
        pytest.param([0, 0, 0], [], (2, 2), "2 x 2 has no entry", id="empty"),
        pytest.param([0, 1, 2], [0, 2], (2, 2), r"must lie in 0..1, found 0..2", id="beyond"),
        pytest.param([0, 1, 2], [-1, 0], (2, 2), r"found -1..0", id="negative"),
        pytest.param([0, 1, 3], [0, 1, 1], (2, 2), "row 1 names a key twice", id="twice"),
        pytest.param([0, 3, 4], [1, 0, 1, 0], (2, 2), "row 0 names a key twice", id="twice-unsorted"),
    ],
)
def test_broken_csr_is_refused(indptr, indices, shape, message):
    with pytest.raises(PatternError, match=message):
        graph.from_csr(indptr, np.array(indices, np.int64), shape)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param(np.ones(3, bool), r"\[N_q, N_k\], found shape \(3,\)", id="vector"),
        pytest.param(np.array([[1, 2]]), "found the value 2", id="two"),
        pytest.param(np.array([[1.0, np.nan]]), "found NaN", id="nan"),
        pytest.param(np.array([["yes"]]), "found dtype <U3", id="text"),
        pytest.param(np.array([[1j]]), "found dtype complex128", id="complex"),
        pytest.param(sp.csr_array(np.array([[0.5]])), "found the value 0.5", id="sparse-half"),
        pytest.param(np.zeros((2, 2), bool), "has no entry", id="empty"),
    ],
)
def test_what_is_no_mask_is_refused(pattern, message):
    with pytest.raises(PatternError, match=message):
        graph.from_pattern(pattern)


@settings(max_examples=20)
@given(dense=patterns(), classes=st.booleans(), moved=st.booleans())
def test_a_file_brings_back_the_graph(tmp_path_factory, dense, classes, moved):
    path = tmp_path_factory.mktemp("graph") / "g.npz"
    pattern = graph.from_pattern(dense, meta={"model": "m"}, row_hint=np.arange(len(dense)))
    pattern = reorder(pattern, 0) if moved else pattern
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "FULL_ENTRIES", 0 if classes else 10**6)
        graph.save(path, pattern, {"stage": "test"})
    back = graph.load(path)
    assert back.id == pattern.id
    assert back.meta == pattern.meta
    np.testing.assert_array_equal(back.to_dense(), pattern.to_dense())
    for name in ("row_hint", "col_hint", "row_order", "col_order"):
        np.testing.assert_array_equal(getattr(back, name), getattr(pattern, name))
    assert header_of(path)["storage"] == ("classes" if classes else "full")
    opened = sp.load_npz(path).toarray()
    np.testing.assert_array_equal(opened[pattern.row_id] if classes else opened, pattern.to_dense())


def test_an_altered_file_is_found_out(tmp_path):
    path = tmp_path / "g.npz"
    graph.save(path, graph.from_pattern(TRIANGLE))
    arrays, header = artifacts.read_npz(path, graph.KIND, graph.VERSION)
    arrays["indices"][0] = 1
    artifacts.write_npz(path, graph.KIND, graph.VERSION, arrays, header)
    with pytest.raises(ArtifactError, match="the file was altered"):
        graph.load(path)


def test_an_incomplete_file_is_named(tmp_path):
    path = tmp_path / "g.npz"
    artifacts.write_npz(path, graph.KIND, graph.VERSION, {}, {"shape": [1, 1]})
    with pytest.raises(ArtifactError, match=r"g\.npz: expected a complete graph file, found: Object missing"):
        graph.load(path)


def test_a_file_of_another_stage_is_named(tmp_path):
    path = tmp_path / "g.npz"
    artifacts.write_npz(path, "blocks", 1, {}, {})
    with pytest.raises(ArtifactError, match="expected kind 'graph', found 'blocks'"):
        graph.load(path)


def test_masks_are_read_in_every_form(tmp_path):
    wanted = graph.from_pattern(TRIANGLE)
    np.save(tmp_path / "a.npy", TRIANGLE)
    sp.save_npz(tmp_path / "b.npz", sp.coo_array(TRIANGLE.astype(np.uint8)))
    graph.save(tmp_path / "c.npz", wanted)
    for name in ("a.npy", "b.npz", "c.npz"):
        assert graph.read_mask(tmp_path / name).id == wanted.id


def _text(path):
    path.write_text("not an array")


def _archive_of_text(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


def _truncated(path):
    sp.save_npz(path, sp.csr_array(TRIANGLE))
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        pytest.param("m.npy", lambda path: None, "no such file", id="missing"),
        pytest.param("m.png", _text, r"ending in .npz, .npy or .pt, found '.png'", id="suffix"),
        pytest.param("m.npy", _text, "expected a mask", id="npy-of-text"),
        pytest.param("m.npz", _text, "expected a mask", id="npz-of-text"),
        pytest.param("m.npz", _archive_of_text, "expected a mask", id="foreign-archive"),
        pytest.param("m.npz", _truncated, "expected a mask", id="truncated"),
        pytest.param("m.npz", lambda path: np.savez(path, a=TRIANGLE), "expected a mask", id="npz-of-arrays"),
        pytest.param(
            "m.npy", lambda path: np.save(path, np.array([[{}]]), allow_pickle=True), "expected a mask", id="pickle"
        ),
    ],
)
def test_what_is_no_mask_file_is_named(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(ArtifactError, match=message):
        graph.read_mask(tmp_path / name)

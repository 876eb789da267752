"""T2: every order is a permutation, settings are read strictly, clustering reaches the windows' own order."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import reverse_cuthill_mckee

from helpers.files import run_script
from helpers.plans import patterns
from tilewright import graph as graph_file
from tilewright import masks
from tilewright.attention import reorder
from tilewright.attention.reorder import _growth, _linkage, _quotient, _tuning
from tilewright.attention.reorder._quality import work_fraction
from tilewright.core.errors import ConfigError, PatternError, UnknownNameError
from tilewright.graph import from_pattern
from tilewright_study.stages import reorder as reorder_stage

SCRIPT = Path(__file__).parents[3] / "workflow/scripts/reorder.py"
# Every order that needs no hints and takes a rectangular pattern, with what makes each of its paths run.
GENERAL = {
    **{name: (name, {}) for name in reorder.NAMES if name not in ("rcm", "window")},
    "ic-tau": ("ic", {"tau": 0.3, "cap": 4, "col_block": 2}),
    "hc-tree": ("hc", {"chain": "tree", "cap": 2, "neighbors": 2}),
    "hc-growth": ("hc", {"chain": "growth", "cap": 3, "wide": 1.5}),
}


def windows(side, radius):
    """Pattern of a (2·radius+1)² window on a side² grid."""
    y, x = np.divmod(np.arange(side * side), side)
    return np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) <= radius


def shuffled(dense, seed=0):
    """The pattern with rows and columns shuffled alike, so that its natural order tells nothing."""
    order = np.random.default_rng(seed).permutation(len(dense))
    return dense[order][:, order]


# ------------------------------------------------------------------------------------ permutations


def assert_orders(dense, name, params):
    graph = from_pattern(dense)
    ordered, info = reorder.apply(graph, name, params)
    assert sorted(ordered.row_order) == list(range(dense.shape[0]))
    assert sorted(ordered.col_order) == list(range(dense.shape[1]))
    assert np.array_equal(ordered.to_dense(), dense[ordered.row_order][:, ordered.col_order])
    assert info["params"]["symmetric"] == (dense.shape[0] == dense.shape[1])
    if info["params"]["symmetric"]:
        assert np.array_equal(ordered.row_order, ordered.col_order)
    assert info["work_fraction"] == work_fraction(ordered)
    json.dumps(info, allow_nan=False)
    again, _ = reorder.apply(graph, name, params)
    assert again.id == ordered.id


@pytest.mark.parametrize(("name", "params"), GENERAL.values(), ids=GENERAL)
@settings(max_examples=25, deadline=None)
@given(dense=patterns())
@example(dense=np.ones((1, 1), bool))
@example(dense=np.ones((1, 7), bool))
@example(dense=np.ones((9, 5), bool))
@example(dense=np.eye(6, dtype=bool))
def test_every_order_permutes_the_pattern_and_is_deterministic(dense, name, params):
    assert_orders(dense, name, params)


@pytest.mark.parametrize("collapse", [True, False], ids=["collapsed", "every-token"])
@settings(max_examples=25, deadline=None)
@given(dense=patterns(square=True))
def test_rcm_permutes_square_patterns(dense, collapse):
    assert_orders(dense, "rcm", {"collapse": collapse})


@settings(max_examples=100, deadline=None)
@given(dense=patterns(square=True))
@example(dense=windows(14, 2))
def test_rcm_is_scipys_order_with_ties_as_they_come(dense):
    unstable, graph = np.argsort, from_pattern(dense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "argsort", lambda a, kind=None: unstable(a, kind="stable"))
        expected = reverse_cuthill_mckee(graph.to_csr(), symmetric_mode=(dense == dense.T).all())
    ordered, _ = reorder.apply(graph, "rcm", {"collapse": False})
    assert np.array_equal(ordered.row_order, expected)


@settings(max_examples=25, deadline=None)
@given(dense=patterns(), seed=st.integers(0, 99))
def test_window_sorts_stably_by_hint(dense, seed):
    rng = np.random.default_rng(seed)
    rows, cols = (rng.integers(0, 4, n) for n in dense.shape)
    ordered, _ = reorder.apply(from_pattern(dense, row_hint=rows, col_hint=cols), "window")
    assert np.array_equal(ordered.row_order, sorted(range(len(rows)), key=rows.__getitem__))
    assert np.array_equal(ordered.col_order, sorted(range(len(cols)), key=cols.__getitem__))
    assert (np.diff(ordered.row_hint) >= 0).all()


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_equal_rows_stay_side_by_side(name):
    dense = np.kron(np.eye(6, dtype=bool) | np.eye(6, k=1, dtype=bool), np.ones((5, 5), bool))
    shuffle = np.random.default_rng(0).permutation(30)
    ordered, _ = reorder.apply(from_pattern(dense[shuffle][:, shuffle]), name)
    assert (np.diff(ordered.row_id) != 0).sum() == 5


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_global_rows_come_last(name):
    dense = windows(12, 1)
    dense[[3, 77]] = True
    ordered, _ = reorder.apply(from_pattern(dense), name, {"wide": 2.0})
    assert sorted(ordered.row_order[-2:]) == [3, 77]


@pytest.mark.parametrize("name", ["none", "rcm", "hc", "ic", "window"])
def test_rows_only_leaves_the_keys_in_place(name):
    graph = from_pattern(windows(6, 1), row_hint=np.arange(36) % 4, col_hint=np.arange(36) % 4)
    ordered, info = reorder.apply(graph, name, {"symmetric": False})
    assert np.array_equal(ordered.col_order, np.arange(36))
    assert info["params"]["symmetric"] is False


def test_keys_of_a_rectangular_pattern_come_as_ordinary_queries_see_them():
    dense = np.zeros((6, 8), bool)
    dense[0] = True
    for row, keys in enumerate(([6, 7], [4, 5], [2, 3], [0, 1], [1, 2]), 1):
        dense[row, keys] = True
    ordered, _ = reorder.apply(from_pattern(dense, row_hint=np.arange(6)), "window")
    assert ordered.col_order.tolist() == [6, 7, 4, 5, 2, 3, 0, 1]


# ------------------------------------------------------------------------------------ quality


def test_work_fraction_counts_unions_of_padded_groups():
    dense = np.zeros((5, 10), bool)
    dense[0, 0], dense[1, 1], dense[2, :3], dense[3, 3], dense[4, :] = True, True, True, True, True
    # Groups {0,1}, {2,3}, {4}: unions of 2, 4 and 10 keys, two rows each.
    assert work_fraction(from_pattern(dense), rows=2) == 2 * (2 + 4 + 10) / 50
    # Groups {4,2}, {0,1}, {3}.
    assert work_fraction(from_pattern(dense), np.array([4, 2, 0, 1, 3]), rows=2) == 2 * (10 + 2 + 1) / 50
    assert work_fraction(from_pattern(np.eye(4, dtype=bool)), rows=4, best_cut=True) <= 1


PUBLISHED_WORK = {
    "vil-raster": ("vil-tiny-224-s1", "none", {}, 0.367),
    "vil-rcm": ("vil-tiny-224-s1", "rcm", {"collapse": False}, 0.310),
    "vil-window": ("vil-tiny-224-s1", "window", {}, 0.192),
    "regionvit-raster": ("regionvit-tiny-224-s1", "none", {}, 0.147),
    "regionvit-rcm": ("regionvit-tiny-224-s1", "rcm", {}, 0.055),
    "regionvit-window": ("regionvit-tiny-224-s1", "window", {}, 0.055),
}


@pytest.mark.parametrize(("model", "name", "params", "work"), PUBLISHED_WORK.values(), ids=PUBLISHED_WORK)
def test_known_gathered_work_of_true_masks(model, name, params, work):
    _, info = reorder.apply(masks.build(model), name, params)
    assert info["work_fraction"] == pytest.approx(work, abs=1e-3)


TRUE_MASKS = {
    **{f"vil-{r}-s{s}-{mode}": (f"vil-tiny-{r}-s{s}", {"mode": mode})
       for r in (128, 224) for s in (1, 2) for mode in ("chunk", "exact")},
    **{f"regionvit-{r}-s{s}": (f"regionvit-tiny-{r}-s{s}", {}) for r in (128, 224, 384) for s in (1, 2, 3, 4)},
    "vil-384-s1-chunk": ("vil-tiny-384-s1", {}),
    "vil-1024-s1-chunk": ("vil-tiny-1024-s1", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["ic", "hc"])
@pytest.mark.parametrize("workload", TRUE_MASKS.values(), ids=TRUE_MASKS)
def test_clustering_reaches_the_windows_of_the_model_without_its_hints(workload, name):
    graph = masks.build(*workload)
    window = reorder.apply(graph, "window")[1]["work_fraction"]
    blind = graph_file.Graph(graph.indptr, graph.indices, graph.row_id, graph.n_cols)
    assert reorder.apply(blind, name)[1]["work_fraction"] <= 1.1 * window


@pytest.mark.parametrize("name", ["ic", "hc"])
@pytest.mark.parametrize(("model", "bar"), [("vil-tiny-224-s1", 0.211), ("regionvit-tiny-224-s1", 0.06)])
def test_clustering_meets_the_published_bar(model, bar, name):
    assert reorder.apply(masks.build(model), name)[1]["work_fraction"] <= bar


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_regional_rows_do_not_scatter(name):
    graph = masks.build("regionvit-tiny-224-s1")
    ordered, _ = reorder.apply(graph, name)
    regional = np.flatnonzero(graph.row_degree[ordered.row_order] > 100)
    assert len(regional) == 64
    assert np.ptp(regional) == 63


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_clustering_finds_windows_in_a_shuffled_pattern(name):
    plain, mixed = windows(24, 2), shuffled(windows(24, 2))
    known = reorder.apply(from_pattern(plain), name)[1]["work_fraction"]
    found = reorder.apply(from_pattern(mixed), name)[1]["work_fraction"]
    assert found <= 1.15 * known
    assert found <= 0.4 * work_fraction(from_pattern(mixed))


# ------------------------------------------------------------------------------------ quotient


@settings(max_examples=40, deadline=None)
@given(dense=patterns(), block=st.sampled_from([1, 3]))
def test_quotient_keeps_sizes_of_rows_and_unions(dense, block):
    graph = from_pattern(dense)
    q = _quotient.quotient(graph, np.arange(graph.n_distinct), block)
    assert sorted([*q.rows, *q.bare]) == list(range(graph.n_distinct))
    assert np.array_equal(q.size, np.bincount(graph.row_id, minlength=graph.n_distinct)[q.rows])
    touched = np.add.reduceat(dense, np.arange(0, dense.shape[1], block), axis=1) > 0
    classes = np.array([touched[np.flatnonzero(graph.row_id == c)[0]] for c in range(graph.n_distinct)])
    told = classes[:, classes.sum(0) <= max(1, _quotient.UBIQUITOUS * len(classes))]
    for i, j in np.ndindex(min(len(q.rows), 5), min(len(q.rows), 5)):
        units = np.union1d(*(q.indices[q.indptr[k] : q.indptr[k + 1]] for k in (i, j)))
        assert q.weight[units].sum() == block * (told[q.rows[i]] | told[q.rows[j]]).sum()


def test_quotient_samples_what_costs_too_much(monkeypatch):
    dense = np.random.default_rng(0).random((200, 2000)) < 0.3
    whole = _quotient.quotient(from_pattern(dense), np.arange(200))
    monkeypatch.setattr(_quotient, "STEPS", 1e6)
    monkeypatch.setattr(_quotient, "STEPS_PER_ROW", 0)
    part = _quotient.quotient(from_pattern(dense), np.arange(200))
    assert (np.diff(part.col_ptr).astype(float) ** 2).sum() < 1.2e6
    keys = [np.add.reduceat(q.weight[q.indices], q.indptr[:-1]).mean() for q in (whole, part)]
    assert keys[1] == pytest.approx(keys[0], rel=0.1)


def test_columns_are_equal_only_when_all_rows_are():
    ptr, rows = _quotient.transpose(np.array([0, 2, 3]), np.array([0, 2, 1], np.int32), 4)
    assert _quotient.leaders(ptr, rows, np.array([True, True, True, False])).tolist() == [0, 1, 0, 3]


# ------------------------------------------------------------------------------------ procedures


def test_growth_takes_the_row_that_adds_least_and_stops_at_the_cap():
    dense = np.zeros((4, 9), bool)
    dense[0, :4] = dense[1, 4:8] = dense[2, :3] = dense[3, 4:9] = True
    graph = from_pattern(dense)
    q = _quotient.quotient(graph, np.arange(4))
    assert [set(pair) for pair in _growth.grow(q, cap=2, tau=1.0).reshape(2, 2)] == [{0, 2}, {1, 3}]
    assert len(_growth.grow(q, cap=2, tau=1.0, limit=3)) == 3


def slow_growth(q, cap, tau):
    """The growth of groups, in sets."""
    rows = [set(q.indices[q.indptr[r] : q.indptr[r + 1]]) for r in range(len(q.rows))]
    users = [[r for r, units in enumerate(rows) if u in units] for u in range(len(q.weight))]

    def keys(units):
        return float(sum(q.weight[u] for u in units))

    def shared(row, members):
        return sum(q.size[m] * keys(rows[row] & rows[m]) for m in members)

    whole = [sum(q.weight[u] * q.size[users[u]].sum() for u in units) for units in rows]
    placed, near = [], []
    while len(placed) < len(rows):
        beside = [r for r in near if r not in placed]
        if beside:
            row = max(beside, key=lambda r: shared(r, placed) / whole[r])
        else:
            row = min((r for r in range(len(rows)) if r not in placed), key=lambda r: whole[r])
        group, union, near = [], set(), []
        while row is not None:
            placed.append(row)
            group.append(row)
            union |= rows[row]
            near += [r for r in dict.fromkeys(r for u in sorted(rows[row]) for r in users[u]) if r not in near]
            queries, best, row = q.size[group].sum(), np.inf, None
            entries = sum(q.size[m] * keys(rows[m]) for m in group)
            for r in near:
                filled = entries + q.size[r] * keys(rows[r])
                area = keys(union | rows[r]) * (queries + q.size[r])
                common = _growth.COMPACTNESS * shared(r, group) / queries
                cost = (keys(rows[r] - union) - common) / keys(rows[r])
                fits = queries + q.size[r] <= cap and filled >= (1 - tau) * area
                if r not in placed and fits and cost < best:
                    best, row = cost, r
    return placed


@settings(max_examples=60, deadline=None)
@given(dense=patterns(), cap=st.sampled_from([1, 3, 64]), tau=st.sampled_from([0.2, 0.5, 1.0]))
def test_growth_is_what_it_says(dense, cap, tau):
    graph = from_pattern(dense)
    q = _quotient.quotient(graph, np.arange(graph.n_distinct))
    assert _growth.grow(q, cap=cap, tau=tau).tolist() == slow_growth(q, cap, tau)


def test_linkage_merges_by_the_least_increase_of_area():
    dense = np.zeros((4, 12), bool)
    dense[0, :6] = dense[1, 3:9] = dense[2, :5] = dense[3, 4:9] = True
    q = _quotient.quotient(from_pattern(dense), np.arange(4))
    near = _linkage.similar(q, 3)
    for chain in ("tree", "growth"):
        order = _linkage.link(q, near, cap=2, chain=chain)
        assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 2)), frozenset((1, 3))}


@settings(max_examples=40, deadline=None)
@given(dense=patterns())
def test_of_all_pairs_the_one_that_costs_least_is_merged(dense):
    graph = from_pattern(dense)
    q = _quotient.quotient(graph, np.arange(graph.n_distinct))
    n = len(q.rows)
    clusters = {r: (set(q.indices[q.indptr[r] : q.indptr[r + 1]].tolist()), q.size[r]) for r in range(n)}

    def area(units, queries):
        return q.weight[list(units)].sum() * queries

    def increase(i, j):
        (one, m), (two, k) = clusters[i], clusters[j]
        return area(one | two, m + k) - area(one, m) - area(two, k)

    others = np.array([[*range(r), *range(r + 1, n)] for r in range(n)], np.int64).reshape(n, max(n - 1, 0))
    left, right = _linkage._merge(q.indptr, q.indices, q.weight, q.size, others, np.array([np.inf]))
    for node, pair in enumerate(zip(left, right, strict=True), n):
        assert pair == min(itertools.combinations(sorted(clusters), 2), key=lambda pair: (increase(*pair), pair))
        (one, m), (two, k) = (clusters.pop(each) for each in pair)
        clusters[node] = one | two, m + k
    assert len(clusters) == min(n, 1)


def test_similar_rows_by_jaccard():
    dense = np.random.default_rng(1).random((30, 40)) < 0.2
    dense[:, 0] = False
    q = _quotient.quotient(from_pattern(dense), np.arange(30))
    near = _linkage.similar(q, 4)
    both = (dense[:, None] & dense).sum(2) / (dense[:, None] | dense).sum(2)
    np.fill_diagonal(both, 0)
    for row in range(30):
        assert np.allclose(both[row, near[row]], np.sort(both[row])[::-1][:4])


# ------------------------------------------------------------------------------------ tuning


def test_tuning_keeps_the_best_value_of_each_setting():
    graph = from_pattern(windows(16, 2))
    orders = {}

    def arrange(_, used):
        rng = np.random.default_rng([used["a"], used["b"]])
        orders[used["a"], used["b"]] = rng.permutation(256) if used["a"] + used["b"] else np.arange(256)
        return orders[used["a"], used["b"]]

    rows, used = _tuning._tuned("x", graph, {"a": 1, "b": 0}, {"a": (1, 0), "b": (0, 1)}, arrange)
    assert used == {"a": 0, "b": 0}
    assert np.array_equal(rows, np.arange(256))
    assert set(orders) == {(1, 0), (0, 0), (0, 1)}


def test_thresholds_that_set_the_same_rows_apart_are_tried_once():
    dense = windows(12, 1)
    dense[0] = True
    tried = []

    def arrange(graph, used):
        tried.append(used["wide"])
        return np.arange(graph.n_rows)

    # Twice and eight times the median of 9 keys set the same row apart, the global one; half of it sets all apart.
    free = {"wide": (2.0, 0.5, 8.0)}
    _tuning._tuned("x", from_pattern(dense), {"wide": 2.0}, free, arrange)
    assert tried == [2.0, 0.5]


def test_settings_given_are_not_tuned():
    graph = from_pattern(windows(10, 1))
    given = {"cap": 5, "tau": 0.7, "wide": 3.0, "col_block": 2}
    _, info = reorder.apply(graph, "ic", given)
    assert info["params"] == {**given, "symmetric": True}


def test_a_large_graph_is_tuned_on_a_part_of_it(monkeypatch):
    monkeypatch.setattr(_tuning, "TUNE_ROWS", 100)
    dense = windows(20, 1)
    dense[7] = True
    seen = []

    def arrange(graph, used):
        seen.append(graph.n_rows)
        return np.arange(graph.n_rows)

    rows, _ = _tuning._tuned("x", from_pattern(dense), {"a": 0}, {"a": (0, 1)}, arrange)
    assert seen == [100, 100, 400]
    assert len(rows) == 400


# ------------------------------------------------------------------------------------ errors and files


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ic", {"tao": 1}, "order ic: .*`tao`.*known settings: symmetric, col_block, cap, wide, grid, tau"),
        ("ic", {"tau": 1.5}, "order ic: .*<= 1.0"),
        ("ic", {"tau": "0.5"}, "order ic: .*float"),
        ("ic", {"cap": 0}, "order ic: .*>= 1"),
        ("ic", {"symmetric": "false"}, "order ic: .*bool"),
        ("hc", {"neighbors": 0}, "order hc: .*>= 1"),
        ("rcm", {"tau": 0.5}, "order rcm: .*`tau`.*known settings: symmetric, collapse"),
    ],
)
def test_wrong_settings_are_named(name, params, message):
    with pytest.raises(ConfigError, match=message):
        reorder.parse(name, params)


def test_unknown_order():
    with pytest.raises(UnknownNameError, match="unknown order 'hcc'; known: none, rcm, hc, ic, window"):
        reorder.parse("hcc")


def test_rcm_needs_a_square_pattern():
    with pytest.raises(PatternError, match="order rcm: expected a square pattern, found 2 x 3"):
        reorder.apply(from_pattern(np.ones((2, 3), bool)), "rcm")


@pytest.mark.parametrize("name", ["none", "ic", "hc"])
def test_symmetric_needs_a_square_pattern(name):
    with pytest.raises(PatternError, match="expected a square pattern, found 2 x 3"):
        reorder.apply(from_pattern(np.ones((2, 3), bool)), name, {"symmetric": True})


def test_window_needs_hints():
    with pytest.raises(PatternError, match="declared windows, found none in 'mine'"):
        reorder.apply(from_pattern(np.eye(3, dtype=bool), meta={"model": "mine"}), "window")


def test_importing_the_family_stays_light():
    code = (
        "import sys; from tilewright.attention import reorder\n"
        "for name in reorder.NAMES: reorder.parse(name)\n"
        "print(*{'numba', 'scipy', 'torch', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_stage_writes_the_reordered_graph_and_how_it_was_made(tmp_path, capsys):
    natural = from_pattern(windows(8, 1), meta={"model": "grid"})
    graph_file.save(tmp_path / "A.npz", natural)
    reorder_stage.run("ic", tmp_path / "A.npz", tmp_path / "B.npz", ["tau=0.9", "cap=16"])
    ordered = graph_file.load(tmp_path / "B.npz")
    assert ordered.id == reorder.apply(natural, "ic", {"tau": 0.9, "cap": 16})[0].id
    info = ordered.meta["reorder"]
    assert ordered.meta["model"] == "grid"
    assert info["params"]["tau"] == 0.9
    assert info["work_fraction"] == work_fraction(ordered)
    assert info["peak_rss_bytes"] > 10_000_000
    assert info["seconds"] > 0
    assert "ic: gathered work" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["tau", "=1", "tau="])
def test_stage_refuses_a_setting_without_key_or_value(tmp_path, text):
    with pytest.raises(ConfigError):
        reorder_stage.run("ic", tmp_path / "A.npz", tmp_path / "B.npz", [text, "cap=[1"])


def test_stage_refuses_what_is_not_yaml(tmp_path):
    with pytest.raises(ConfigError, match="--set cap=\\[1: expected a YAML value"):
        reorder_stage.run("ic", tmp_path / "A.npz", tmp_path / "B.npz", ["cap=[1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "hcc"], "error: unknown order 'hcc'; known: none, rcm, hc, ic, window"),
        (["--method", "ic", "--set", "tau=2"], "error: order ic:"),
        (["--method", "ic"], "no such file"),
    ],
    ids=["method", "setting", "input"],
)
def test_script_gives_one_line_and_leaves_the_output_alone(tmp_path, arguments, message):
    output = tmp_path / "out.npz"
    output.write_text("before")
    done = run_script(SCRIPT, "--input", tmp_path / "missing.npz", "--output", output, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert output.read_text() == "before"

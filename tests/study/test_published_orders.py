"""The study's orders: the published procedures are what they say, and take their own settings alone."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import patterns
from tilewright import masks
from tilewright.attention.reorder import _grid
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.graph import from_pattern
from tilewright_study import orders, published_orders


def shuffled_windows():
    """Pattern of a 5² window on a 10² grid, rows and columns shuffled alike."""
    y, x = np.divmod(np.random.default_rng(0).permutation(100), 10)
    return np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) <= 2


def published_iterative(dense, width, tau, cap, rounds):
    """The published iterative clustering, in sets."""
    rows = [set(np.flatnonzero(row) // width) for row in dense]
    left, order = set(range(len(rows))), []
    for seed in range(len(rows)):
        if seed not in left:
            continue
        group, union = [seed], set(rows[seed])
        left.remove(seed)
        for _ in range(rounds):
            for row in sorted(r for r in left if rows[r] & union):
                if cap is not None and len(group) >= cap:
                    break
                if 1 - len(rows[row] & union) / len(rows[row] | union) <= tau:
                    group.append(row)
                    left.remove(row)
                    union |= rows[row]
        order += group
    return order


def published_hierarchical(dense, width, neighbors, mean_size):
    """The published hierarchical clustering, in sets; of neighbours that share equally many blocks, the oldest."""
    patterns = {i: set(np.flatnonzero(row) // width) for i, row in enumerate(dense)}
    members, alive, heap = {i: [i] for i in patterns}, set(patterns), []

    def push(i, both):
        shared = sorted((-len(patterns[i] & patterns[j]), j) for j in alive - {i} if patterns[i] & patterns[j])
        for _, j in shared[:neighbors]:
            if both or i < j:
                heapq.heappush(heap, (len(patterns[i] ^ patterns[j]), min(i, j), max(i, j)))

    for i in range(len(dense)):
        push(i, False)
    while len(alive) > 1 and len(dense) / len(alive) < mean_size and heap:
        _, i, j = heapq.heappop(heap)
        if i in alive and j in alive:
            new = len(patterns)
            patterns[new], members[new] = patterns[i] | patterns[j], members[i] + members[j]
            alive = alive - {i, j} | {new}
            push(new, True)
    return [row for cluster in sorted((members[i] for i in alive), key=min) for row in cluster]


@settings(max_examples=60, deadline=None)
@given(
    dense=patterns(),
    width=st.sampled_from([1, 3]),
    tau=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    cap=st.sampled_from([None, 1, 3]),
    rounds=st.integers(1, 3),
)
def test_published_iterative_clustering(dense, width, tau, cap, rounds):
    found = published_orders.iterative(from_pattern(dense), width, tau, cap, rounds)
    assert found.tolist() == published_iterative(dense, width, tau, cap, rounds)


def test_published_iterative_clustering_scans_what_met_the_group_before_the_scan():
    # Row 2 only meets the key that row 1 brings in, hence joins after row 3, in the second scan.
    graph = from_pattern(np.array([[1, 0], [1, 1], [0, 1], [1, 0]], bool))
    assert published_orders.iterative(graph, 1, 0.6, None, rounds=2).tolist() == [0, 1, 3, 2]


@settings(max_examples=60, deadline=None)
@given(
    dense=patterns(),
    width=st.sampled_from([1, 3]),
    neighbors=st.sampled_from([1, 2, 64]),
    mean_size=st.sampled_from([1, 2, 8]),
)
def test_published_hierarchical_clustering(dense, width, neighbors, mean_size):
    found = published_orders.hierarchical(from_pattern(dense), width, neighbors, mean_size)
    assert found.tolist() == published_hierarchical(dense, width, neighbors, mean_size)


def test_published_defaults():
    dense = shuffled_windows()
    ordered, info = orders.apply(from_pattern(dense), "ic", {"variant": "paper"})
    assert ordered.row_order.tolist() == published_iterative(dense, 16, 0.6, None, 2)
    assert info["params"] == {
        "variant": "paper", "symmetric": True, "col_block": 16, "tau": 0.6, "cap": None, "rounds": 2,
    }  # fmt: skip
    ordered, info = orders.apply(from_pattern(dense), "hc", {"variant": "paper"})
    assert ordered.row_order.tolist() == published_hierarchical(dense, 16, 64, 8)
    assert info["params"] == {
        "variant": "paper", "symmetric": True, "col_block": 16, "neighbors": 64, "mean_size": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "params", "work"),
    [
        ("vil-tiny-224-s1", {}, 0.359),
        ("vil-tiny-224-s1", {"tau": 0.3}, 0.211),
        ("regionvit-tiny-224-s1", {"tau": 0.3}, 0.054),
    ],
)
def test_known_gathered_work_of_true_masks(model, params, work):
    _, info = orders.apply(masks.build(model), "ic", {"variant": "paper"} | params)
    assert info["work_fraction"] == pytest.approx(work, abs=1e-3)


@pytest.mark.parametrize(("name", "params"), [("ic", {"col_block": 2}), ("hc", {"col_block": 2, "mean_size": 3})])
@settings(max_examples=25, deadline=None)
@given(dense=patterns())
def test_published_procedures_permute_the_pattern(dense, name, params):
    ordered, info = orders.apply(from_pattern(dense), name, {"variant": "paper"} | params)
    assert np.array_equal(ordered.to_dense(), dense[ordered.row_order][:, ordered.col_order])
    assert info["params"]["symmetric"] == (dense.shape[0] == dense.shape[1])


@pytest.mark.parametrize("name", ["ic", "hc"])
def test_published_procedures_look_for_no_grid(name, monkeypatch):
    monkeypatch.setattr(_grid, "order", None)
    assert "grid" not in orders.apply(from_pattern(shuffled_windows()), name, {"variant": "paper"})[1]["params"]


@pytest.mark.parametrize("params", [{}, {"variant": "default"}])
def test_other_orders_are_those_of_the_wheel(params):
    module, order = orders.parse("ic", params | {"cap": 8})
    assert module == "tilewright.attention.reorder.ic" and order.keywords["params"].cap == 8
    assert orders.parse("rcm", {"collapse": False})[0] == "tilewright.attention.reorder.rcm"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ic", {"rounds": 3}, "order ic: .*`rounds`; known settings: symmetric, col_block, cap, wide, grid, tau"),
        ("ic", {"variant": "paper", "wide": 3.0}, "order ic: .*`wide`; known settings: variant, symmetric, col_block"),
        ("hc", {"variant": "paper", "cap": 8}, "order hc: .*`cap`"),
        ("hc", {"variant": "paper", "mean_size": 0.5}, "order hc: .*>= 1"),
        ("rcm", {"variant": "paper"}, "order rcm: .*`variant`"),
    ],
)
def test_settings_of_the_other_variant_are_refused(name, params, message):
    with pytest.raises(ConfigError, match=message):
        orders.parse(name, params)


def test_unknown_variant():
    with pytest.raises(UnknownNameError, match="unknown variant 'best'; known: default, paper"):
        orders.parse("hc", {"variant": "best"})

"""Ready patterns, against their definitions pair by pair."""

import itertools

import numpy as np
import pytest

from tilewright import graph as graph_file
from tilewright import masks
from tilewright.core.errors import ConfigError
from tilewright.masks import band, dilated, swin

GRID = list(itertools.product(range(4), range(6), range(5)))


def banded(n, window, gap, n_global):
    """Longformer's definition: both ways of a global token, or within the window at the gap."""

    def sees(q, k):
        return min(q, k) < n_global or ((k - q) % gap == 0 and abs(k - q) <= gap * (window // 2))

    return sees


def shifted(side, window, shift):
    """Swin's own: the grid is rolled, cut into windows, and three bands an axis may not mix."""
    labels = np.zeros((side, side), int)
    bands = (slice(0, -window), slice(-window, -shift), slice(-shift, None)) if shift else (slice(None),)
    for number, (y, x) in enumerate(itertools.product(bands, bands)):
        labels[y, x] = number
    cell = np.arange(side) // window
    labels = labels * side**2 + cell[:, None] * side + cell
    labels = np.roll(labels, (shift, shift), (0, 1)).ravel()
    return lambda q, k: labels[q] == labels[k]


CASES = {
    "band-20-w6-g2": banded(20, 6, 1, 2),
    "band-20-w5-g0": banded(20, 5, 1, 0),
    "band-5-w64-g5": banded(5, 64, 1, 5),
    "dilated-30-w6-d4-g1": banded(30, 6, 4, 1),
    "dilated-30-w7-d3-g0": banded(30, 7, 3, 0),
    "axial-4x7": lambda q, k: q // 7 == k // 7 or q % 7 == k % 7,
    "swin-8-w4": shifted(8, 4, 0),
    "swin-8-w4-shift": shifted(8, 4, 2),
    "swin-21-w7-shift": shifted(21, 7, 3),
    "window3d-4x6x5-w3x3x5": lambda q, k: all(
        abs(a - b) <= r for a, b, r in zip(GRID[q], GRID[k], (1, 1, 2), strict=True)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ready_pattern_is_its_definition(name):
    graph = masks.build(name)
    n = graph.n_rows
    assert graph.shape == (n, n)
    np.testing.assert_array_equal(graph.to_dense(), [[CASES[name](q, k) for k in range(n)] for q in range(n)])
    # Distinct rows are held once, in order of appearance.
    assert graph.id == graph_file.from_pattern(graph.to_csr()).id
    assert masks.size(name) >= n + len(graph.indices)


def test_bigbird_sees_blocks_around_it_the_first_and_some_at_random():
    graph = masks.build("bigbird-96-b4-w3-r2-g2")
    blocks = graph.to_dense().reshape(24, 4, 24, 4)
    assert (blocks == blocks[:, :1, :, :1]).all()
    blocks = blocks[:, 0, :, 0]
    assert blocks[:2].all() and blocks[:, :2].all()
    for own in range(2, 24):
        near = [at for at in (own - 1, own, own + 1) if 2 <= at < 24]
        assert blocks[own, near].all() and blocks[own].sum() == 2 + len(near) + 2
    assert masks.size("bigbird-96-b4-w3-r2-g2") >= graph.n_rows + len(graph.indices)


def test_the_blocks_that_bigbird_draws_are_those_of_its_seed():
    first, again = (masks.build("bigbird-96-b4-w3-r2-g2") for _ in range(2))
    assert first.id == again.id != masks.build("bigbird-96-b4-w3-r2-g2", {"seed": 1}).id


def test_bigbird_draws_no_more_blocks_than_there_are():
    assert masks.build("bigbird-16-b4-w3-r9-g1").to_dense().all()


def test_a_mix_has_three_parts_and_global_tokens():
    name = "mix-62-w5-k7-r4-g2"
    graph = masks.build(name)
    dense, own = graph.to_dense(), np.arange(62)
    assert dense[:2].all() and dense[:, :2].all() and dense[own, own].all()
    windows, kept, random = dense[2:22], dense[22:42], dense[42:]
    np.testing.assert_array_equal(windows[:, 2:], (abs(own[2:] - own[2:22, None]) <= 2))
    # The second part sees the same tokens, and each its own.
    alike = kept & ~np.eye(62, dtype=bool)[22:42]
    common = kept.sum(axis=0) > 1
    assert 7 <= common.sum() <= 9 and not (alike & ~common).any()
    assert (random[:, 2:].sum(axis=1) <= 5).all() and len(np.unique(random, axis=0)) == 20
    assert graph.id == graph_file.from_pattern(graph.to_csr()).id
    assert masks.size(name) >= graph.n_rows + len(graph.indices)


def test_a_power_law_has_the_degrees_of_its_exponent():
    name = "powerlaw-4000-d16-e2.5"
    graph = masks.build(name)
    csr = graph.to_csr()
    assert (csr != csr.T).nnz == 0 and csr.diagonal().all()
    degree = np.sort(np.asarray(csr.sum(axis=1)).ravel() - 1)[::-1]
    assert 0.85 * 16 <= degree.mean() <= 16
    # A share k^-1.5 of the tokens has more than k keys: the degree falls with the rank to the power of -1/1.5.
    ranks = np.arange(40, 1000)
    slope = np.polyfit(np.log(ranks), np.log(degree[ranks]), 1)[0]
    assert slope == pytest.approx(-1 / 1.5, abs=0.07)
    assert graph.id == graph_file.from_pattern(csr).id
    assert masks.size(name) >= graph.n_rows + len(graph.indices)


@pytest.mark.parametrize("name", ["mix-62-w5-k7-r4-g2", "powerlaw-60-d4-e3"])
def test_what_is_drawn_is_that_of_the_seed(name):
    first, again = (masks.build(name) for _ in range(2))
    assert first.id == again.id != masks.build(name, {"seed": 1}).id


@pytest.mark.parametrize("name", ["mix-1-w1-k1-r1-g0", "mix-3-w1-k3-r3-g3", "powerlaw-1-d1-e3", "powerlaw-2-d2-e2.1"])
def test_the_smallest_patterns_are_whole(name):
    graph = masks.build(name)
    assert graph.to_dense().diagonal().all()
    assert graph.id == graph_file.from_pattern(graph.to_csr()).id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mix-8-w2-k9-r1-g1", "kept: expected at most the 8 tokens, found 9"),
        ("mix-8-w2-k1-r9-g1", "n_random: expected at most the 8 tokens, found 9"),
        ("mix-8-w2-k1-r1-g9", "n_global: expected at most the 8 tokens, found 9"),
        ("mix-8-w0-k1-r1-g1", ">= 1"),
        ("powerlaw-8-d9-e2.5", "degree: expected at most the 8 tokens, found 9"),
        ("powerlaw-8-d2-e2", "> 2"),
        ("band-4-w2-g5", "n_global: expected at most the 4 tokens, found 5"),
        ("dilated-4-w2-d2-g5", "n_global: expected at most the 4 tokens, found 5"),
        ("dilated-4-w2-d0-g1", ">= 1"),
        ("swin-8-w3", "side: expected a multiple of the window of 3, found 8"),
        ("bigbird-64-b4-w2-r1-g1", "window: expected an odd number of blocks, found 2"),
        ("bigbird-66-b4-w3-r1-g1", "tokens: expected a multiple of the block of 4, found 66"),
        ("bigbird-8-b4-w3-r1-g3", "n_global: expected at most the 2 blocks, found 3"),
        ("window3d-4x4x4-w3x4x3", "window: expected odd numbers of tokens, found 3x4x3"),
        ("axial-0x4", ">= 1"),
    ],
)
def test_wrong_sizes_are_named(name, message):
    with pytest.raises(ConfigError, match=message):
        masks.build(name)


def test_heads_are_parameters_that_the_pattern_does_not_state():
    graph = masks.build("swin-8-w4", {"heads": 3, "head_dim": 32})
    assert (graph.meta["heads"], graph.meta["head_dim"], graph.meta["grid"]) == (3, 32, [8, 8])
    assert all(masks.sources(module, None) == [] for module in (band, dilated, swin))

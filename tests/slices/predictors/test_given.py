"""Patterns of a video's tokens, by their definitions, and mask functions."""

import itertools

import numpy as np
import pytest
import torch

from helpers.slices import tokens
from tilewright import slices
from tilewright.core.errors import ConfigError
from tilewright.slices.layout import Layout
from tilewright.slices.predictors import given, parse

GRID, ROWS = (4, 4, 6), 4


def spatial(q, k):
    return abs(q[0] - k[0]) <= 1


def temporal(q, k):
    return abs((q[1] - k[1]) * 6 + q[2] - k[2]) <= 3


def window(q, k):
    """Tiles of 1x2x2 in windows of 3x1x3 tiles of the 4x2x3 there are."""
    near = []
    for at, other, size, n, width in zip(q, k, (1, 2, 2), (4, 2, 3), (3, 1, 3), strict=True):
        # The window's first tile, moved into the grid.
        first = min(max(at // size - width // 2, 0), n - width)
        near.append(first <= other // size < first + width)
    return all(near)


def radial(q, k):
    frames, places = abs(q[0] - k[0]), abs((q[1] - k[1]) * 6 + q[2] - k[2])
    octave = 1
    while octave * 2 <= frames:
        octave *= 2
    return places + 1 <= 24 / octave


SETTINGS = {
    "spatial": {"reach": 1},
    "temporal": {"reach": 3},
    "window": {"tile": (1, 2, 2), "window": (3, 1, 3)},
    "radial": {},
}


def mask_of(layout, stated):
    """bool [1, 1, G, N_k]; keys of text, which all groups list, flagged too."""
    module, params = parse("given", stated)
    params.check(layout)
    mask = module.mask(params, layout, torch.device("cpu"))
    mask[..., : layout.first] = mask[..., layout.keys - layout.last :] = True
    return mask


def layout_of(n, rows=ROWS, first=0, last=0):
    # Fewer rows than kernels take, for patterns that groups of many do not fill.
    return Layout(1, 1, n - first - last, n, rows, -(-n // 64) * 64, 1, first, last)


@pytest.mark.parametrize(("sink", "text"), [(0, (0, 0)), (1, (0, 0)), (0, (0, 5)), (2, (7, 0)), (1, (2, 3))])
@pytest.mark.parametrize("name", SETTINGS)
def test_patterns_are_what_their_authors_define(name, sink, text):
    first, last = text
    places = [None] * first + list(itertools.product(*map(range, GRID))) + [None] * last
    n = len(places)
    sees = np.empty((n, n), bool)
    for (i, q), (j, k) in itertools.product(enumerate(places), enumerate(places)):
        sees[i, j] = q is None or k is None or k[0] < sink or globals()[name](q, k)
    right = np.stack([sees[lo : min(lo + ROWS, n - last)].any(0) for lo in range(first, n - last, ROWS)])
    stated = {"pattern": name, "grid": GRID, "sink": sink, **SETTINGS[name]}
    mask = mask_of(layout_of(n, first=first, last=last), stated)
    assert mask.shape == (1, 1, *right.shape) and mask.dtype == torch.bool
    np.testing.assert_array_equal(mask[0, 0].numpy(), right)
    assert not right.all()


def test_radial_bands_narrower_than_a_place_skip_frames():
    # Places of a frame: 4. At 8 to 15 frames 2 octaves less than one place: every second frame, the same place.
    mask = mask_of(layout_of(48, 1), {"pattern": "radial", "grid": (12, 2, 2)})[0, 0]
    seen = [(key // 4, key % 4) for key in mask[0].nonzero().flatten().tolist()]
    assert [t for t, place in seen if place == 0] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert [place for t, place in seen if t == 3] == [0, 1]


def test_a_few_groups_at_a_time_have_the_same_mask(monkeypatch):
    stated, layout = {"pattern": "temporal", "grid": GRID, "reach": 3}, layout_of(96)
    whole = mask_of(layout, stated)
    monkeypatch.setattr(given, "PAIRS", 200)
    assert torch.equal(mask_of(layout, stated), whole)


@pytest.mark.parametrize("of", ["none", "entry", "head", "both"])
def test_a_mask_function_is_asked_of_few_pairs_at_a_time(monkeypatch, of):
    """As many of `PAIRS`, and the mask has the entries and heads that it depends on."""
    monkeypatch.setattr(given, "PAIRS", 600)
    asked = []

    def mask(b, h, query, key):
        near = (query - key).abs() <= 3 + (b if of in ("entry", "both") else 0) + (
            2 * h if of in ("head", "both") else 0
        )
        asked.append(near.numel())
        return near

    layout = Layout(2, 3, 75, 50, 16, 64)
    found = given.of_function(mask, layout, torch.device("cpu"))
    assert found.shape == (2 if of in ("entry", "both") else 1, 3 if of in ("head", "both") else 1, 5, 50)
    assert max(asked) <= 600 < sum(asked)
    for b, h, g in np.ndindex(*found.shape[:3]):
        at = [torch.tensor(n) for n in (b, h)]
        queries = torch.arange(16 * g, min(16 * g + 16, 75))[:, None]
        assert torch.equal(found[b, h, g], mask(*at, queries, torch.arange(50)).any(0))


def test_mask_functions_are_asked_of_all_queries_of_a_group():
    q = tokens(2, 2, 75, 64)

    def mask(b, h, query, key):
        return ((query - key).abs() <= 3 + 4 * h) & (key >= b)

    lists = slices.predict(q, q, budget=1, by="given", rows=16, mask=mask)
    for b, h, g in np.ndindex(2, 2, 5):
        queries = range(16 * g, min(16 * g + 16, 75))
        right = [key for key in range(b, 75) if any(abs(query - key) <= 3 + 4 * h for query in queries)]
        assert lists.keys[b, h, g][: lists.counts[b, h, g]].tolist() == right
    # One that is the same for all heads.
    same = slices.predict(q, q, budget=1, by="given", rows=16, mask=lambda b, h, query, key: key <= query)
    assert same.counts[1, 1].tolist() == [16, 32, 48, 64, 75]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"pattern": "diagonal"}, "^predictor given: .*'diagonal'"),
        ({"pattern": "spatial", "reach": 1}, "^pattern spatial: expected grid, reach, found reach$"),
        ({"pattern": "spatial", "grid": GRID}, "^pattern spatial: expected grid, reach, found grid$"),
        ({"pattern": "radial", "grid": GRID, "reach": 1}, "^pattern radial: expected grid, found grid, reach$"),
        ({"pattern": "window", "grid": GRID, "tile": (1, 2, 2)}, "^pattern window: expected .*, found grid, tile$"),
        ({"pattern": "radial", "grid": (4, 4, 5)}, "^grid: expected 96 .* 96 keys, found 4x4x5 and 0 of text, 80"),
        ({"pattern": "radial", "grid": (4, 0, 6)}, "^predictor given: .*grid"),
        ({"pattern": "window", "grid": GRID, "tile": (1, 3, 2), "window": (1, 1, 1)}, "^tile: .* divide"),
        ({"pattern": "window", "grid": GRID, "tile": (1, 2, 2), "window": (3, 2, 1)}, "^window: expected odd numbers"),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit_are_refused(stated, message):
    with pytest.raises(ConfigError, match=message):
        mask_of(layout_of(96), stated)

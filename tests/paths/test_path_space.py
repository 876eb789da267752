"""Bases and the sets of blocks that their paths skip."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright.paths import space

OPTIONS = SimpleNamespace(
    depths=(2, 3, 1, 2), decoder="folded", knobs=("levels", "scale", "decoder"), pixels=(64, 64), channels=64, least=32
)


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_skips_and_back(skipped):
    base = Path(("11", "111", "1", "11"), levels="123")
    path = space.with_skips(base, skipped)
    assert space.skips(path).tolist() == skipped
    assert space.base_of(path) == base
    assert path.blocks[3] == "11", "stage 4 does not run: its blocks are not skipped"


def test_every_path_once():
    base = Path(("11", "1", "1", "1"))
    found = list(space.every(base))
    assert len(set(found)) == len(found) == 32
    assert found[0] == base
    assert set(space.singles(base)) <= set(found)


def test_too_many_to_list():
    with pytest.raises(ConfigError, match="expected at most 20 blocks to list all sets of, found 21"):
        next(space.every(Path(("1" * 6, "1" * 6, "1" * 6, "111"))))


def test_drawn_paths_differ_and_repeat():
    base = Path(("11", "11", "11", "11"))
    found = space.drawn(base, 40, 3)
    assert len(set(found)) == 40
    assert found == space.drawn(base, 40, 3) != space.drawn(base, 40, 4)
    assert min(space.skips(path).sum() for path in found) == 2
    # No more than there are.
    assert len(space.drawn(Path(("1",) * 4), 40, 0)) == 11


def test_bases_of_lists():
    found = space.bases(OPTIONS, {"levels": ["1234", "123"], "scale": [1.0, 0.5]})
    assert [(path.levels, path.scale) for path in found] == [("1234", 1.0), ("1234", 0.5), ("123", 1.0), ("123", 0.5)]
    assert found[0] == Path.full(OPTIONS)
    with pytest.raises(ConfigError, match="unknown width; known: levels, scale, decoder"):
        space.bases(OPTIONS, {"width": [16]})
    with pytest.raises(ConfigError, match="expected at least 32 pixels a side"):
        space.bases(OPTIONS, {"scale": [0.25]})


def test_blocks_in_order():
    base = Path(("11", "111", "1", "11"))
    assert space.free(base)[:3] == [(0, 0), (0, 1), (1, 0)]
    assert np.array_equal(space.skips(space.singles(base)[3]), np.arange(8) == 3)

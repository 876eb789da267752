"""Bases and the sets of blocks that their paths skip."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright_study.planning import block_sets

OPTIONS = SimpleNamespace(
    depths=(2, 3, 1, 2), decoder="folded", knobs=("levels", "scale", "decoder"), pixels=(64, 64), channels=64, least=32
)


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_skips_and_back(skipped):
    base = Path(("11", "111", "1", "11"), levels="123")
    path = block_sets.with_skips(base, skipped)
    assert block_sets.skips(path).tolist() == skipped
    assert block_sets.base_of(path) == base
    assert path.blocks[3] == "11", "stage 4 does not run: its blocks are not skipped"


def test_every_path_once():
    base = Path(("11", "1", "1", "1"))
    found = list(block_sets.every(base))
    assert len(set(found)) == len(found) == 32
    assert found[0] == base
    assert set(block_sets.singles(base)) <= set(found)


def test_too_many_to_list():
    with pytest.raises(ConfigError, match="expected at most 20 blocks to list all sets of, found 21"):
        next(block_sets.every(Path(("1" * 6, "1" * 6, "1" * 6, "111"))))


def test_drawn_paths_differ_and_repeat():
    base = Path(("11", "11", "11", "11"))
    found = block_sets.drawn(base, 40, 3)
    assert len(set(found)) == 40
    assert found == block_sets.drawn(base, 40, 3) != block_sets.drawn(base, 40, 4)
    assert min(block_sets.skips(path).sum() for path in found) == 2
    # No more than there are.
    assert len(block_sets.drawn(Path(("1",) * 4), 40, 0)) == 11


def test_bases_of_lists():
    found = block_sets.bases(OPTIONS, {"levels": ["1234", "123"], "scale": [1.0, 0.5]})
    assert [(path.levels, path.scale) for path in found] == [("1234", 1.0), ("1234", 0.5), ("123", 1.0), ("123", 0.5)]
    assert found[0] == Path.full(OPTIONS)
    with pytest.raises(ConfigError, match="unknown width; known: levels, scale, decoder"):
        block_sets.bases(OPTIONS, {"width": [16]})
    with pytest.raises(ConfigError, match="expected at least 32 pixels a side"):
        block_sets.bases(OPTIONS, {"scale": [0.25]})


def test_blocks_in_order():
    base = Path(("11", "111", "1", "11"))
    assert block_sets.free(base)[:3] == [(0, 0), (0, 1), (1, 0)]
    assert np.array_equal(block_sets.skips(block_sets.singles(base)[3]), np.arange(8) == 3)

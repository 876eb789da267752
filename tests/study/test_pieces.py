"""Key streams in affine pieces: exact, and fewest by brute force."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import masks
from tilewright.attention import blocks
from tilewright.attention.blocks.tiles import parse
from tilewright.core.errors import TilewrightError
from tilewright.pushmem.fit import integers
from tilewright.pushmem.settings import generate
from tilewright_study.experiments.push_streams import pieces

KEYS = st.lists(st.integers(0, 3), min_size=1, max_size=14)
LOOPS = st.lists(st.tuples(st.integers(2, 4), st.integers(-9, 9)), min_size=1, max_size=3)


def replayed(found):
    return np.concatenate([piece.keys() for piece in found])


def fewest(keys, levels):
    """The number of pieces, by trying all cuts."""

    @cache
    def rest(i):
        ends = (j for j in range(i + 1, len(keys) + 1) if integers(np.array(keys[i:j])[:, None], levels) is not None)
        return min((1 + rest(j) for j in ends), default=0)

    return rest(0)


@settings(max_examples=300, deadline=None)
@given(KEYS, st.integers(1, 3))
def test_small_streams_have_the_fewest_pieces(keys, levels):
    found = pieces.pieces(keys, levels)
    assert replayed(found).tolist() == keys
    assert all(len(piece.extents) <= levels for piece in found)
    assert len(found) == fewest(tuple(keys), levels)


@settings(max_examples=100, deadline=None)
@given(st.lists(LOOPS, min_size=1, max_size=3), st.integers(1, 3))
def test_streams_of_loops_replay_and_have_the_fewest_pieces(parts, levels):
    keys = np.concatenate([generate(*zip(*loops, strict=True)) for loops in parts])
    found = pieces.pieces(keys, levels)
    assert (replayed(found) == keys).all()
    if levels == 3:
        assert len(found) <= len(parts)
    if len(keys) <= 40:
        assert len(found) == fewest(tuple(keys.tolist()), levels)


def test_longest_pieces_first_are_not_fewest():
    # 0 1 2 3 is the longest first piece; then 10 50 57 97 and 104 are left.
    keys = [0, 1, 2, 3, 10, 50, 57, 97, 104]
    assert [len(piece.keys()) for piece in pieces.pieces(keys, 2)] == [3, 6]


def test_words_count_starts_extents_and_strides():
    assert [piece.words for piece in pieces.pieces([5])] == [2]
    assert [piece.words for piece in pieces.pieces([0, 1, 2, 10, 11, 12])] == [8]


def test_the_keys_of_blocks_are_replayed():
    cover = blocks.extract(masks.build("vil-tiny-64-s1"), parse("64x1"), 128)
    keys = pieces.stream(cover)
    found = pieces.pieces(keys)
    assert (replayed(found) == keys).all() and len(found) < len(keys) / 4


def test_what_is_no_stream_is_refused():
    with pytest.raises(TilewrightError, match=r"expected a stream of one dimension, found the shape \(2, 2\)"):
        pieces.pieces([[0, 1], [2, 3]])
    with pytest.raises(TilewrightError, match="levels: expected at least 1, found 0"):
        pieces.pieces([0], 0)

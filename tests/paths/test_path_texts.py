"""Paths as values: their text and back, and what no path may be."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError
from tilewright.networks.path import DECODERS, Path, parse

KNOBS = ("levels", "scale", "decoder", "fuse", "width")


def options(depths=(3, 4, 6, 3), decoder="folded", knobs=KNOBS, pixels=(512, 512)):
    return SimpleNamespace(depths=depths, decoder=decoder, knobs=knobs, pixels=pixels, channels=768, least=32)


@st.composite
def drawn(draw):
    """A network's options and a path of it."""
    depths = tuple(draw(st.lists(st.integers(1, 40), min_size=4, max_size=4)))
    blocks = tuple(draw(st.text("01", min_size=depth, max_size=depth)) for depth in depths)
    levels = "".join(sorted(draw(st.sets(st.sampled_from("1234"), min_size=1))))
    decoder = draw(st.sampled_from(DECODERS))
    kept = st.none() | st.integers(1, 48).map(lambda n: 16 * n)
    fuse, width = (draw(kept) if decoder == "published" else None for _ in range(2))
    scale = draw(st.sampled_from([1.0, 0.75, 0.5, 0.9, 0.625, 1 / 3]))
    return options(depths, draw(st.sampled_from(DECODERS))), Path(blocks, levels, scale, decoder, fuse, width)


@given(drawn())
def test_the_text_of_a_path_states_it(pair):
    known, path = pair
    assert parse(str(path), known) == path


@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.data())
def test_a_number_keeps_blocks_from_the_front(counts, data):
    depths = tuple(max(1, data.draw(st.integers(count, 41))) for count in counts)
    # As many digits as there are blocks, all 0 or 1, are blocks.
    stages = [str(count) for count in counts]
    path = parse(".".join(stages), options(depths))
    for stage, text, count, depth in zip(path.blocks, stages, counts, depths, strict=True):
        bits = text if len(text) == depth and set(text) <= set("01") else "1" * count + "0" * (depth - count)
        assert stage == bits


def test_what_is_not_stated_is_that_of_the_full_path():
    path = parse("3.1011.110111.110 levels=123 scale=0.75", options(decoder="published"))
    assert path == Path(("111", "1011", "110111", "110"), "123", 0.75, "published")
    assert str(path) == "111.1011.110111.110 levels=123 scale=0.75 decoder=published"
    assert parse("3.4.6.3", options()) == Path.full(options())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 4 stages, of at most 3.4.6.3 blocks, found 1"),
        ("3.4.6", "expected 4 stages, of at most 3.4.6.3 blocks, found 3"),
        ("3.5.6.3", "expected 4 0s and 1s, or how many of 4 blocks are kept, found '5'"),
        ("3.4.1101111.3", "of 6 blocks are kept, found '1101111'"),
        ("3.4.-1.3", "found '-1'"),
        ("3.4.6.3 scale=0.5 levels=123 scale=0.75", "expected each key once, found 'scale' again"),
        ("3.4.6.3 decoder=folded decoder=folded", "expected each key once, found 'decoder' again"),
        ("3.4.6.3 depth=2", "unknown key 'depth'; known: levels, scale, decoder, fuse, width"),
        ("3.4.6.3 levels=", "expected levels of 1234, at least one and in order, found ''"),
        ("3.4.6.3 levels=21", "in order, found '21'"),
        ("3.4.6.3 levels=5", "found '5'"),
        ("3.4.6.3 scale=half", "expected a number for scale, found 'half'"),
        ("3.4.6.3 scale=0", "expected a scale above 0 and at most 1, found 0"),
        ("3.4.6.3 scale=1.5", "expected a scale above 0 and at most 1, found 1.5"),
        ("3.4.6.3 scale=nan", "expected a scale above 0 and at most 1, found nan"),
        ("3.4.6.3 scale=0.05", "at least 32 pixels a side, found 26x26 at scale 0.05"),
        ("3.4.6.3 decoder=mlp", "expected a decoder of folded, published, found 'mlp'"),
        ("3.4.6.3 fuse=64", "the folded decoder takes no fuse"),
        ("3.4.6.3 decoder=published width=40", "expected width of a multiple of 16 channels, found 40"),
        ("3.4.6.3 decoder=published fuse=0", "expected fuse of a multiple of 16 channels, found 0"),
        ("3.4.6.3 decoder=published fuse=784", "expected fuse of at most 768 channels, found 784"),
    ],
)
def test_what_is_no_path_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, options())


def test_a_knob_that_the_network_lacks_is_named():
    with pytest.raises(ConfigError, match="this network takes no levels=12; its keys: scale"):
        parse("3.4.6.3 levels=12", options(knobs=("scale",)))


@pytest.mark.parametrize("blocks", [(), ("",), ("12",), ("1 ",)])
def test_blocks_are_0s_and_1s(blocks):
    with pytest.raises(ConfigError, match="expected blocks of each stage as 0s and 1s"):
        Path(blocks)

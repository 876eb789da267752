"""Descriptors of data movers: the least there are against all that exist, replayed by the loops alone."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import __main__ as cli
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.pushmem import memories, movers, streams
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.movers import Descriptor, Mover, Task, least, text

# Small limits, so that each of them is met, and all descriptors of a sequence can be tried.
SMALL = Mover("small", "a small mover", 2, 2, 3, 1, 3, 2, 4, 1, 4)


def legal(addresses, mover):
    """Whether one descriptor moves these, made several times or once: all loops are tried."""
    n, found = len(addresses), np.array(addresses)
    for times in range(1, mover.most_repeats + 1):
        if n % times:
            continue
        for sizes in itertools.product(range(1, n + 1), repeat=mover.dimensions):
            if np.prod(sizes) * times != n:
                continue
            at = [int(np.prod(sizes[:i])) for i in range(mover.dimensions + 1)]
            steps = [int(found[a] - found[0]) if size > 1 else 1 for a, size in zip(at, sizes, strict=False)]
            forward = int(found[at[-1]] - found[0]) if times > 1 else 0
            task = Task((Descriptor(int(found[0]), sizes, tuple(steps), forward),), times)
            try:
                movers.check((task,), mover)
            except MappingError:
                continue
            if np.array_equal(movers.replay((task,)), found):
                return True
    return False


@cache
def chained(addresses, mover, one=True):
    """The fewest descriptors of a chain, by trying all cuts."""
    if not addresses:
        return 0
    ends = [n for n in range(1, len(addresses) + 1) if legal(addresses[:n], mover)]
    return min(1 + chained(addresses[n:], mover) for n in ends)


def in_rounds(addresses, mover):
    """The fewest descriptors of a chain that is made several times, by trying all rounds and cuts."""
    best, once = [], Mover(**{**vars(mover), "iteration_bits": 0, "repeat_bits": 0})
    for times in range(2, mover.most_repeats + 1):
        length = len(addresses) // times
        if not length or len(addresses) % times:
            continue
        for number in range(length):
            for cuts in itertools.combinations(range(1, length), number):
                ends = [0, *cuts, length]
                chain = []
                for a, b in itertools.pairwise(ends):
                    piece = addresses[a:b]
                    answer = least.program(np.array(piece), once) if legal(piece, once) else None
                    if answer is None:
                        break
                    own = answer.tasks[0].descriptors[0]
                    forward = addresses[a + length] - addresses[a]
                    chain.append(Descriptor(own.base, own.sizes, own.steps, forward))
                task = Task(tuple(chain), times)
                if len(chain) == number + 1 and np.array_equal(movers.replay((task,)), addresses):
                    try:
                        movers.check((Task(tuple(chain[:1] * 1), times),), mover)
                        for own in chain:
                            movers.check((Task((own,), times),), mover)
                    except MappingError:
                        continue
                    best.append(len(chain))
    return min(best, default=99)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_the_least_descriptors_are_those_of_all_cuts_and_loops(addresses):
    answer = least.program(np.array(addresses), SMALL)
    fewest = min(chained(tuple(addresses), SMALL), in_rounds(tuple(addresses), SMALL))
    if fewest > SMALL.descriptors:
        assert answer.status == least.NONE and "more than 4 descriptors are needed" in answer.why
    else:
        assert (answer.status, answer.descriptors, answer.least) == (least.SOLVED, fewest, True)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_random_nests_are_moved_as_they_are_read(data):
    mover = movers.mover(data.draw(st.sampled_from(movers.NAMES)))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    strides = data.draw(st.lists(st.integers(-2, 40), min_size=len(sizes), max_size=len(sizes)))
    rounds = np.indices(sizes).reshape(len(sizes), -1)[:, :3000]
    addresses = 4000 + np.array(strides) @ rounds
    answer = least.program(addresses, mover)
    # What is solved was replayed, and checked against the limits of the mover.
    assert answer.status != least.SOLVED or answer.descriptors <= mover.descriptors
    nest = len(addresses) == np.prod(sizes) and sum(n > 1 for n in sizes) <= mover.dimensions and min(strides) > 0
    assert not nest or answer.descriptors == 1


@pytest.mark.parametrize("name", movers.NAMES)
def test_a_limit_holds_at_its_last_value_and_not_beyond(name):
    mover = movers.mover(name)
    wrap, step = mover.longest_wrap, mover.longest_step
    inner = [Descriptor(0, (n, 2), (1, 3 * n)) for n in (wrap, wrap + 1)]
    movers.check((Task((inner[0],)),), mover)
    with pytest.raises(MappingError, match=f"wraps from 1 to {wrap}"):
        movers.check((Task((inner[1],)),), mover)
    assert least.program(movers.replay((Task((Descriptor(0, (3,), (step,)),)),)), mover).descriptors == 1
    beyond = least.program(np.array([0, step + 1]), mover)
    assert beyond.descriptors == 2 and f"where {step} is the longest" in beyond.why
    # A long contiguous run has no wrap.
    run = least.program(np.arange(4 * wrap), mover)
    assert run.descriptors == 1
    # One that is longer than what moves at a time is made several times, and cut.
    long = [least.program(np.arange(n), mover) for n in (10**6, 10**7)]
    assert [answer.descriptors for answer in long] == {"aie2-core": [2, 0]}.get(name, [1, 2 - (mover.longest > 10**7)])


PATTERNS = json.loads((Path(__file__).parent / "mover_patterns.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case["name"])
def test_patterns_of_public_threads(case):
    """pieces: loops one after the other, outermost first, in elements; documented: descriptors that the thread or its
    tool takes, 1 where it does not say how many, None where it refuses; least: those that there are, None for none."""
    pieces = case["pieces"]
    rounds = [np.indices(piece["sizes"]).reshape(len(piece["sizes"]), -1) for piece in pieces]
    own = [piece["offset"] + np.array(piece["strides"]) @ each for piece, each in zip(pieces, rounds, strict=True)]
    indices = np.concatenate(own)
    answer = least.descriptors(indices, case["bytes"], movers.mover(case["device"]))
    assert answer.status == (least.NONE if case["least"] is None else least.SOLVED), answer.why
    assert answer.least or len(indices) > least.MOST_CUTS
    assert case["least"] is None or answer.descriptors == case["least"]
    assert case["documented"] is None or answer.descriptors <= case["documented"]


def test_the_page_counts_these_patterns():
    solved = [case for case in PATTERNS if case["least"] is not None]
    refused = sum(case["documented"] is None for case in solved)
    fewer = sum(case["least"] < (case["documented"] or 0) for case in solved)
    page = (Path(__file__).parents[2] / "docs" / "descriptors.md").read_text(encoding="utf-8")
    told = [int(number) for number in re.findall(r"^\| [a-z ,]+ \| (\d+) \|$", page, re.MULTILINE)]
    assert told == [len(solved) - fewer - refused, fewer, refused, len(PATTERNS) - len(solved)]
    assert f"[{len(PATTERNS)} patterns]" in page


def test_elements_smaller_than_a_granule_are_moved_with_their_neighbours():
    mover = movers.mover("aie2-shim")
    answer = least.descriptors(np.arange(64).reshape(8, 8)[:, :4].reshape(-1), 2, mover, 64)
    assert answer.tasks[0].descriptors[0] == Descriptor(0, (2, 8), (1, 4))
    torn = least.descriptors(np.arange(64)[::2], 2, mover)
    assert torn.status == least.NONE and "elements 0, 2 at place 0 are not the neighbours" in torn.why
    wide = least.descriptors(np.arange(0, 8, 2), 8, mover)
    assert np.array_equal(movers.replay(wide.tasks), [0, 1, 4, 5, 8, 9, 12, 13])


def test_bad_patterns_are_refused():
    mover = movers.mover("aie2-core")
    with pytest.raises(MappingError, match="a divisor or a multiple of 4 bytes, found 3"):
        least.descriptors(np.arange(4), 3, mover)
    with pytest.raises(MappingError, match="expected 0 to 3, found 4 at place 2"):
        least.descriptors(np.array([0, 1, 4]), 4, mover, 4)
    with pytest.raises(MappingError, match="expected 0 or more, found -1 at place 0"):
        least.descriptors(np.array([-1]), 4, mover)
    with pytest.raises(MappingError, match=r"expected integers \[n\]"):
        least.descriptors(np.zeros((2, 2)), 4, mover)
    with pytest.raises(UnknownNameError, match="unknown device 'aie2-shimm'; known: aie2-core"):
        movers.mover("aie2-shimm")
    assert least.descriptors(np.array([]), 4, mover).descriptors == 0


def test_text_counts_words_and_numbers_descriptors_by_channel():
    mover = movers.mover("aie2-memtile")
    answer = least.descriptors(np.arange(4096).reshape(64, 64).T.reshape(-1), 4, mover)
    said = text.written(answer.tasks, mover, 4096, 1)
    assert (
        "aie.dma_bd(%buffer : memref<4096xi32>, 0, 4096, [<size = 64, stride = 1>, <size = 64, stride = 64>])" in said
    )
    assert "{bd_id = 24 : i32}" in said and "sizes=[64, 64], strides=[1, 64]" in said


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--shape 8x6 --slice a[9]", 2, "error: --slice a[9]: index 9 is out of bounds"),
        ("--shape 8x6 --slice a[2::3].T", 0, "answer     1 descriptor of 16, the least there are"),
        ("--shape 8x6 --slice a[:,::-1].transpose(1,0)", 0, "answer     6 descriptors of 16"),
        ("--sizes 2,2,32,32 --strides 32,0,64,1 --dtype i16", 0, "answer     2 descriptors of 16"),
        ("--sizes 40 --strides -1 --offset 39", 1, "no legal descriptors exist: more than 16 descriptors"),
        ("--sizes 4 --strides 1,2", 2, "error: --strides: expected 1 numbers as of --sizes, found 2"),
        ("--sizes 0 --strides 1", 2, "error: --sizes: expected numbers of at least 1, found '0'"),
        ("--sizes 4 --strides 1 --dtype i12", 2, "error: --dtype: expected one of i8"),
        ("--sizes 4 --strides 1 --channel 2", 2, "error: --channel: expected 0 to 1 of AIE2 shim tile, found 2"),
        (
            "--slice a --sizes 4",
            2,
            "error: expected one of --slice, --sizes, --indices and --stream, found --slice and",
        ),
        ("--slice a", 2, "error: --slice: expected the --shape of the buffer, found none"),
        ("--sizes 3,4 --strides 2,1 --write", 2, "--write: expected each element once, found 2 at the places 2 and 4"),
        ("--sizes 3,4 --strides 4,1 --write", 0, "answer     1 descriptor of 16, the least there are"),
        ("--shape 4 --slice __import__('os')", 2, "error: --slice: expected an expression such as"),
        ("--sizes 100000,100000 --strides 1,1", 2, "--sizes: expected at most 134,217,728 elements, found 10,000,000"),
        ("--shape 100000x100000 --slice a", 2, "--shape: expected at most 134,217,728 elements, found 10,000,000,000"),
    ],
)
def test_the_command_says_what_was_found(options, status, said, capsys):
    assert cli.main(["descriptors", *options.split()]) == status
    out = capsys.readouterr()
    assert said in (out.err if status == 2 else out.out)


def test_indices_are_read_from_files(tmp_path, capsys):
    np.save(tmp_path / "own.npy", np.arange(12).reshape(3, 4))
    (tmp_path / "own.txt").write_text("3\n5\n7\n")
    (tmp_path / "bad.txt").write_text("3\nfive\n")
    for name, said in (("own.npy", "moves 12 words from 0 to 11"), ("own.txt", "moves 3 words from 3 to 7")):
        assert cli.main(["descriptors", "--indices", str(tmp_path / name)]) == 0 and said in capsys.readouterr().out
    assert cli.main(["descriptors", "--indices", str(tmp_path / "bad.txt")]) == 2


def test_words_of_a_stream_are_elements(tmp_path, capsys):
    pub, numbers = memories.member("pub").PARAMETERS, np.arange(64)
    order = numbers.reshape(8, 8).T.reshape(-1)
    streams.write(tmp_path / "own.csv", streams.of_moves(numbers, [(numbers + 80, order)], pub))
    options = ["descriptors", "--device", "aie2-core", "--stream", str(tmp_path / "own.csv")]
    assert cli.main(options) == 0 and "sizes=[8, 8], strides=[1, 8]" in capsys.readouterr().out
    streams.write(tmp_path / "own.csv", streams.of_moves(numbers, [(numbers + 80, order)] * 2, pub))
    assert cli.main(options) == 2 and "expected one input, and one output of known words" in capsys.readouterr().err


def test_a_device_with_an_unknown_limit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text("title = 'own'\nwraps = 3\n")
    monkeypatch.setattr(movers, "_FOLDER", tmp_path)
    monkeypatch.setattr(movers, "NAMES", ("own",))
    movers.mover.cache_clear()
    with pytest.raises(ConfigError, match=r"own\.toml: expected .*found wraps"):
        movers.mover("own")
    movers.mover.cache_clear()

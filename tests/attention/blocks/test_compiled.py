"""Blocks of large patterns are made by compiled functions: those of NumPy and of an oracle, to the digest."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import __main__ as command
from tilewright.attention import blocks, reorder
from tilewright.attention.blocks import Blocks, cover, cut, tiles
from tilewright.core import compiled
from tilewright.graph import from_pattern

NAMES = ("1x1", "8x1", "16x1", "32x1", "64x1", "4x8", "16x16", "16x32")


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield compiled.prepare(*cut.ENTERED)
    compiled.load.cache_clear()


def oracle_cut(dense, rows, width, gathered, bounds, overhead):
    """Row boundaries of the cheapest partition, by sets; of equal costs, the longest last groups."""
    n = len(dense)
    best, back = [0] + [None] * n, [0] * (n + 1)
    for end in range(1, n + 1):
        union = set()
        for begin in range(end - 1, max(end - rows, 0) - 1, -1):
            if begin + 1 in bounds and begin + 1 < end:
                break
            union |= set((np.flatnonzero(dense[begin]) // (1 if gathered else width)).tolist())
            keys = -(-len(union) // width) * width if gathered else len(union) * width
            cost = best[begin] + ((end - begin + cut.GROUP_ROWS) * (keys + overhead) if keys else 0)
            if best[end] is None or cost <= best[end]:
                best[end], back[end] = cost, begin
    ptr = [n]
    while ptr[-1]:
        ptr.append(back[ptr[-1]])
    return np.array(ptr[::-1], np.int32)


def oracle(dense, graph, tile, region_rows):
    """The `Blocks` of a dense pattern, block by block and run by run."""
    regions = oracle_cut(dense, region_rows, tiles.SLICE_RUN, True, (), cut.REGION_KEYS)
    row_ptr = oracle_cut(dense, tile.rows, tile.run, tile.gathered, set(regions.tolist()), cut.GROUP_KEYS)
    n_runs, run_keys, run_mask, run_entries, masks = [0], [], [], [], []
    for lo, hi in itertools.pairwise(row_ptr.tolist()):
        seen = dense[lo:hi]
        if tile.gathered:
            keys = np.concatenate([np.flatnonzero(seen.all(0)), np.flatnonzero(seen.any(0) & ~seen.all(0))])
            runs = [keys[at : at + tile.run] for at in range(0, len(keys), tile.run)]
        else:
            starts = range(0, dense.shape[1], tile.run)
            runs = [np.arange(at, min(at + tile.run, dense.shape[1])) for at in starts]
            runs = [keys for keys in runs if seen[:, keys].any()]
        for keys in runs:
            allowed = np.zeros((tile.rows, tile.run), bool)
            allowed[: hi - lo, : len(keys)] = seen[:, keys]
            run_keys.append(np.append(keys, np.full(tile.run - len(keys), -1)))
            run_entries.append(allowed.sum())
            if run_entries[-1] == (hi - lo) * tile.run:
                run_mask.append(-1)
                continue
            bits = np.packbits(allowed, axis=1, bitorder="little").tobytes()
            if bits not in masks:
                masks.append(bits)
            run_mask.append(masks.index(bits))
        n_runs.append(len(run_keys))
    shape = -1, tile.rows, -(-tile.run // 8)
    return Blocks(
        tile,
        graph.shape,
        graph.id,
        {},
        region_rows,
        regions,
        row_ptr,
        np.array(n_runs, np.int64),
        np.array(run_keys, np.int32).reshape(-1, tile.run),
        np.array(run_mask, np.int32),
        np.frombuffer(b"".join(masks), np.uint8).reshape(shape),
        np.array(run_entries, np.int32),
    )


def windows(side, reach, n_global=0):
    """Windows on a grid of `side` x `side` tokens, after tokens that see and are seen by all."""
    place = np.stack(np.divmod(np.arange(side * side), side), 1)
    near = np.abs(place[:, None] - place).max(-1) <= reach
    dense = np.ones((n_global + side * side,) * 2, bool)
    dense[n_global:, n_global:] = near
    return dense


@st.composite
def patterns(draw):
    """Random patterns with equal neighbours, rows without keys and global rows and keys; windows, bands, blocks."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["random", "windows", "band", "dilated", "blocks"]))
    if kind == "windows":
        dense = windows(draw(st.integers(3, 9)), draw(st.integers(1, 3)), draw(st.integers(0, 2)))
    elif kind == "blocks":
        dense = np.kron(np.eye(draw(st.integers(1, 6)), dtype=bool), np.ones((9, 17), bool))
    elif kind == "random":
        n_rows, n_cols = draw(st.integers(1, 80)), draw(st.integers(1, 90))
        dense = rng.random((n_rows, n_cols)) < draw(st.sampled_from([0.02, 0.2, 0.9]))
        dense = np.repeat(dense, draw(st.sampled_from([1, 5, 40])), axis=0)[:n_rows]
    else:
        at = np.arange(draw(st.integers(1, 90)))
        apart, step = at[:, None] - at, 3 if kind == "dilated" else 1
        dense = (np.abs(apart) <= 6 * step) & (apart % step == 0)
    # Rows that come again after others, as those of windows that queries share do line by line.
    dense = np.tile(dense, (draw(st.sampled_from([1, 1, 3])), 1))[:120]
    dense[rng.random(len(dense)) < draw(st.sampled_from([0.0, 0.3]))] = False
    dense[rng.random(len(dense)) < draw(st.sampled_from([0.0, 0.05]))] = True
    dense[len(dense) // 2, dense.shape[1] // 2] = True
    if draw(st.booleans()):
        dense = dense[rng.permutation(len(dense))]
    return dense


def extracted(graph, chosen, region_rows, large):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "LARGE", 0 if large else 1 << 60)
        return blocks.extract_all(graph, chosen, region_rows)


@settings(max_examples=40, deadline=None)
@given(dense=patterns(), region_rows=st.sampled_from([1, 7, 64, 128]), chunk=st.sampled_from([1, 300, 1 << 21]))
def test_compiled_and_array_functions_give_the_blocks_of_an_oracle(dense, region_rows, chunk):
    graph = from_pattern(dense)
    chosen = [tiles.parse(name) for name in tiles.fitting(NAMES, dense.shape, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "_CHUNK", chunk)
        fast, slow = (extracted(graph, chosen, region_rows, large) for large in (True, False))
    for tile in chosen:
        expected = oracle(dense, graph, tile, region_rows).id
        assert (slow[tile.name].id, fast[tile.name].id) == (expected, expected), tile.name


@pytest.mark.parametrize("order", ["none", "ic", "hc", "rcm"])
def test_windows_in_every_order_have_the_same_blocks(order):
    dense = windows(14, 3, n_global=1)
    place = np.random.default_rng(0).permutation(len(dense))
    ordered, _ = reorder.apply(from_pattern(dense[place][:, place]), order)
    chosen = [tiles.parse(name) for name in ("32x1", "64x1", "64x64")]
    fast, slow = (extracted(ordered, chosen, 128, large) for large in (True, False))
    for tile in chosen:
        assert fast[tile.name].id == slow[tile.name].id == oracle(ordered.to_dense(), ordered, tile, 128).id


@settings(max_examples=30, deadline=None)
@given(dense=patterns(), kept=st.booleans(), large=st.booleans(), chunk=st.sampled_from([1, 300, 1 << 21]))
def test_windows_counted_once_serve_every_cut(dense, kept, large, chunk):
    graph = from_pattern(dense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "LARGE", 0 if large else 1 << 60)
        patch.setattr(cut, "_KEPT", 1 << 24 if kept else 0)
        patch.setattr(cut, "_CHUNK", chunk)
        shared = cut.Windows(graph, tiles.SLICE_RUN, True, 32)
        for rows in (32, 5, 1):
            ptr = cut.cut(graph, rows, tiles.SLICE_RUN, True, windows=shared)
            assert ptr.tolist() == cut.cut(graph, rows, tiles.SLICE_RUN, True).tolist()
            groups = [dense[lo:hi].any(0).sum() for lo, hi in itertools.pairwise(ptr)]
            assert shared.sizes(ptr).tolist() == cut.unions(graph, ptr, 1, True).tolist() == groups


@pytest.mark.parametrize("large", [True, False])
def test_blocks_of_equal_rows_are_covered_once(monkeypatch, large):
    # Four lines of three squares of 16 rows each: of 16 rows a block, three kinds.
    rng = np.random.default_rng(0)
    squares = rng.random((3, 200)) < 0.5
    dense = np.tile(np.repeat(squares, 16, axis=0), (4, 1))
    graph, tile = from_pattern(dense), tiles.parse("16x1")
    # Kinds are numbered as they come, whatever the numbers of their rows.
    for each in (graph, graph.reordered(np.arange(192)[::-1], np.arange(200))):
        first, kind = cut.kinds(each, np.arange(0, 193, 16))
        assert first.tolist() == [0, 1, 2] and kind.tolist() == [0, 1, 2] * 4
    sizes = []
    module, name = (cover, "_compiled_cover") if large else (cover, "_array_cover")
    whole = getattr(module, name)

    def counted(*arguments):
        sizes.append(len(arguments[-3 if large else 1]) - 1)
        return whole(*arguments)

    monkeypatch.setattr(module, name, counted)
    found = extracted(graph, [tile], 64, large)["16x1"]
    assert found.id == oracle(dense, graph, tile, 64).id and found.n_blocks == 12 and sizes == [3]


def test_groups_of_very_unequal_heights_are_not_padded():
    dense = np.tile(np.eye(8, dtype=bool), (20, 1))
    ptr = np.concatenate((np.arange(100), [160]))
    first, kind = cut.kinds(from_pattern(dense), ptr)
    assert first.tolist() == kind.tolist() == list(range(100))
    assert cut.unions(from_pattern(dense), ptr, 1, True).tolist() == [1] * 99 + [8]


def test_many_masks_are_told_apart():
    # More masks than the first tables hold, and equal ones met again.
    dense = np.tile(np.random.default_rng(0).random((64, 900)) < 0.5, (2, 1))
    graph, tile = from_pattern(dense), tiles.parse("16x8")
    fast = extracted(graph, [tile], 128, True)["16x8"]
    assert len(fast.masks) > 400 and fast.id == oracle(dense, graph, tile, 128).id


def test_arrays_of_a_file_that_cannot_be_written_to_are_taken():
    graph = from_pattern(windows(8, 2))
    for array in (graph.indptr, graph.indices, graph.row_id):
        array.flags.writeable = False
    tile = tiles.parse("16x1")
    assert extracted(graph, [tile], 64, True)["16x1"].id == extracted(graph, [tile], 64, False)["16x1"].id


def test_no_plan_waits_for_a_compiler(tmp_path, monkeypatch, caplog):
    """A large pattern is cut by NumPy, with one warning, until someone has compiled."""
    code = (
        "import sys; import numpy as np;"
        "from tilewright import graph; from tilewright.attention import blocks;"
        "from tilewright.attention.blocks import cut, tiles;"
        "cut.LARGE = 0;"
        "made = [blocks.extract(graph.from_pattern(np.eye(40, dtype=bool)), tiles.parse('16x1')) for _ in range(2)];"
        "print('numba' in sys.modules)"
    )
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and done.stderr.count("tilewright compile") == 1
    compiled.prepare(*cut.ENTERED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n" and not done.stderr
    # Of another processor, machine code is compiled anew.
    monkeypatch.setattr(compiled, "_processor", lambda: ["another"])
    monkeypatch.delitem(sys.modules, cut.ENTERED[0])
    compiled.load.cache_clear()
    assert compiled.load(*cut.ENTERED) is None
    compiled.load.cache_clear()


def test_the_command_compiles_once(capsys):
    compiled.load.cache_clear()
    assert command.main(["compile"]) == 0
    assert capsys.readouterr().out.startswith("compiled in ")
    assert compiled._note(*cut.ENTERED).is_file()


def test_without_a_place_for_its_note_a_module_is_compiled_for_this_process(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    assert compiled.prepare(*cut.ENTERED) is compiled.load(*cut.ENTERED)
    assert "for this process alone" in caplog.text
